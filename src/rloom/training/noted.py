"""What an update, or a batch of an evaluation, leaves for table and store; with several processes, on its way there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.evaluation.measured import Measured
from rloom.observe.completions import sendable, sendable_values


@dataclass(slots=True, kw_only=True)
class Noted:
    """Rows for the table of completions, rows for the store, and what an evaluation has measured."""

    shown: list[dict[str, Any]]
    stored: list[dict[str, Any]]
    measured: Measured | None = None

    def sendable(self, *, table: bool) -> Noted:
        """As the main process can be sent it; rows of the table where there will be one."""
        measured = self.measured
        if measured is not None:  # it has a contest of its own, whose judge may be anything
            prompts = [dataclasses.replace(p, columns=sendable_values(p.columns), images=[]) for p in measured.prompts]
            measured = dataclasses.replace(measured, contest=None, prompts=prompts)
        return Noted(shown=sendable(self.shown) if table else [], stored=self.stored, measured=measured)


def in_turns(several: Sequence[Sequence[Noted]]) -> Iterator[Noted]:
    """Everybody's first, then everybody's second, and so on: the order in which batches were dealt out.

    >>> one, two, three = (Noted(shown=[], stored=[{"number": n}]) for n in range(3))
    >>> [noted.stored[0]["number"] for noted in in_turns([[one, three], [two]])]
    [0, 1, 2]
    """
    for turn in itertools.zip_longest(*several):
        yield from (noted for noted in turn if noted is not None)
