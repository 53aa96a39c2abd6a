"""Refuses processes that were given different options, data, models or rewards.

Each decides by itself what happens when. One that decides otherwise than the rest waits for them for ever, or all train
on other prompts, weights or scores than they should.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from rloom.config import RLOOConfig
from rloom.data import datasets
from rloom.data.images import without_images
from rloom.rewards import RewardSet
from rloom.rewards.compose import Composition
from rloom.training.identity import some_rows, without_secrets
from rloom.training.policy import Policy
from rloom.training.processes import Processes

MAY_DIFFER = (
    # What a launcher says to each process, and what its machine has.
    "local_rank", "image_folder", "dataloader_num_workers", "dataloader_prefetch_factor",
    "dataloader_persistent_workers", "dataloader_multiprocessing_context", "reward_workers",
    "max_tokens_per_micro_batch", "vllm_gpu_memory_utilization",
    # Where things are: a server has other names on other machines. The judge is the main process' alone.
    "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_weights_dir", "eval_judge_url",
    "eval_judge_cache",
    # Where and how something is shown, often by one process alone.
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_token",
    "log_level", "log_level_replica", "log_format", "log_completions", "num_completions_to_print", "log_unique_prompts",
    "disable_tqdm", "advice",
)  # fmt: skip
"""Options that may differ between processes. Any other may decide what happens when."""

MAY_DIFFER_IN_LOADING = ("device_map", "max_memory", "cache_dir")
"""So it is with these of `model_init_kwargs`."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies in memory, as its text says."""

SHOWN = 80
"""How much of a prompt a message shows."""


def check_same_everywhere(processes: Processes, args: RLOOConfig, policy: Policy, train: Any, evaluation: Any) -> None:
    """Refuse processes that were given different options, data, models, adapters or tokenizers."""
    if processes.alone:
        return
    made = {"distribution": processes.plan(), "model": _weights(policy.model), "tokenizer": _tokens(policy)}
    values = _options(args) | made | _summary("train_dataset", train)
    for name, data in evaluation.items() if isinstance(evaluation, Mapping) else [(None, evaluation)]:
        if data is not None:
            values |= _summary(f"eval_dataset[{name!r}]" if name else "eval_dataset", data)
    processes.check_same(values)


def check_same_rewards(processes: Processes, rewards: RewardSet, composition: Composition) -> None:
    """Refuse processes that were given different rewards: columns of one would be added to another's."""
    if processes.alone:
        return
    weights = [f"{float(weight):g}" for weight in rewards.weights]
    terms = [
        {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        | {"function": name, "only_if": gate, "weight": None}
        for one, name, gate in zip(composition.terms, composition.names, composition.gates, strict=True)
    ]
    names = {"reward_funcs": str(rewards.names), "weights of rewards": str(weights)}
    processes.check_same(names | {"terms of rewards": _as_text(terms)})


def _options(args: RLOOConfig) -> dict[str, str]:
    """The options that must be equal, as texts. Other fields that a subclass has are its own business."""
    names = [field.name for field in dataclasses.fields(RLOOConfig) if field.name not in MAY_DIFFER]
    given = {name: getattr(args, name) for name in names}
    if isinstance(given["model_init_kwargs"], Mapping):
        loading = given["model_init_kwargs"].items()
        given["model_init_kwargs"] = {name: value for name, value in loading if name not in MAY_DIFFER_IN_LOADING}
    shown = {name: _as_text(value) for name, value in without_secrets(given).items()}
    # Addresses, which the message of a difference would show, password and all.
    values = {name: shown[name] if name in shown else f"not shown, digest {_digest(given[name])}" for name in names}
    return values | {"number of vLLM servers": str(len(args.vllm_servers()))}


def _weights(model: nn.Module) -> str:
    """A model's weights and buffers, but for their values: the main process' are sent to all, in these dtypes and
    shapes. Tied weights count under both names: where a model is made without data, as FSDP2 does in all processes but
    one, they are not tied yet."""
    weights = list(model.named_parameters(remove_duplicate=False))
    everything = [*weights, *model.named_buffers(remove_duplicate=False)]
    layout = sorted((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in everything)
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for _, p in weights}))
    size, trained = sum(p.numel() for _, p in weights), sum(p.numel() for _, p in weights if p.requires_grad)
    name = type(model).__name__
    return f"{name} of {size:,} weights in {dtypes}, {trained:,} of them trained, digest {_digest(layout)}"


def _tokens(policy: Policy) -> str:
    """What turns text into tokens and ends completions."""
    tokenizer = policy.tokenizer
    template = getattr(policy.processing_class, "chat_template", None)
    ends = sorted(policy.eos_token_ids)
    return f"{len(tokenizer)} tokens, padding {tokenizer.pad_token_id}, ends {ends}, chat template {_digest(template)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(str(value).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _as_text(value: Any) -> str:
    """A value as a text that is the same in all processes: without addresses, sets and dictionaries in order.

    >>> _as_text({"b": {8, 1}, "a": [print, None]})
    '{a: [<built-in function print>, None], b: {1, 8}}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{name}: {_as_text(item)}' for name, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_as_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_text, value))}]"
    return ADDRESS.sub("", str(value))


def _summary(name: str, data: Any) -> dict[str, str]:
    """A data set's length and some prompts. Of a stream: its first prompt, where it can be read again."""
    if datasets.is_iterable(data):
        return {f"{name} (its first prompt)": _shortened(_prompt(datasets.first_row(data) or {}))}
    prompts = [_prompt(row) for row in some_rows(data)]
    some = [_shortened(prompts[index]) for index in (0, len(prompts) // 2, -1)] if prompts else []
    return {
        f"len({name})": str(len(data)),
        f"{name} (its first, a middle and the last prompt)": str(some),
        f"{name} ({len(prompts)} prompts)": f"digest {_digest(prompts)}",
    }


def _prompt(row: Mapping[str, Any]) -> str:
    return str(without_images(row.get("prompt") or ""))


def _shortened(prompt: str) -> str:
    """A prompt as a message shows it, that differs where its end does: many begin with the same instruction.

    >>> _shortened("short"), _shortened("a" * 100)
    ('short', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…, digest 28165978')
    """
    return prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}…, digest {_digest(prompt)}"
