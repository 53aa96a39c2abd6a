"""Micro-batches: which rows share a forward, and their padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rloom.types import MicroBatch, Rollout


def plan_rows(rollout: Rollout, rows: Sequence[int], max_rows: int, *, whole_groups: bool) -> Iterator[list[int]]:
    """Cut `rows` into lists of at most `max_rows` that are run forward (`trained`), keeping order.

    With `whole_groups`, all rows of a group come in one list, as the one-forward form needs it; rows that are not
    trained ride along in the list (their scores count in the baseline) but do not count towards `max_rows`.
    """
    groups = rollout.groups.tolist()
    trained = rollout.trained.tolist()
    current: list[int] = []
    weight = 0
    for unit in _units(rows, groups, whole_groups):
        cost = sum(trained[row] for row in unit)
        if current and weight + cost > max_rows:
            yield current
            current, weight = [], 0
        current += unit
        weight += cost
    if current:
        yield current


def _units(rows: Sequence[int], groups: list[int], whole_groups: bool) -> Iterator[list[int]]:
    if not whole_groups:
        yield from ([row] for row in rows)
        return
    unit: list[int] = []
    for row in rows:
        if unit and groups[row] != groups[unit[-1]]:
            yield unit
            unit = []
        unit.append(row)
    if unit:
        yield unit


def pad_rows(
    rollout: Rollout, rows: Sequence[int], *, pad_token_id: int, multiple: int | None, device: torch.device
) -> MicroBatch:
    """The rows as tensors: prompts padded on the left, completions on the right, positions counted per row."""
    prompts = [rollout.prompt_ids[row] for row in rows]
    completions = [rollout.completion_ids[row] for row in rows]
    left = _round_up(max(map(len, prompts)), multiple)
    right = _round_up(max(map(len, completions)), multiple)
    input_ids = torch.full((len(rows), left + right), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        input_ids[index, left - len(prompt) : left] = torch.tensor(prompt)
        input_ids[index, left : left + len(completion)] = torch.tensor(completion)
        mask[index, left - len(prompt) : left + len(completion)] = 1
    input_ids, mask = input_ids.to(device), mask.to(device)
    return MicroBatch(
        rollout=rollout,
        rows=list(rows),
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        completion_ids=input_ids[:, left:],
        completion_mask=mask[:, left:].float(),
        lengths=[len(completion) for completion in completions],
    )


def _round_up(width: int, multiple: int | None) -> int:
    return width if not multiple else -(-width // multiple) * multiple
