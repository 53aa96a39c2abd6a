"""What it takes to hand weights to a vLLM server: through a folder, and into its memory.

    python bench/vllm_sync.py small folder ipc      # on a GPU, which server and trainer share
    python bench/vllm_sync.py cpu folder gloo       # anywhere

A row for each way: seconds until the server is up and proved, seconds of a sync (the best of three: all weights are
sent, the cache is emptied, a probe's log-probabilities are compared), of it the hand-over alone, and seconds of a
rollout by it. Servers are started by `rloom vllm-serve`, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine import prompts_of
from shapes import SHAPES, Shape, make_model, make_tokenizer

from rloom.generation import Sampling
from rloom.generation.vllm import VllmOptions, VllmServerEngine
from rloom.generation.vllm.outgoing import Outgoing
from rloom.generation.vllm.weights import checkpoint_weights, fingerprint


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, way: str, shape: Shape) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, "-m", "rloom", "vllm-serve", str(folder), "--port", str(port), "--transfer", way]
    command += ["--max-model-len", str(shape.prompt + shape.completion + 16), "--gpu-memory-utilization", "0.3"]
    # Compiling is for GPUs.
    command += [] if torch.cuda.is_available() else ["--vllm-flags", "--enforce-eager"]
    with (folder / f"{way}.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return server, f"http://127.0.0.1:{port}"


def measure(model: Any, address: str, shape: Shape) -> dict[str, Any]:
    began = time.perf_counter()
    sampling = Sampling(max_completion_length=shape.completion, eos_token_ids=(), pad_token_id=1)
    options = VllmOptions(mode="server", servers=(address,), timeout=300, group_port=free_port())
    engine = VllmServerEngine(lambda: model, sampling, options=options)
    row = {"ready_s": round(time.perf_counter() - began, 1)}
    server, syncs, sends = engine.servers[0], [], []
    for _ in range(3):
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        began = time.perf_counter()
        engine._ready()
        syncs.append(time.perf_counter() - began)
        with Outgoing(engine.folder, fingerprint(model)) as outgoing:
            began = time.perf_counter()
            server._send(checkpoint_weights(model, server._names), outgoing)
            sends.append(time.perf_counter() - began)
    rollouts = []
    for seed in range(2):
        began = time.perf_counter()
        list(engine.generate(prompts_of(shape), shape.k, seed=seed))
        rollouts.append(time.perf_counter() - began)
    numbers = {"sync_s": min(syncs), "send_s": min(sends), "rollout_s": min(rollouts)}
    return row | {name: round(value, 3) for name, value in numbers.items()}


def main() -> None:
    name, *ways = sys.argv[1:]
    shape = SHAPES[name]
    model = make_model(shape, torch.bfloat16 if torch.cuda.is_available() else torch.float32).eval()
    gigabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        for way in ways:
            server, address = start(Path(folder), way, shape)
            try:
                row = {"shape": name, "way": way, "weights_gb": round(gigabytes, 2), **measure(model, address, shape)}
                print("RESULT", json.dumps(row), flush=True)
            except Exception:
                print((Path(folder) / f"{way}.log").read_text()[-20000:], file=sys.stderr)
                raise
            finally:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


if __name__ == "__main__":
    main()
