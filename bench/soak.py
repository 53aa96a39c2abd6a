"""A long run with faults: a tiny model, rewards in workers, over HTTP and in sandboxes, evaluations and checkpoints.

python bench/soak.py                                     10,000 updates, a fault every three minutes, for over an hour
python bench/soak.py --updates 70 --every 3 --pace 0.2 --settle 20 --flat 1.1 --hangs 150       two or three minutes

The same run is made twice: in quiet, and in trouble. In trouble something is done to it again and again, in turns: a
worker, the service or the run itself is killed (SIGKILL), the service hangs, the disk is full, a file of the newest
checkpoint is cut short. Whenever the run has ended it is started again, with the very same command. Some samples hang,
in both. In the end both must have the same weights and the same completions on disk, every process must have kept its
memory and its open files, and nothing may be left behind. Numbers go to bench/RESULTS.md by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRESS = "progress"  # in a run's folder: how many updates it has made
SAMPLE_SECONDS = 1.0
HANG_LIMIT = 3.0
START_SECONDS = 120.0


def main() -> int:
    """The verb: both runs, or one of the processes that they are made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="soak", choices=("soak", "run", "serve"))
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--every", type=float, default=180.0, help="seconds between faults, about")
    parser.add_argument("--pace", type=float, default=0.4, help="seconds that an update takes at least, in trouble")
    parser.add_argument("--settle", type=int, default=500, help="updates after which a process must not grow")
    parser.add_argument("--flat", type=float, default=1.02, help="by how much it may")
    parser.add_argument("--hangs", type=int, default=8000, help="one in so many samples hangs")
    parser.add_argument("--together", action="store_true", help="both runs at once, for machines with cores to spare")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--folder", type=Path, help="where it all goes (default: a temporary folder, which is kept)")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    options.often = max(10, options.settle // 10)  # updates between checkpoints
    if options.role == "serve":
        return serve(options.port)
    if options.role == "run":
        return run(options)
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    options.port = options.port or free_port()
    return soak(options)


# -- the run: what a user's script would be


