"""Small runs for test_processes: the same function in one process, and in each of several under torchrun.

    torchrun --nproc_per_node 2 processes_run.py OUTPUT KIND …

Runs of one launch come one after the other, so that the imports are paid for once. Each process leaves what it saw in
OUTPUT/KIND/result_RANK.pt.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import save_file

from rloom import RLOOConfig, RLOOTrainer, term
from rloom.generation.vllm import remote
from rloom.models import model_checks
from rloom.training import checkpoint, heartbeat, placement, whole_copy
from tests import vision_models
from tests.conftest import make_model, make_tokenizer
from tests.parity import draws, test_oracle

TEXTS = ["ab", "hello there", "1+1=", "a long prompt, much longer.", "x", "sort 3 1 2>", "why.", "0"]
ROWS = [{"prompt": text, "summary": "a text."} for text in TEXTS]

LAUNCHED_WITH_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}

IN_PARTS: dict[str, Any] = {"fsdp": True, "fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}

COPIES: dict[str, dict[str, Any]] = {
    "kept": {"keep_whole_copy": True},
    "freed": {"keep_whole_copy": False},
    # instead of layer by layer
    "whole": {"ds3_gather_for_generation": True},
}

COMPLETIONS = 16  # per rollout, over all processes
KINDS: dict[str, dict[str, Any]] = {
    # whole completions, the KL in the reward, the training forward's own log-probabilities
    "sequence": {"beta": 0.1},
    # tokens as denominator; a KL in the loss; micro-batches of a prompt or two, unequally many in each process
    "token": {"beta": 0.1, "kl_placement": "loss", "kl_estimator": "k3", "loss_aggregation": "token_mean",
              "ratio_level": "token", "max_tokens_per_micro_batch": 40},
    # statistics over the batch and over the run, at every place where there are some
    "whitened": {"beta": 0.05, "normalize_advantages": True, "normalize_rewards": "running",
                 "advantage_estimator": "moving_average", "truncated_completions": "exclude"},
    "batch": {"beta": 0.05, "normalize_rewards": "batch", "advantage_estimator": "batch_mean",
              "kl_placement": "reward_tokens", "ratio_level": "token", "normalize_advantages": True},
    # several updates on a rollout, each with its share of every process; a reference that moves; older metrics
    "several": {"beta": 0.1, "steps": 2, "num_iterations": 2, "sync_ref_model": True, "ref_model_sync_steps": 2,
                "max_steps": 6, "log_older_metrics": True, "kl_target": 0.01, "kl_target_gain": 1.0},
    "lora": {"beta": 0.1, "learning_rate": 1e-2},
    # the head is used again after the forward, and in the backward; layers are run forward twice
    "lora over bfloat16": {"beta": 0.1, "learning_rate": 1e-2},
    "exact": {"beta": 0.1, "kl_placement": "loss", "kl_estimator": "full"},
    "checkpointed": {"beta": 0.1, "gradient_checkpointing": True},
    # a checkpoint that another number of processes goes on from
    # the copy that samples is bfloat16, and so is what is gathered: both run the same numbers
    "half": {"beta": 0.1, "bf16": True, "max_steps": 1, "max_completion_length": 64},
    # biases are trained beside the adapter; only the head has an adapter, so that no layer is in the backward's graph
    "lora with biases": {"beta": 0.1, "learning_rate": 1e-2},
    "lora on the head": {"beta": 0.1, "learning_rate": 1e-2},
    "saved lora": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2},
    "saved bfloat16": {"beta": 0.1, "max_steps": 4, "save_steps": 2},
    "saved half": {"beta": 0.1, "bf16": True, "max_steps": 4, "save_steps": 2},
    # a weight that processes cannot share evenly; the optimizer's state on the host; the end of a run is its middle
    "saved odd": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "weight_decay": 0.5},
    "saved offloaded": {"beta": 0.1, "max_steps": 4, "save_steps": 2},
    "saved best": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
                   "per_device_eval_batch_size": 4, "num_generations_eval": 2, "load_best_model_at_end": True,
                   "metric_for_best_model": "eval_kl", "greater_is_better": False},
    "saved": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "images": {"beta": 0.1, "engine": None, "max_completion_length": 4, "log_completions": True,
               "num_completions_to_print": 1},
    "bfloat16": {"beta": 0.1},
    "transformers": {"beta": 0.1, "engine": "transformers"},
    # groups without signal: skipped, replaced; one process may have nothing to learn from
    "degenerate": {"beta": 0.0, "max_tokens_per_micro_batch": 30, "weight_decay": 0.5},
    "replaced": {"beta": 0.0, "dynamic_sampling": 2},
    "evaluated": {"beta": 0.1, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4,
                  "num_generations_eval": 2, "eval_reference_column": "summary"},
    "dropout": {"beta": 0.1, "steps": 2, "num_iterations": 2, "max_steps": 6, "save_steps": 1, "logging_steps": 3,
                "sync_ref_model": True, "ref_model_sync_steps": 3, "normalize_rewards": "running"},
    "out of memory": {"beta": 0.1, "max_tokens_per_micro_batch": 200},
    "busy": {"beta": 0.0, "max_steps": 1},
    "frozen": {"beta": 0.0, "max_steps": 1},
    "stopped": {"beta": 0.1, "max_steps": 5, "logging_steps": 2},
    # the last process is told to end; another time-out than the other runs have
    "signalled": {"beta": 0.1, "max_steps": 5, "ddp_timeout": 777},
    # a diagnosis of the main process ends the run, and all processes write the checkpoint
    "ended early": {"beta": 0.1, "max_steps": 8, "max_completion_length": 2, "early_stop_patience": 2,
                    "early_stop_on": ["completions_are_cut_off", "nothing_ends"]},
    "killed": {"beta": 0.1, "max_tokens_per_micro_batch": 40},
    "failing": {"beta": 0.1},
    # without a KL, of which nothing is left beside such scores; DeepSpeed's schedules wait for updates that it skips
    "not finite": {"beta": 0.0, "lr_scheduler_type": "constant"},
    # by the server whose address is in RLOOM_TEST_SERVER
    "vllm": {"beta": 0.1, "engine": "vllm", "vllm_mode": "server", "learning_rate": 1e-2},
    # no process has a copy of all weights; in the second kind since there is no room for one
    "layered vllm": {"beta": 0.1, "engine": "vllm", "vllm_mode": "server", "learning_rate": 1e-2,
                     "ds3_gather_for_generation": False},
    "layered vllm lora": {"beta": 0.1, "engine": "vllm", "vllm_mode": "server", "learning_rate": 1e-2,
                          "ds3_gather_for_generation": False},
    "crowded vllm": {"beta": 0.1, "engine": "vllm", "vllm_mode": "server", "learning_rate": 1e-2},
    # sharded weights are run layer by layer, or the same engine runs the whole copy; completions end at other times
    "layered": {"beta": 0.1, "max_steps": 2, "engine": "forked", "steps": 2, "max_tokens_per_micro_batch": 20,
                "ds3_gather_for_generation": False, "shuffle_dataset": False},
    "layered scarce": {"engine": "forked", "ds3_gather_for_generation": False, "fsdp": True},
    "layered lora": {"beta": 0.1, "max_steps": 2, "engine": "forked", "learning_rate": 1e-2,
                     "max_tokens_per_micro_batch": 40, "ds3_gather_for_generation": False},
    # the main process alone reads the weights, of which one is tied, in the second kind although its file has it under
    # both names; the reference is another model by its name
    "by name": {"beta": 0.1, "model_init_kwargs": {"dtype": "float32"}},
    "layered by name": {"beta": 0.1, "max_steps": 2, "engine": "forked", "ds3_gather_for_generation": False},
    "layered with another reference": {"beta": 0.1, "max_steps": 1, "engine": "forked",
                                       "ds3_gather_for_generation": False},
    "layered half": {"beta": 0.1, "bf16": True, "max_steps": 1, "engine": "forked", "max_completion_length": 64,
                     "ds3_gather_for_generation": False},
    # the last process has no batch of the second round, and fewer micro-batches
    "layered evaluated": {"beta": 0.1, "max_steps": 2, "engine": "forked", "eval_strategy": "steps", "eval_steps": 1,
                          "per_device_eval_batch_size": 4, "num_generations_eval": 2,
                          "eval_reference_column": "summary", "max_tokens_per_micro_batch": 30,
                          "ds3_gather_for_generation": False},
    # groups without signal are replaced in one process alone, and so evaluated
    "layered replaced": {"beta": 0.1, "max_steps": 2, "engine": "forked", "dynamic_sampling": 2,
                         "ds3_gather_for_generation": False, "eval_strategy": "steps", "eval_steps": 2,
                         "per_device_eval_batch_size": 4},
    # a reference in parts that follows the policy, and lies on the host
    "saved layered": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "engine": "forked", "sync_ref_model": True,
                      "ref_model_sync_steps": 1, "offload_reference": True, "ds3_gather_for_generation": False},
    "saved layered half": {"beta": 0.1, "bf16": True, "max_steps": 4, "save_steps": 2, "engine": "forked",
                           "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.01,
                           "ds3_gather_for_generation": False},
    "saved layered lora": {"beta": 0.1, "max_steps": 4, "save_steps": 2, "engine": "forked", "sync_ref_model": True,
                           "ref_model_sync_steps": 1, "learning_rate": 1e-2, "ds3_gather_for_generation": False},
    # an adapter that was trained before: the reference has a copy of it
    "layered old lora": {"beta": 0.1, "max_steps": 2, "engine": "forked", "learning_rate": 1e-2,
                         "ds3_gather_for_generation": False},
    # an adapter that is computed from the base weights; a model that could have images, and has none
    "pissa lora by name": {"beta": 0.1, "max_steps": 2, "engine": "forked", "learning_rate": 1e-2,
                           "ds3_gather_for_generation": False},
    "layered text of a vision model": {"beta": 0.1, "max_steps": 2, "engine": None,
                                       "ds3_gather_for_generation": False},
    "corners": {"beta": 0.1, "engine": "forked", "log_completions": os.environ.get("RANK", "0") == "0",
                "num_completions_to_print": 1, "per_device_eval_batch_size": 4},
}  # fmt: skip

# One process has long prompts and the other short ones, so that they have unequally many micro-batches.
UNEQUAL = [{"prompt": text} for text in ["x" * 90, "a", "y" * 80, "b"] * 2]
ROWS_OF: dict[str, list[dict[str, Any]]] = {"layered": UNEQUAL}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def by_length(completions, log_extra, log_metric, **kwargs):
    """Longer is better, and an `a` is; writes to table and log too."""
    completions = [_text(one) for one in completions]
    log_extra("length", [len(text) for text in completions])
    log_metric("share", sum("a" in text for text in completions) / len(completions))
    return [len(text) / 2 + text.count("a") for text in completions]


def second(completions, **kwargs):
    """Has no opinion on some."""
    return [None if "b" in text else float(text.count("e")) for text in map(_text, completions)]


def seldom(prompts, completions, **kwargs):
    """Only two of the prompts are ever rewarded."""
    return [float(len(text)) if prompt in TEXTS[:2] else 1.0 for prompt, text in zip(prompts, completions, strict=True)]


def failing(completions, **kwargs):
    """Fails in one process alone."""
    if rank() == count() - 1:
        raise ValueError("the reward of the last process has failed")
    return [1.0] * len(completions)


def busy(completions, **kwargs):
    """Keeps one process busy for longer than a silence may last, at each call: half of it asleep, half in Python."""
    if rank() == count() - 1:
        time.sleep(1.5)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            pass
    return [1.0] * len(completions)


def stopped(completions, **kwargs):
    """Stops one process, as a machine that freezes; another one wakes it up."""
    if rank() == count() - 1:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    return [1.0] * len(completions)


def told_to_end(completions, trainer_state, **kwargs):
    """In the second update one process gets what a machine sends that is taken back."""
    if rank() == count() - 1 and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(_text(one))) for one in completions]


JUDGED: list[str] = []


def longer(prompts, completions, **kwargs):
    """A judge: the share of a pair that each wins."""
    JUDGED.append(prompts[0])
    first, other = (len(text) for text in completions)
    return [float(first > other), float(first <= other)]


def overflows(completions, trainer_state, **kwargs):
    """In the second update, numbers whose gradient is none."""
    scores = [float(len(_text(one))) for one in completions]
    return [3e38 * (-1) ** index for index in range(len(scores))] if trainer_state.global_step == 1 else scores


REWARDS: dict[str, Any] = {
    "not finite": [overflows],
    "degenerate": [seldom],
    "replaced": [seldom],
    "layered replaced": [seldom],
    "failing": [failing],
    "busy": [busy],
    "frozen": [stopped],
    "signalled": [told_to_end],
    "dropout": [by_length],  # without scores that are NaN, which is equal to nothing
    "whitened": [term(by_length, normalize=True), term(second, weight=0.5, only_if=by_length, at_least=0.5)],
}


def make_trainer(
    output: Path, kind: str, *, engine: Any = None, rows: Any = None, by_name: bool = False, **changes: Any
) -> RLOOTrainer:
    options = dict(KINDS[kind])
    steps = options.pop("steps", 1)
    if "vllm" in kind:
        options["vllm_server_base_url"] = os.environ["RLOOM_TEST_SERVER"]
        options["vllm_group_port"] = 0
    config = RLOOConfig(
        # As `./out`, which paths that are compared must be the same as.
        f"{output.parent}/./{output.name}",
        **{
            "per_device_train_batch_size": COMPLETIONS // count() // steps,
            "steps_per_generation": steps,
            "num_generations": 4,
            "max_completion_length": 8,
            "learning_rate": 3e-3,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "steps" if kind == "dropout" or kind.startswith("saved") else "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "engine": "native",
            "seed": 7,
            **options,
            **changes,
        },
    )
    model, processing_class = (
        make_model(seed=rank() + 1 if kind == "sequence" else 1, **_changes(kind)),
        make_tokenizer(),
    )
    if kind == "degenerate":  # a weight that no forward uses: it has no gradient, and does not decay
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(2)))
    if kind == "saved odd":
        model.register_parameter("spare", torch.nn.Parameter(torch.arange(1.0, 4.0)))
    if kind == "images":
        (model, processing_class), rows = vision_models.make("qwen3-vl"), _with_images()
    if kind == "layered text of a vision model":
        (model, processing_class), rows = (
            vision_models.make("qwen3-vl"),
            [{"prompt": row["prompt"]} for row in _with_images()],
        )
        config.engine = config.engine if count() > 1 else "forked"
    lora = None
    if "lora" in kind:
        from peft import LoraConfig

        lora = LoraConfig(
            r=4,
            target_modules=["lm_head"] if kind == "lora on the head" else ["q_proj", "v_proj"],
            bias="all" if kind == "lora with biases" else "none",
            init_lora_weights="pissa" if "pissa" in kind else True,
        )
    if by_name or "by name" in kind:
        model = _saved(model, output / "model", both_names=kind == "layered by name")
    if kind == "layered with another reference":
        config.sft_model_path = _saved(make_model(seed=2), output / "other")
        model = _saved(model, output / "model")
    if kind == "layered old lora":
        model, lora = _trained_before(model, lora), None
    judge = {"eval_judge": longer} if "eval_reference_column" in options else {}
    return RLOOTrainer(
        model.bfloat16() if kind.endswith("bfloat16") else model,
        REWARDS.get(kind, [by_length, second]),
        config,
        ROWS_OF.get(kind, ROWS) if rows is None else rows,
        ROWS[: 5 if "layered" in kind else 7] if config.eval_strategy != "no" else None,
        processing_class=processing_class,
        peft_config=lora,
        engine=engine,
        **judge,
    )


def _saved(model: Any, folder: Path, *, both_names: bool = False) -> str:
    """The name of a model, which one process writes. Others must not load it before.

    `both_names`: the head is there too, although it is tied, as in files of other libraries.
    """
    if rank() == 0:
        model.save_pretrained(folder)
        if both_names:
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if count() > 1:
        torch.distributed.barrier()
    return str(folder)


def _trained_before(model: Any, lora: Any) -> Any:
    """A model with an adapter that does something already."""
    from peft import get_peft_model

    model = get_peft_model(model, lora)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(3))
    return model


def _with_images() -> list[dict[str, Any]]:
    sizes = [(28, 28), (56, 28), (28, 56), (56, 56)]
    chats = [[{"role": "user", "content": f"what is it{'?' * number}"}] for number in range(8)]
    return [
        {"prompt": chat, "images": [vision_models.picture(n, *sizes[n % 4])] if n % 3 else []}
        for n, chat in enumerate(chats)
    ]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _changes(kind: str) -> dict[str, Any]:
    if kind == "lora with biases":
        return {"attention_bias": True}
    if "vllm" in kind:
        # Heads of 32: smaller ones vLLM's attention on a CPU does not know.
        return {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    if "by name" in kind:
        return {"tie_word_embeddings": True}
    return {"attention_dropout": 0.1} if kind == "dropout" else {}


def run(
    output: Path, kind: str, *, resume: bool = False, save: bool = False, save_all: bool = False, **changes: Any
) -> dict[str, Any]:
    """One run, and what this process saw of it."""
    received, at_once = _count_received()
    if kind == "layered scarce" and rank() == count() - 1:
        model_checks._why_not_packed_text = _as_good_as_none_left
    trainer = make_trainer(output, kind, **changes)
    assert trainer.args.world_size == trainer.accelerator.num_processes == count()
    apart: list[str] = []
    judged = len(JUDGED)
    if kind == "out of memory":
        _run_out_once(trainer)
    if kind == "stopped":
        _ask_for_the_end(trainer)
    if kind == "killed":
        _kill_in_an_update(trainer)
    _look_after_updates(trainer, apart)
    memory = _look_at_the_copy(trainer) if trainer.args.keep_whole_copy is not None else []
    if kind.startswith("saved") and "deepspeed" in changes and not resume:
        _let_deepspeed_save_too(trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    if save or save_all:
        trainer.save_model(str(output / "last"))
    if save_all:
        trainer._save_optimizer_and_scheduler(str(output / "last"))
    trainer.processes.gather_weights()
    whole = trainer.processes.without_gradient(trainer.model)
    return {
        "world": trainer.accelerator.num_processes,
        "weights": {name: _whole(p).detach().clone() for name, p in whole.named_parameters()},
        "memory": memory,
        # where a reference in parts lies
        "reference_on": {own.device.type for own in _parts_of_reference(trainer)},
        # weights that this process had no data of
        "received": len(received),
        # weights that lay here as a whole at a time
        "at_once": max(at_once, default=0),
        "dtypes": {p.dtype for p in trainer.model.parameters()},
        "parts": sum(trainer.processes.own_part(p).numel() for p in trainer.model.parameters()),
        "history": [{k: v for k, v in e.items() if "time" not in k and "per_second" not in k}
                    for e in trainer.state.log_history],
        "fingerprints": apart,
        "drawn": trainer.drawn,
        # micro-batches of each pass without gradient
        "rounds": trainer.rounds,
        "judged": JUDGED[judged:],
        "wrapped": type(trainer.model_wrapped).__name__,
        "stage": getattr(trainer.model_wrapped, "zero_optimization_stage", int)(),
        "state": checkpoint.state_of(trainer._components(), trainer._plan()),
    }  # fmt: skip


def _parts_of_reference(trainer: Any) -> list[Any]:
    model = getattr(trainer.reference, "model", None)
    return [p.to_local() for p in model.parameters() if hasattr(p, "to_local")] if model is not None else []


def _whole(p: Any) -> Any:
    if hasattr(p, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([p]):
            return p.data.clone()
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def _count_received() -> tuple[list[Any], list[int]]:
    """Shapes of weights that come from the main process into a model without data, and how many of those that have come
    are still there as a whole when the next one comes."""
    shapes, come, at_once, brought = [], list[Any](), list[int](), placement.Placement._brought

    def counting(self: Any, p: Any) -> Any:
        shapes.extend([p.shape] if p.is_meta else [])
        placed = brought(self, p)
        come.append(weakref.ref(placed))
        at_once.append(len({id(one()) for one in come if one() is not None}))
        return placed

    placement.Placement._brought = counting  # type: ignore[method-assign]
    return shapes, at_once


def _look_at_the_copy(trainer: Any) -> list[tuple[int, int, int]]:
    """In the first update: bytes of the copy before it and in it, and how many bytes less all tensors take in it."""
    found: list[tuple[int, int, int]] = []
    enter, processes = trainer.processes.in_step, trainer.processes

    def looking() -> Any:
        if found:  # once is enough: it takes a second
            return enter()
        before, whole = _tensor_bytes(), processes._copy.nbytes if getattr(processes, "_copy", None) else 0
        entered = enter()
        left = processes._copy.nbytes if whole else 0
        found.append((whole, left, before - _tensor_bytes()))
        return entered

    trainer.processes.in_step = looking
    return found


def _tensor_bytes() -> int:
    """Bytes of all tensors that are alive."""
    import gc

    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def corners(output: Path, **changes: Any) -> dict[str, Any]:
    """Data that comes in streams, fewer batches than processes, several sets to evaluate on, predictions."""
    from datasets import Dataset

    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    trainer = make_trainer(output, "corners", rows=stream, **changes)
    found = [trainer.evaluate(ROWS[:1]), trainer.evaluate({"a": ROWS[:5], "b": ROWS[5:]}), trainer.evaluate(stream)]
    trainer.train()
    predicted = trainer.predict(ROWS[:5]).metrics
    return {
        "world": trainer.accelerator.num_processes,
        "weights": {name: _whole(p).detach().clone() for name, p in trainer.model.named_parameters()},
        "history": [{k: v for k, v in entry.items() if "time" not in k and "per_second" not in k}
                    for entry in [*found, predicted]],
        "table": trainer.completion_log.table(step=3),
    }  # fmt: skip


def run_signalled(output: Path) -> dict[str, Any]:
    """A run that one process is told to end, and how it ends in this one."""
    trainer, code = make_trainer(output, "signalled"), None
    try:
        trainer.train()
    except SystemExit as error:
        code = error.code
    group = torch.distributed.distributed_c10d._get_default_group()
    waits = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return {"world": count(), "code": code, "step": trainer.state.global_step, "waits": waits}


def leave_operators_uncompiled() -> None:
    """DeepSpeed's operator for the host's memory would be compiled without end at the start."""
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def zero_config(stage: int) -> dict[str, Any]:
    """DeepSpeed's, in float32."""
    leave_operators_uncompiled()
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": False}, "zero_optimization": {"stage": stage},
    }  # fmt: skip


