"""What a model wrote on some rows, and what rewards say to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rloom.data.prompts import as_reply
from rloom.errors import DataError
from rloom.evaluation.writer import Writer
from rloom.rewards.base import Reward, RewardBatch
from rloom.rewards.build import build_reward, check_rewards, is_url, load_reward_model, reward_tokenizer
from rloom.rewards.calling.reward_set import RewardSet
from rloom.training.collector import column_names


@dataclass(slots=True, kw_only=True)
class WrittenGroup:
    """A prompt's completions; `replies` as rewards see them."""

    prompt: Any
    prompt_ids: list[int]
    texts: list[str]
    replies: list[Any]
    token_ids: list[list[int]]
    truncated: list[bool]

    @property
    def lengths(self) -> list[int]:
        """In tokens."""
        return [len(ids) for ids in self.token_ids]


@dataclass(slots=True, kw_only=True)
class Written:
    """All groups, in the order of the rows, and the model that wrote them."""

    model: Any
    groups: list[WrittenGroup] = field(default_factory=list)


def write(name: str, rows: list[dict[str, Any]], count: int, *, seed: int, **options: Any) -> Written:
    """Completions of each row's prompt by a model. `options` are those of [`Writer`]."""
    chat = not isinstance(rows[0]["prompt"], str)
    writer = Writer(name, chat=chat, **options)
    found: dict[int, WrittenGroup] = {}
    for index, group in writer.write(rows, count, seed=seed):
        completions = group.completions
        texts = [c.text for c in completions]
        found[index] = WrittenGroup(
            prompt=group.prompt.content,
            prompt_ids=group.prompt.token_ids,
            texts=texts,
            replies=[as_reply(text, conversational=chat) for text in texts],
            token_ids=[c.token_ids for c in completions],
            truncated=[c.truncated for c in completions],
        )
    if len(found) != len(rows):
        raise DataError(f"{name} completed {len(found)} of {len(rows)} prompts")
    return Written(model=writer.model, groups=[found[index] for index in range(len(rows))])


def score(functions: list[Any], rows: list[dict[str, Any]], written: Written) -> dict[str, list[list[float]]]:
    """Scores by reward's name, per group; NaN where a reward did not apply or failed."""
    device = next(written.model.parameters()).device
    rewards = RewardSet(build_rewards(functions, device), None, on_error="none")
    flat = [(row, group, i) for row, group in zip(rows, written.groups, strict=True) for i in range(len(group.texts))]
    batch = RewardBatch(
        prompts=[group.prompt for _, group, _ in flat],
        completions=[group.replies[i] for _, group, i in flat],
        completion_ids=[group.token_ids[i] for _, group, i in flat],
        columns={name: [row.get(name) for row, _, _ in flat] for name in column_names(rows)},
    )
    try:
        scores = rewards.score(batch).scores
    finally:
        rewards.close()
    sizes = [len(group.texts) for group in written.groups]
    return {name: [part.tolist() for part in scores[:, index].split(sizes)] for index, name in enumerate(rewards.names)}


def build_rewards(functions: list[Any], device: torch.device | str = "cpu") -> list[Reward]:
    """Rewards that were named on a command line, ready to be called; models by name are loaded, and put on `device`."""
    check_rewards(functions, None)
    return [_built(function, device) for function in functions]


def _built(function: Any, device: torch.device | str) -> Reward:
    tokenizer = None
    if isinstance(function, str) and not is_url(function):
        function = load_reward_model(function, trust_remote_code=False, init_kwargs=None)
    if isinstance(function, nn.Module):
        tokenizer = reward_tokenizer(function, None, revision=None, trust_remote_code=False)
    return build_reward(function, tokenizer, place=lambda model: model.to(device), template_kwargs={})
