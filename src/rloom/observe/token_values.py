"""The values of single tokens, kept for some groups of each update: log-probabilities, KL, entropy, advantage.

Which groups follows from the seed and the step, so that no random number of the training is used up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rloom.observe.runs import packed
from rloom.seeds import derive_seed
from rloom.types import Completion, Rollout

COLUMNS = {"policy_logprobs": "policy", "reference_logprobs": "reference", "kl": "kl", "advantages": "advantage"}
"""Fields of a rollout, and what they are called in a row's `tokens`."""


class TokenValues:
    """Adds the values of tokens to the records of some groups.

    Args:
        share: the share of groups; where it is more than 0, at least one.
        seed: of the run.
        num_groups: groups of a rollout, over all processes.
        decode: the texts of token ids, one by one.
        places: where the groups of this process are among those of all (`Schedule.places`); None: it has all.
    """

    def __init__(
        self,
        share: float,
        seed: int,
        num_groups: int,
        decode: Callable[[list[int]], list[str]],
        places: Sequence[int] | None = None,
    ) -> None:
        self.seed, self.num_groups, self._decode = seed, num_groups, decode
        self.places = range(num_groups) if places is None else places
        self.count = min(num_groups, math.ceil(share * num_groups))
        self._texts: dict[int, str] = {}

    def add(self, rollout: Rollout, step: int) -> None:
        """Add the values to the records of the chosen groups of a rollout, which was trained on just now."""
        rows_of: dict[int, list[int]] = {}
        # Not by the numbers of records or prompts: a group that replaced another one has others.
        for row, group in enumerate(rollout.groups.tolist()):
            rows_of.setdefault(self.places[group], []).append(row)
        for place in self.chosen(step):
            rows = self._learnt_from(rollout, rows_of, place)
            if rows:
                self._add_to(rollout, rows)

    def chosen(self, step: int) -> list[int]:
        """The places of the chosen groups among those of all processes: evenly spread, from a start that the seed and
        the step give.

        >>> TokenValues(0.25, 0, 8, lambda ids: []).chosen(3)
        [2, 6]
        """
        start = derive_seed(self.seed, "token values", step) % max(self.num_groups, 1)
        return sorted((start + i * self.num_groups // self.count) % self.num_groups for i in range(self.count))

    def _learnt_from(self, rollout: Rollout, rows_of: dict[int, list[int]], place: int) -> list[int]:
        """The rows of the group at a place. If no forward was run on it, those of the next one in this process that
        was."""
        if place not in rows_of:
            return []
        places = sorted(rows_of)
        at = places.index(place)
        turned = [rows_of[other] for other in places[at:] + places[:at]]
        known = (rows for rows in turned if any(rollout.policy_logprobs[row] is not None for row in rows))
        return next(known, turned[0])

    def _add_to(self, rollout: Rollout, rows: list[int]) -> None:
        known = _values(rollout, rows)
        for row in rows:
            completion = rollout.records[row].completion
            columns = {name: known[name, row] for name in COLUMNS.values() if (name, row) in known}
            if rollout.sampling_logprobs is not None:
                columns["sampling"] = np.asarray(rollout.sampling_logprobs[row], "<f4")
            tokens: dict[str, Any] = {"ids": completion.token_ids, "texts": self._texts_of(completion.token_ids)}
            tokens |= {name: packed(_spread(values, completion)) for name, values in columns.items()}
            if completion.entropies is not None:
                tokens["entropy"] = packed(completion.entropies)
            rollout.records[row].tokens = tokens

    def _texts_of(self, ids: Iterable[int]) -> list[str]:
        """The texts of tokens. Each is decoded once in a run."""
        ids = list(ids)
        new = sorted({token for token in ids if token not in self._texts})
        if new:
            self._texts.update(zip(new, self._decode(new), strict=True))
        return [self._texts[token] for token in ids]


def _values(rollout: Rollout, rows: list[int]) -> dict[tuple[str, int], np.ndarray]:
    """The values per token of some rows, by column and row. They come from the device in one copy."""
    places, found = [], []
    for (field, name), row in itertools.product(COLUMNS.items(), rows):
        values = getattr(rollout, field)[row]
        if values is not None and values.dim() == 1:
            places.append((name, row))
            found.append(values.detach().float())
    if not found:
        return {}
    device = max((values.device for values in found), key=lambda device: device.type != "cpu")
    flat = torch.cat([values.to(device) for values in found]).cpu().numpy()
    ends = np.cumsum([len(values) for values in found])
    return dict(zip(places, np.split(flat, ends[:-1]), strict=True))


def _spread(values: np.ndarray, completion: Completion) -> np.ndarray:
    """Values of the tokens that the policy drew as values of all tokens; NaN for the others."""
    if completion.mask is None:
        return values
    spread = np.full(len(completion.token_ids), np.nan, "<f4")
    spread[np.asarray(completion.mask, bool)] = values
    return spread