def run_saved_zero(output: Path, folder: Path, kind: str) -> dict[str, Any]:
    """`zeroN KIND` saves what DeepSpeed itself would save as well, and `zeroN resumed KIND` goes on from the middle of
    that run, `zeroN own KIND` with what DeepSpeed has saved. `zeroN KIND from RUN` goes on from the middle of another
    run, and `zeroN again KIND from RUN` saves what it has loaded from it."""
    stage, _, kind = kind.partition(" ")
    how, what = kind.partition(" from ")[0].split("saved")
    what, how, run_before = f"saved{what}", how.strip(), kind.partition(" from ")[2]
    config, options = zero_config(int(stage.removeprefix("zero"))), {}
    if what in ("saved half", "saved bfloat16"):
        config["bf16"], options["bf16"] = {"enabled": True}, True
    if what == "saved offloaded":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        # DeepSpeed's own optimizer for the host would be compiled.
        config["zero_force_ds_cpu_optimizer"] = False
    before = Path(run_before) if run_before else output / f"{stage} {what}" if how else None
    if before is not None and rank() == 0:
        cut_off_after(before, folder, step=2)
        if how == "own":  # as checkpoints were before rloom wrote them itself
            (folder / "checkpoint-2" / "optimizer.pt").unlink()
            (folder / "checkpoint-2" / "rloom_manifest.json").unlink()
            shutil.copytree(before / "own-2", folder / "checkpoint-2", dirs_exist_ok=True)
        (folder / "ready").touch()
    while before is not None and not (folder / "ready").exists():  # processes do not know each other yet
        time.sleep(0.05)
    if how == "again":
        options["max_steps"] = 2
    return run(folder, what, resume=before is not None, save_all=how == "again", deepspeed=config, **options)


