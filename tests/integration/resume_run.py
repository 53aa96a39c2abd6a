"""Small runs, each in a process of its own, for the tests of resume and replay.

The imports are paid for once: this program reads requests from its input, one list of JSON per line, and forks a
process for each run of a request.

    [KIND, "OUTPUT[:kill=N][:resume]", …]

A run is in OUTPUT, from the start or resumed; with `kill=N` it kills itself (SIGKILL) in the middle of update N, after
its backward, so that nothing is flushed or tidied up. The answer to a request is a line of JSON: what went wrong, or
null.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from transformers import TrainerCallback

from rloom import RLOOConfig, RLOOTrainer
from rloom.training.processes import fingerprint
from tests.conftest import make_model, make_tokenizer

ROWS = [
    {"prompt": text} for text in ["ab", "hello there", "1+1=", "a longer prompt.", "x", "sort 3 1 2>", "ok", "why."]
]

KINDS = {
    # several updates per rollout, straddling its end; shuffling; dropout; a reference that moves; running statistics
    "many updates": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "sync_ref_model": True,
        "ref_model_sync_steps": 3,
        "normalize_rewards": "running",
        "advantage_estimator": "moving_average",
        "kl_target": 0.01,
        "kl_target_gain": 1.0,
        "num_train_epochs": 2,
    },
    "straddling": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "num_train_epochs": 1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
    },
    "lora": {
        "per_device_train_batch_size": 8,
        "num_iterations": 2,
        "num_train_epochs": 1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
    },
    # checkpoints lie three updates apart; statistics and a reference that later updates depend on
    "replayed": {
        "per_device_train_batch_size": 16,
        "max_steps": 8,
        "save_steps": 3,
        "normalize_rewards": "running",
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
    "stream": {"per_device_train_batch_size": 8, "num_iterations": 2, "max_steps": 10},
}


def reward(completions, log_extra, log_metric, **kwargs):
    """Longer is better; also writes to the table and the log, which must survive a resume too."""
    log_extra("length", [len(text) for text in completions])
    log_metric("longest", float(max(len(text) for text in completions)))
    return [len(text) / 2 + text.count("a") for text in completions]


def make_trainer(output: str, kind: str) -> RLOOTrainer:
    config = RLOOConfig(
        output,
        **{
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 3e-3,
            "beta": 0.05,
            "logging_steps": 3,
            "save_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "seed": 7,
            **KINDS[kind],
        },
    )
    lora = None
    if kind == "lora":
        from peft import LoraConfig

        lora = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"])
    rows = ROWS
    if kind == "stream":
        from datasets import Dataset

        rows = Dataset.from_list(ROWS).to_iterable_dataset()
    model = make_model(attention_dropout=0.1)
    return RLOOTrainer(model, reward, config, rows, processing_class=make_tokenizer(), peft_config=lora)


def run(kind: str, output: str, kill_at: int | None, resume: bool) -> None:
    trainer = make_trainer(output, kind)
    step = trainer.training_step

    def dying_step(*args, **kwargs):
        result = step(*args, **kwargs)
        if trainer.state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.training_step = dying_step
    weights = {}

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            weights[state.global_step + 1] = fingerprint(kwargs["model"].parameters())

    trainer.add_callback(Note())
    trainer.train(resume_from_checkpoint=resume or None)
    history = [
        {k: v for k, v in entry.items() if "time" not in k and "per_second" not in k}
        for entry in trainer.state.log_history
    ]
    (Path(output) / "history.json").write_text(json.dumps(history))
    (Path(output) / "weights.json").write_text(json.dumps(weights))


def forked(kind: str, job: str) -> str | None:
    """Do a run in a process of its own. Returns what went wrong."""
    output, *flags = job.split(":")
    kills = [int(flag.removeprefix("kill=")) for flag in flags if flag.startswith("kill=")]
    child = os.fork()
    if child == 0:
        try:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # answers alone go there
            run(kind, output, kills[0] if kills else None, "resume" in flags)
        except BaseException:
            (Path(output) / "failure.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == (-signal.SIGKILL if kills else 0):
        return None
    told = Path(output) / "failure.txt"
    return f"{job} ended with {code}\n{told.read_text() if told.exists() else ''}"


def main() -> None:
    for line in sys.stdin:
        kind, *jobs = json.loads(line)
        wrong = next(filter(None, (forked(kind, job) for job in jobs)), None)
        print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