def run(options: argparse.Namespace) -> int:
    """One run, from the start or from where it was left."""
    from rloom.cli.messages import show_messages
    from rloom.errors import RloomError

    show_messages()
    try:
        trainer = make_trainer(options)
        trainer.train(resume_from_checkpoint="auto")
        trainer.save_model()
    except RloomError as error:
        print(f"rloom: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def make_trainer(options: argparse.Namespace) -> Any:
    """A llama of ten thousand weights, on the demo's prompts, with a reward of every kind."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import rloom
    from rloom import RLOOConfig, RLOOTrainer
    from rloom.demo import task

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = task.make_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.2, **sizes, **ids)
    often = options.often
    args = RLOOConfig(
        str(options.folder), max_steps=options.updates, num_generations=4, per_device_train_batch_size=8,
        max_completion_length=6, learning_rate=1e-4, beta=0.02, num_iterations=2, save_steps=often, save_total_limit=4,
        eval_strategy="steps", eval_steps=5 * often, logging_steps=5 * often, per_device_eval_batch_size=8,
        reward_workers=2, gradient_checkpointing=False, use_cpu=True, report_to="none", disable_tqdm=True, advice=False,
        diagnosis=False,
    )  # fmt: skip
    train, held_out = task.make_prompts(256, 0), task.make_prompts(8, 0, split="held_out")
    trainer = RLOOTrainer(
        LlamaForCausalLM(config), rewards(rloom, options), args, train, held_out, processing_class=tokenizer
    )
    trainer.add_callback(pace(options))
    return trainer


def rewards(rloom: Any, options: argparse.Namespace) -> list[Any]:
    """In workers (where some samples hang), over HTTP, and in sandboxes where there are any."""
    from rloom.errors import SandboxError
    from rloom.rewards import code_execution, http_reward

    once_in = options.hangs

    @rloom.reward(isolated=True, time_limit=HANG_LIMIT)
    def in_workers(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        import time
        import zlib

        if zlib.crc32(f"{prompts[0]} {completions[0]}".encode()) % once_in == 0:
            time.sleep(1000)
        return [float(len(set(text))) for text in completions]

    found = [in_workers, http_reward(f"http://127.0.0.1:{options.port}/score", timeout=5.0, retries=8)]
    with suppress(SandboxError):
        found.append(code_execution(harness="assert len(program) > 2"))
    return found


def pace(options: argparse.Namespace) -> Any:
    """Says after each update how many there were, and waits where they come too fast."""
    from transformers import TrainerCallback

    class Pace(TrainerCallback):
        began = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with suppress(OSError), (options.folder / PROGRESS).open("w") as file:
                file.write(str(state.global_step))
            time.sleep(max(0.0, self.began + options.pace - time.monotonic()))
            self.began = time.monotonic()

    return Pace()


# -- the service


def serve(port: int) -> int:
    """A reward over HTTP, with nothing but the standard library: it starts in no time."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"scores": [text.count("1") / 2 for text in asked["completions"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()
    return 0


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# -- processes


class Process:
    """A process of ours, with the last lines that it said. They come through a pipe: its files may be full."""

    def __init__(self, role: str, options: argparse.Namespace, folder: Path, pace: float) -> None:
        given = {**vars(options), "folder": folder, "pace": pace}
        names = ("updates", "pace", "settle", "hangs", "folder", "port")
        flags = [text for name in names for text in (f"--{name}", str(given[name]))]
        line = [sys.executable, __file__, role, *flags]
        self.popen = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.said: deque[str] = deque(maxlen=200)
        self.log = folder.parent / f"{folder.name}.log"
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.log.open("a") as log:
            for text in self.popen.stderr:
                self.said.append(text.rstrip())
                log.write(text)
                log.flush()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def over(self) -> bool:
        return self.popen.poll() is not None

    def end(self) -> None:
        """Kill it, and wait for its end."""
        self.popen.kill()
        self.popen.wait()
        self.reader.join(5)


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers(pid: int) -> list[psutil.Process]:
    """The processes of a run in which rewards are called."""
    found = []
    for child in descendants(pid):
        with suppress(psutil.Error):
            if any(part.endswith("worker.py") for part in child.cmdline()):
                found.append(child)
    return found


# -- what they use


@dataclass
class Usage:
    """Memory and open files of a process, by the updates that were made."""

    kind: str
    samples: list[tuple[int, int, int]] = field(default_factory=list)

    def growth(self, settle: int) -> tuple[float, int] | None:
        """Of the last quarter over the first, after it has settled: memory as a ratio, files as a difference. None for
        one that did not live for half as long again.

        Medians of memory, since a sample may fall into a checkpoint. The fewest files, since a sandbox that runs in
        that moment has some dozens: a run has 19 to 75 open, and the median goes up and down with the machine's load.
        """
        first = self.samples[0][0]
        rest = [sample for sample in self.samples if sample[0] >= first + settle]
        if len(rest) < 8 or rest[-1][0] < first + 1.5 * settle:
            return None
        quarter = len(rest) // 4
        early, late = (list(zip(*part, strict=True)) for part in (rest[:quarter], rest[-quarter:]))
        return statistics.median(late[1]) / statistics.median(early[1]), min(late[2]) - min(early[2])


class Meter:
    """Looks at all processes of a run, once in a while."""

    def __init__(self) -> None:
        self.used: dict[tuple[int, float], Usage] = {}
        self.seen: set[psutil.Process] = set()  # what runs have started, as far as it is not over
        self._next = 0.0

    def look(self, run: Process, service: Process, step: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_SECONDS
        self.seen = {one for one in self.seen if one.is_running()} | set(descendants(run.pid))
        here = {run.pid: "run", service.pid: "service"} | {worker.pid: "worker" for worker in workers(run.pid)}
        for pid, kind in here.items():
            with suppress(psutil.Error):
                one = psutil.Process(pid)
                sample = (step, one.memory_info().rss, one.num_fds())
                self.used.setdefault((pid, one.create_time()), Usage(kind)).samples.append(sample)


# -- faults


class Trouble:
    """Does something to a run. Each fault returns how it is told of, or None where there was nothing to do it to."""

    def __init__(self, soak: Soak, seed: int) -> None:
        self.soak, self.chance = soak, random.Random(seed)
        self.kinds: dict[str, Callable[[], str | None]] = {
            "a worker is killed": self.worker,
            "the run is killed": self.run,
            "the service is killed": self.service,
            "the service hangs": self.hang,
            "the disk is full": self.disk,
            "a file is cut short": self.file,
        }
        self.turn: list[str] = []
        self.done: Counter[str] = Counter()

    def next(self) -> None:
        """The next in turn: all have been before one comes again."""
        if not self.turn:
            self.turn = list(self.kinds)
            self.chance.shuffle(self.turn)
        kind = self.turn.pop()
        what = self.kinds[kind]()
        if what is None:
            self.turn.insert(0, kind)
            return
        self.done[kind] += 1
        print(f"  update {self.soak.step}: {kind} {what}", flush=True)

    def worker(self) -> str | None:
        found = workers(self.soak.run.pid)
        if not found:
            return None
        one = self.chance.choice(found)
        with suppress(psutil.Error):
            one.kill()
        return f"(pid {one.pid})"

    def run(self) -> str | None:
        self.soak.run.end()
        return f"(pid {self.soak.run.pid})"

    def service(self) -> str | None:
        self.soak.service.end()
        return f"(pid {self.soak.service.pid})"

    def hang(self) -> str | None:
        """For longer than a request may take."""
        pid = self.soak.service.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(7.0, self._wake, (self.soak.service,)).start()
        return "for 7 s"

    @staticmethod
    def _wake(service: Process) -> None:
        if not service.over:
            os.kill(service.pid, signal.SIGCONT)

    def disk(self) -> str | None:
        """No file of the run may grow any more, until it has ended over a checkpoint that it could not write."""
        pid = self.soak.run.pid
        if not checkpoints(self.soak.folder):
            return None
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, limits[1]))
        self.soak.expected = "cannot be written to"
        return ""

    def file(self) -> str | None:
        """Of the newest checkpoint, while the run is down; there must be another."""
        found = checkpoints(self.soak.folder)
        if len(found) < 2:
            return None
        self.soak.run.end()
        names = ("model.safetensors", "optimizer.pt", "trainer_state.json", "rloom_state.pt")
        files = [file for name in names if (file := found[-1] / name).exists()]
        if not files:
            return f"({found[-1].name} was being written, and is as it is)"
        file = self.chance.choice(files)
        os.truncate(file, file.stat().st_size // 2)
        return f"({found[-1].name}/{file.name})"


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


# -- both runs


class Soak:
    """A run in a folder, kept going until it is done."""

    def __init__(self, options: argparse.Namespace, name: str, pace: float) -> None:
        self.options, self.folder, self.pace = options, options.folder / name, pace
        self.folder.mkdir(parents=True)
        self.meter, self.starts = Meter(), 0
        self.first = self.step = 0  # of this process, and of now
        self.expected: str | None = None  # what the run is to say before it ends by itself
        self.wrong: list[str] = []
        self.service, self.run = self._start("serve"), self._start("run")

    def _start(self, role: str) -> Process:
        if role == "run":
            self.starts += 1
            self.first = self.step = 0
            (self.folder / PROGRESS).unlink(missing_ok=True)
        return Process(role, self.options, self.folder, self.pace)

    def go(self, trouble: Trouble | None = None) -> None:
        """Until it has made all its updates."""
        due = time.monotonic() + self.options.every
        while not (self.run.over and self.run.popen.returncode == 0):
            self._look_after()
            if trouble and time.monotonic() > due and self._goes_well():
                trouble.next()
                due = time.monotonic() + self.options.every * trouble.chance.uniform(0.5, 1.5)
            time.sleep(0.1)

    def close(self) -> None:
        """Also when somebody stops it all."""
        for process in (self.run, self.service):
            process.end()

    def _look_after(self) -> None:
        """Start again what has ended."""
        if self.service.over:
            self.service = self._start("serve")
        if not self.run.over:
            with suppress(OSError, ValueError):
                self.step = int((self.folder / PROGRESS).read_text())
                self.first = self.first or self.step
            if self.first:
                self.meter.look(self.run, self.service, self.step)
        elif self.run.popen.returncode != 0:
            self._note_the_end(self.run)
            self.run, self.expected = self._start("run"), None

    def _goes_well(self) -> bool:
        """Not before it is ahead of where it began, nor while it is about to end over a full disk."""
        ahead = self.step >= self.first + 2 * self.options.often  # a checkpoint is won, whatever is lost
        return ahead and not (self.expected or self.run.over or self.service.over)

    def _note_the_end(self, run: Process) -> None:
        run.reader.join(5)
        last = run.said[-1] if run.said else ""
        killed = run.popen.returncode == -signal.SIGKILL
        if not killed and not (self.expected and self.expected in last):
            self.wrong.append(f"the run ended by itself: {last!r}")
            if len(self.wrong) > 3:
                raise SystemExit("\n".join(self.wrong))

    def left_behind(self) -> list[str]:
        """Processes that the run started and that are still there."""
        _, alive = psutil.wait_procs(self.meter.seen, timeout=10)
        return [f"{one.pid} ({' '.join(one.cmdline()[:3])})" for one in alive if one.is_running()]


def soak(options: argparse.Namespace) -> int:
    """Both runs, and what is to be said of them."""
    print(f"{options.updates} updates, in {options.folder}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended first
    with ThreadPoolExecutor(1) as beside:
        in_quiet = beside.submit(go_quietly, options)
        if not options.together:
            in_quiet.result()
        with timed("in trouble"), closing(Soak(options, "trouble", options.pace)) as troubled:
            trouble = Trouble(troubled, options.seed)
            troubled.go(trouble)
        quiet = in_quiet.result()
    wrong = [*quiet.wrong, *troubled.wrong, *compare(quiet.folder, troubled.folder)]
    wrong += [f"left behind: {one}" for part in (quiet, troubled) for one in part.left_behind()]
    wrong += [text for part in (quiet, troubled) for text in usage(part, options)]
    faults = ", ".join(f"{kind} {count}×" for kind, count in sorted(trouble.done.items()))
    print(f"faults: {faults}; the run was started {troubled.starts} times")
    print("\n".join(["WRONG:", *wrong]) if wrong else "all is well: the same weights, the same completions, flat")
    return 1 if wrong else 0


def go_quietly(options: argparse.Namespace) -> Soak:
    """The run without faults, with a service of its own."""
    own = argparse.Namespace(**{**vars(options), "port": free_port()})
    with timed("in quiet"), closing(Soak(own, "quiet", 0.0)) as quiet:
        quiet.go()
    return quiet


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Says how long something took."""
    began = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def compare(quiet: Path, troubled: Path) -> Iterator[str]:
    """What differs between the results of two runs."""
    from rloom.observe import read_store

    if (quiet / "model.safetensors").read_bytes() != (troubled / "model.safetensors").read_bytes():
        yield "the weights differ"
    stores = [read_store(folder) for folder in (quiet, troubled)]
    if stores[0] != stores[1]:
        odd = next((a for a, b in zip(*stores, strict=False) if a != b), None)
        yield f"the stores differ: {len(stores[0])} and {len(stores[1])} completions; the first: {odd}"
    hung = sum("timeouts" in str(row.get("failures")) for row in stores[0])
    print(f"{len(stores[0])} completions, of which {hung} hung")


def usage(soak: Soak, options: argparse.Namespace) -> Iterator[str]:
    """Prints what processes used; what has grown."""
    for kind in ("run", "worker", "service"):
        grown = [one.growth(options.settle) for one in soak.meter.used.values() if one.kind == kind]
        known = [one for one in grown if one is not None]
        if not known:
            print(f"{soak.folder.name}, {kind}: {len(grown)} processes, none of which lived long enough to be measured")
            continue
        memory, files = max(one[0] for one in known), max(one[1] for one in known)
        print(f"{soak.folder.name}, {kind}: memory × {memory:.3f}, open files {files:+d} (worst of {len(known)})")
        if memory > options.flat:
            yield f"{soak.folder.name}: the memory of a {kind} has grown by a factor of {memory:.3f}"
        if files > 0:
            yield f"{soak.folder.name}: a {kind} has {files} more open files"


if __name__ == "__main__":
    sys.exit(main())
