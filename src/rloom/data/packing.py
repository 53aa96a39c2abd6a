"""Shared-prefix packing: one row in which each prompt stands once.

    [prompt A | prompt B | … | A's completion 1 | A's completion 2 | … | B's completion 1 | …]

Every completion attends to its prompt and to itself, positions continue from the prompt, and nothing is padded.
Prompts come first, so that all prompts and all completions are each one slice. `models/attention.py` implements the
attention of such rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rloom.data.transfer import flat_tokens, upload
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


def pack(rollout: Rollout, rows: Sequence[int], device: torch.device) -> PackedRow:
    """Pack rows of a rollout; neighbouring rows of one group share their prompt."""
    runs = runs_of_groups(rows, rollout.groups.tolist())
    prompts = [rollout.prompt_ids[rows[run[0]]] for run in runs]
    completions = [[rollout.completion_ids[rows[member]] for member in run] for run in runs]
    ids = flat_tokens([*prompts, *(completion for run in completions for completion in run)])
    blocks = _blocks([len(prompt) for prompt in prompts], [[len(c) for c in run] for run in completions])
    positions, source = _positions(blocks)
    count, num_completion_tokens = len(ids), len(source)
    if (drawn := drawn_tokens(rollout, rows)) is not None:
        source = source[drawn]
    tokens = upload(torch.cat([ids, positions, source]), device)
    return PackedRow(
        blocks=blocks,
        num_prompt_tokens=count - num_completion_tokens,
        input_ids=tokens[None, :count],
        position_ids=tokens[None, count : 2 * count],
        source=tokens[2 * count :],
    )


def drawn_tokens(rollout: Rollout, rows: Sequence[int]) -> Tensor | None:
    """Which completion tokens of these rows the policy drew, one completion after the other; None: all. (T,) bool"""
    if all(rollout.masks[row] is None for row in rows):
        return None
    masks = [rollout.masks[row] or [True] * len(rollout.completion_ids[row]) for row in rows]
    return torch.tensor([drawn for mask in masks for drawn in mask], dtype=torch.bool)


def _blocks(prompts: list[int], completions: list[list[int]]) -> tuple[Block, ...]:
    """The places of prompts and completions with these lengths in a packed row."""
    blocks: list[Block] = []
    start, first = 0, sum(prompts)
    for prompt, lengths in zip(prompts, completions, strict=True):
        blocks.append(Block(start=start, prompt=prompt, first=first, completions=tuple(lengths)))
        start, first = start + prompt, first + sum(lengths)
    return tuple(blocks)


def _positions(blocks: tuple[Block, ...]) -> tuple[Tensor, Tensor]:
    """The position of each token, and for each completion token the place of the hidden state that predicts it."""
    # A span is a number of tokens, and the position of the first one.
    spans = [(block.prompt, 0) for block in blocks]
    spans += [(length, block.prompt) for block in blocks for length in block.completions]
    lengths, firsts = torch.tensor(spans).unbind(1)
    begins = lengths.cumsum(0) - lengths
    total, num_prompt_tokens = int(lengths.sum()), sum(block.prompt for block in blocks)
    positions = torch.arange(total) - (begins - firsts).repeat_interleave(lengths)
    # A token is predicted by the one before it. A completion's first token is predicted by its prompt's last.
    source = torch.arange(num_prompt_tokens - 1, total - 1)
    last = torch.tensor([block.start + block.prompt - 1 for block in blocks for _ in block.completions])
    begins, lengths = begins[len(blocks) :], lengths[len(blocks) :]
    source[begins[lengths > 0] - num_prompt_tokens] = last[lengths > 0]
    return positions, source