def run_draw(output: Path, number: int, dtype: torch.dtype = torch.float64, **sharding: Any) -> dict[str, Any]:
    """A run of the oracle's draws, in one process or in several, sharded."""
    drawn = draws.draw_run(number)
    drawn.options["per_device_train_batch_size"] //= count()
    # Processes have seeds of their own for an engine whose noise does not depend on the prompt.
    script = drawn.script
    drawn.script = lambda prompt, sample, seed: script(prompt, sample, 0)  # type: ignore[method-assign]
    drawn.options |= sharding
    make = drawn.model
    drawn.model = lambda: make().to(dtype)  # type: ignore[method-assign]
    trainer, _, _ = test_oracle.train(drawn, output)
    trainer.processes.gather_weights()
    whole = trainer.processes.without_gradient(trainer.model)
    return {
        "world": count(),
        "weights": {name: p.detach().clone() for name, p in whole.named_parameters()},
        "parts": sum(trainer.processes.own_part(p).numel() for p in trainer.model.parameters()),
        "wrapped": type(trainer.model_wrapped).__name__,
        "history": [
            # The scripted engine's log-probabilities are made up.
            {k: v for k, v in entry.items() if not any(word in k for word in ("time", "per_second", "mismatch"))}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
    }


def can_be_halved(number: int) -> bool:
    """Whether two processes can have half of each part of a rollout in whole groups, and nothing goes missing."""
    drawn = draws.draw_run(number)
    options = drawn.options
    half, rest = divmod(options["per_device_train_batch_size"], 2)
    # A router's loss is taken per micro-batch, and these are others.
    routed = drawn.kind == "experts" and options.get("router_aux_loss_coef") != 0.0
    return not (rest or half % options["num_generations"] or drawn.stream or drawn.loses or routed)


def _look_after_updates(trainer: Any, fingerprints: list[str]) -> None:
    """Note the weights after each update, and what was generated."""
    from transformers import TrainerCallback

    from rloom.training.processes import fingerprint

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            fingerprints.append(fingerprint(map(trainer.processes.own_part, kwargs["model"].parameters())))

    trainer.add_callback(Look())
    trainer.drawn = []
    trainer.rounds = []
    generate = trainer.collector._generate
    plan = trainer.learner.passes.batcher.plan

    def planned(*args: Any, **options: Any) -> Any:
        plans = plan(*args, **options)
        if not torch.is_grad_enabled():
            trainer.rounds.append(len(plans))
        return plans

    def noting(*args: Any) -> Any:
        groups = generate(*args)
        trainer.drawn += [(g.prompt.content, [c.token_ids for c in g.completions]) for g in groups]
        return groups

    trainer.collector._generate = noting
    trainer.learner.passes.batcher.plan = planned


def _let_deepspeed_save_too(trainer: Any) -> None:
    """Beside each checkpoint lies what DeepSpeed itself saves at that moment."""
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            folder = Path(args.output_dir) / f"own-{state.global_step}"
            trainer.model_wrapped.save_checkpoint(str(folder))
            if rank() == 0:
                torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")

    trainer.add_callback(Save())


def _ask_for_the_end(trainer: Any) -> None:
    """A callback of the last process alone wants a log after the first update, and no update after the third."""
    from transformers import TrainerCallback

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log |= state.global_step == 1
            control.should_training_stop |= state.global_step == 3

    if rank() == count() - 1:
        trainer.add_callback(Enough())


def _kill_in_an_update(trainer: Any) -> None:
    """The last process is killed between a forward and its backward."""
    loss = trainer.learner.loss

    def last(model: Any, batch: Any) -> Any:
        result = loss(model, batch)
        if rank() == count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    trainer.learner.loss = last


def _as_good_as_none_left(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("as good as none left")


def _run_out_once(trainer: Any) -> None:
    """The last process runs out of memory once, in the middle of an update."""
    loss, left = trainer.learner.loss, [rank() == count() - 1]

    def scarce(model: Any, batch: Any) -> Any:
        result = loss(model, batch)
        if left[0]:
            left[0] = False
            raise torch.OutOfMemoryError("as good as none left")
        return result

    trainer.learner.loss = scarce


def main() -> None:
    output, *kinds = sys.argv[1:]
    heartbeat.BEAT_SECONDS = 0.2
    for kind in kinds:
        folder = Path(output) / kind.partition(" from ")[0]
        # Weights are sent in several pieces, where they are gathered on their way.
        remote.PIECE_BYTES = 20_000
        if "crowded" in kind:
            whole_copy.free_memory = lambda device: 100_000
        if kind == "busy":  # and what comes after it: a silence of two seconds is named
            heartbeat.SILENT_SECONDS = 2.0
        if kind == "corners":
            result = corners(folder)
        elif kind == "signalled":
            result = run_signalled(folder)
        elif kind.endswith(" corners"):
            config = {"deepspeed": zero_config(int(kind[4]))} if kind.startswith("zero") else {"fsdp": True}
            result = corners(folder, **config, ds3_gather_for_generation="layered" not in kind)
        elif kind in ("resumed", "sharded resumed"):  # the middle of an earlier run goes on in a folder of its own
            sharded = kind.startswith("sharded")
            if rank() == 0:
                cut_off_after(Path(output) / ("sharded dropout" if sharded else "dropout"), folder, step=3)
            torch.distributed.barrier()
            result = run(folder, "dropout", resume=True, **({"fsdp": True} if sharded else {}))
        elif kind == "half resumed":  # what the second process had kept is lost
            if rank() == 0:
                cut_off_after(Path(output) / "dropout", folder, step=3)
                (folder / "checkpoint-3" / "rloom_state_1.pt").unlink()
            torch.distributed.barrier()
            result = run(folder, "dropout", resume=True)
        elif kind.startswith("draw "):
            result = run_draw(folder, int(kind.removeprefix("draw ")), fsdp=True)
        elif kind.startswith("zero") and " draw " in kind:
            result = run_draw(folder, int(kind.split()[2]), torch.float32, deepspeed=zero_config(int(kind[4])))
        elif kind == "sharded by its launcher":  # as `accelerate launch` says it
            os.environ.update(LAUNCHED_WITH_FSDP)
            result = run(folder, "sequence", by_name=True)
            for name in LAUNCHED_WITH_FSDP:
                del os.environ[name]
        elif kind == "vllm twice":  # two runs that only evaluate, with the same weights
            found = [make_trainer(folder, "vllm", eval_strategy="steps").evaluate() for _ in range(2)]
            result = {"world": count(), "mismatch": [metrics["eval_mismatch/max"] for metrics in found]}
        elif kind.startswith("launched "):  # as the environment says
            if "ACCELERATE_USE_DEEPSPEED" in os.environ:
                leave_operators_uncompiled()
            result = run(folder, kind.removeprefix("launched "))
        elif kind == "sharded parts again":  # what another launch has saved in parts, and a test has put here
            result = run(folder, "saved", resume=True, **IN_PARTS)
        elif kind.startswith("sharded parts resumed "):
            what = kind.removeprefix("sharded parts resumed ")
            if rank() == 0:
                cut_off_after(Path(output) / f"sharded parts {what}", folder, step=3 if what == "dropout" else 2)
            torch.distributed.barrier()
            result = run(folder, what, resume=True, **IN_PARTS)
        elif kind.startswith("sharded parts "):  # each process writes its part of a checkpoint, the last model is whole
            result = run(folder, kind.removeprefix("sharded parts "), save=True, **IN_PARTS)
        elif kind.startswith("sharded resumed "):  # from the middle of an earlier run
            what = kind.removeprefix("sharded resumed ")
            if rank() == 0:
                cut_off_after(Path(output) / f"sharded {what}", folder, step=2)
            torch.distributed.barrier()
            result = run(folder, what, resume=True, fsdp=True)
        elif kind.startswith("sharded from "):  # a checkpoint of another number of processes
            if rank() == 0:
                cut_off_after(Path(kind.removeprefix("sharded from ")), folder, step=2)
            torch.distributed.barrier()
            result = run(folder, "saved", resume=True, fsdp=True)
        elif kind.split(" ")[1:2] and kind.split(" ")[1] in COPIES:  # the whole copy is kept, or let go of
            way, how, what = kind.split(" ", 2)
            sharding = {"deepspeed": zero_config(3)} if way == "zero3" else {"fsdp": True}
            result = run(folder, what, **sharding, **COPIES[how])
        elif kind.startswith("zero") and "saved" in kind:
            result = run_saved_zero(Path(output), folder, kind)
        elif kind.startswith("zero"):
            name, _, kind = kind.partition(" ")
            if kind == "resumed":
                if rank() == 0:
                    cut_off_after(Path(output) / f"{name} dropout", folder, step=3)
                torch.distributed.barrier()
            config = zero_config(int(name.removeprefix("zero")))
            if kind.startswith("accumulated "):  # gradients in a dtype of their own
                config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
                kind = kind.removeprefix("accumulated ")
            result = run(folder, kind.replace("resumed", "dropout"), resume=kind == "resumed", deepspeed=config)
        elif kind.startswith("sharded "):
            # Rounded otherwise, later updates would be on other completions.
            few = {"max_steps": 1} if kind == "sharded bfloat16" else {}
            result = run(folder, kind.removeprefix("sharded "), fsdp=True, **few)
        else:
            result = run(folder, kind)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(result, folder / f"result_{rank()}.pt")


def cut_off_after(whole: Path, folder: Path, step: int) -> None:
    """A run as it would have been left by a kill."""
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copytree(whole / "_rollouts", folder / "_rollouts")


if __name__ == "__main__":
    main()
