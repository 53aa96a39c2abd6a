"""What a model wrote on some rows, and what rewards say to it."""

from __future__ import annotations

from dataclasses import dataclass
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
from rloom.types import Group


@dataclass(slots=True, kw_only=True)
class Written:
    """All groups, in the order of the rows, and the model that wrote them."""

    model: Any
    groups: list[Group]

    @property
    def replies(self) -> list[list[Any]]:
        """Each group's completions as rewards and judges see them: texts, or messages where prompts are messages."""
        return [
            [as_reply(c.text, conversational=group.prompt.conversational) for c in group.completions]
            for group in self.groups
        ]


def write(name: str, rows: list[dict[str, Any]], count: int, *, seed: int, **options: Any) -> Written:
    """Completions of each row's prompt by a model. `options` are those of [`Writer`]."""
    writer = Writer(name, chat=not isinstance(rows[0]["prompt"], str), **options)
    found = dict(writer.write(rows, count, seed=seed))
    if len(found) != len(rows):
        raise DataError(f"{name} completed {len(found)} of {len(rows)} prompts")
    return Written(model=writer.model, groups=[found[index] for index in range(len(rows))])


def score(
    functions: list[Any], rows: list[dict[str, Any]], written: Written, *, time_limit: float = 60.0
) -> dict[str, list[list[float]]]:
    """Scores by reward's name, per group; NaN where a reward did not apply or failed."""
    rewards = RewardSet(build_rewards(functions, written.model.device), None, on_error="none", time_limit=time_limit)
    sizes = [len(group.completions) for group in written.groups]
    repeated = [row for row, size in zip(rows, sizes, strict=True) for _ in range(size)]
    batch = RewardBatch(
        prompts=[group.prompt.content for group in written.groups for _ in group.completions],
        completions=[reply for replies in written.replies for reply in replies],
        completion_ids=[c.token_ids for group in written.groups for c in group.completions],
        columns={name: [row.get(name) for row in repeated] for name in column_names(rows)},
    )
    try:
        scores = rewards.score(batch).scores
    finally:
        rewards.close()
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
