"""Writes used completions to the table and to the run's store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rloom.data.images import without_images
from rloom.observe.completions import CompletionLog, sendable
from rloom.observe.row_json import packed_ids
from rloom.observe.store import RunStore
from rloom.observe.token_values import TokenValues
from rloom.types import Record, Rollout

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Page:
    """Rows for the table and rows for the store. With several processes, pages are sent to the main one."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    stored: list[dict[str, Any]] = field(default_factory=list)


class Journal:
    """Writes the records of rollouts to table and store.

    `images`: whether the table shows the prompts' images. `tokens` adds the values of single tokens.
    """

    def __init__(
        self, table: CompletionLog, store: RunStore, *, images: bool = False, tokens: TokenValues | None = None
    ) -> None:
        self.table, self.store, self.images, self.tokens = table, store, images, tokens

    def page(self, rollouts: Sequence[Rollout], step: int | None = None) -> Page:
        """What is to be written about rollouts whose advantages are known. Their records are removed. `step` is that
        of the update which has trained on them; None: an evaluation."""
        page = Page()
        for rollout in rollouts:
            if self.tokens is not None and step is not None:
                self.tokens.add(rollout, step)
            groups_before = 1 + max((row["group"] for row in page.stored), default=-1)
            page.shown += [self._shown(record) for record in rollout.records]
            page.stored += [_stored(record, groups_before) for record in rollout.drawn]
            rollout.records, rollout.drawn, rollout.total = [], [], None
        return page

    def sendable(self, page: Page, *, table: bool) -> Page:
        """A page in a form that can be sent to the main process. `table`: whether that process shows the table."""
        return Page(shown=sendable(page.shown) if table else [], stored=self.store.plain(page.stored))

    def write(self, page: Page, step: int, mode: str) -> None:
        """Write a page of a step. `mode` is "train", or the name of an evaluation."""
        self.table.extend(page.shown)
        self.store.write(page.stored, step, mode)

    def _shown(self, record: Record) -> dict[str, Any]:
        row = {
            "prompt": record.prompt.content,
            "completion": record.reply,
            "rewards": record.scores,
            "extra": record.extra,
            "advantages": record.advantage,
        }
        return row | {"images": record.prompt.images} if self.images else row


def _stored(record: Record, groups_before: int) -> dict[str, Any]:
    mask = record.completion.mask
    row = {
        "group": groups_before + record.group,
        "prompt": without_images(record.prompt.content),
        "completion": record.completion.text,
        "scores": record.scores,
        "failures": record.failures,
        "reward": record.reward,
        "advantage": record.advantage,
        "stop_reason": record.completion.stop_reason,
        "num_tokens": len(record.completion.token_ids),
        "extra": record.extra,
        # What was trained on: text need not become the same tokens again.
        "token_ids": packed_ids(record.completion.token_ids),
        **({} if mask is None else {"mask": mask}),
    }
    return row if record.tokens is None else row | {"tokens": record.tokens}


def in_turns(several: Sequence[Sequence[T]]) -> Iterator[T]:
    """All first elements, then all second ones, and so on: the order in which batches were given to processes.

    >>> list(in_turns([["first", "third"], ["second"]]))
    ['first', 'second', 'third']
    """
    missing = object()
    for turn in itertools.zip_longest(*several, fillvalue=missing):
        yield from (one for one in turn if one is not missing)  # type: ignore[misc]
