"""Shared-prefix packing: a micro-batch as one row in which each prompt stands once, for all of its completions.

    [prompt A | prompt B | … | A's completion 1 | A's completion 2 | … | B's completion 1 | …]

Every completion attends to its prompt and to itself, positions continue from the prompt, and nothing is padded.
Prompts come first, so that all prompts and all completions are each one slice. The attention that gives this row its
meaning is in `models/attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rloom.types import Block, PackedRow, Rollout


def runs_of_groups(rows: Sequence[int], groups: Sequence[int]) -> list[list[int]]:
    """Positions in `rows`, cut into runs of neighbours that belong to one group.

    >>> runs_of_groups([4, 5, 6], groups=[0, 0, 0, 0, 1, 1, 2])
    [[0, 1], [2]]
    """
    runs: list[list[int]] = []
    for position, row in enumerate(rows):
        if runs and groups[rows[runs[-1][-1]]] == groups[row]:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def packed_size(rollout: Rollout, rows: Sequence[int], groups: Sequence[int]) -> int:
    """Tokens that `rows` take in a packed row: a prompt once for a run of its completions."""
    prompts = sum(len(rollout.prompt_ids[rows[run[0]]]) for run in runs_of_groups(rows, groups))
    return prompts + sum(len(rollout.completion_ids[row]) for row in rows)


def pack(rollout: Rollout, rows: Sequence[int], device: torch.device) -> PackedRow:
    """Pack rows of a rollout; neighbouring rows of one group share their prompt."""
    runs = runs_of_groups(rows, rollout.groups.tolist())
    prompts = [rollout.prompt_ids[rows[run[0]]] for run in runs]
    completions = [rollout.completion_ids[row] for row in rows]
    ids = [token for prompt in prompts for token in prompt]
    positions = [position for prompt in prompts for position in range(len(prompt))]
    num_prompt_tokens = len(ids)
    source: list[int] = []
    blocks: list[Block] = []
    start = 0
    for prompt, run in zip(prompts, runs, strict=True):
        lengths = tuple(len(completions[member]) for member in run)
        blocks.append(Block(start=start, prompt=len(prompt), first=len(ids), completions=lengths))
        start += len(prompt)
        for member in run:
            begin, length = len(ids), len(completions[member])
            ids += completions[member]
            positions += range(len(prompt), len(prompt) + length)
            source += [start - 1, *range(begin, begin + length - 1)]  # the first is predicted by the prompt's last
    tokens = torch.tensor([ids, positions]).to(device, non_blocking=True)
    return PackedRow(
        blocks=tuple(blocks),
        num_prompt_tokens=num_prompt_tokens,
        input_ids=tokens[:1],
        position_ids=tokens[1:],
        source=torch.tensor(source).to(device, non_blocking=True),
    )
