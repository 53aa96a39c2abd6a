"""A run as the page sees it: its logs and rows, kept up to date while it goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rloom.observe.page.query import Query, chosen, in_order
from rloom.observe.page.text_search import TextSearch
from rloom.observe.row_index import IndexNames
from rloom.observe.runs import RunReader
from rloom.observe.store import METRICS
from rloom.observe.text_filter import TextFilter
from rloom.printable import get_logger

logger = get_logger(__name__)

FRESH_SECONDS = 1.0
"""How long what was read is believed."""
PATIENCE_SECONDS = 0.1
"""How long an answer waits for a text search. Then it has the rows found so far, and says so."""
COUNT_SECONDS = 0.25
"""The same for an answer without rows, which is asked for when these are final, and only their number grows."""
SETTLE_SECONDS, SETTLE_ROWS = 0.1, 20_000
"""How long, and in how many rows, it then looks for the rows of the page itself, so that these at least are final."""

AGAIN_SECONDS = 20.0
"""How long to wait before a store that a run writes to is looked at again."""
SEARCHES = 4
"""Texts whose searches are kept, and may go on at the same time: pages in several tabs ask for different ones."""


@dataclass(slots=True)
class Found:
    """What a query has found: records, their names, the places of those it asks for, the share of all rows that was
    searched for its text, and whether the rows that it shows stay the same when the rest is searched."""

    records: np.ndarray
    names: IndexNames
    places: np.ndarray
    searched: float = 1.0
    final: bool = True


def live_runs(folders: Sequence[str | Path]) -> list[LiveRun]:
    """Runs that are shown together. Each has a name of its own, unless it is there twice."""
    runs = [LiveRun(folder) for folder in folders]
    for run, name in zip(runs, names_of([run.reader.folder for run in runs]), strict=True):
        run.name = name
    return runs


def names_of(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart.

    >>> names_of([Path("/runs/seed1/out"), Path("/runs/seed2/out"), Path("/runs/other")])
    ['seed1/out', 'seed2/out', 'other']
    """
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for parts in paths:
        sizes = range(1, len(parts) + 1)
        alone = (size for size in sizes if all(parts == one or parts[-size:] != one[-size:] for one in paths))
        names.append(str(Path(*parts[-next(alone, len(parts)) :])))
    return names


class LiveRun:
    """A run that is read while it goes on. Its methods may be called from several threads."""

    def __init__(self, folder: str | Path) -> None:
        self.reader = RunReader(folder)
        self.name = self.reader.name
        self.entries: list[dict[str, Any]] = []
        # Changes when entries were dropped: whoever has some must take all anew.
        self.generation = 0
        self._lock, self._table_lock = threading.Lock(), threading.Lock()
        self._read_at = -FRESH_SECONDS
        self._stamp: tuple[int, int, int] | None = None
        self._state_stamp: tuple[tuple[str, int, int], ...] | None = None
        self._searches: dict[str, tuple[str, TextSearch]] = {}

    # -- staying up to date

    def refresh(self) -> None:
        """Take in what was written since, unless that was done just now."""
        with self._lock:
            if time.monotonic() - self._read_at < FRESH_SECONDS:
                return
            self._read_entries()
            self._read_at = time.monotonic()
        # While another thread reads many lines, the rows that are there have to do.
        if self._table_lock.acquire(timeout=0.02):
            try:
                if self.reader.table.complete:
                    self.reader.table.refresh()
            finally:
                self._table_lock.release()

    def catch_up(self, *, keep_trying: bool = False) -> None:
        """Read the lines of a store without an index to the end, and give it one. Others are answered in between.

        A run that is resumed meanwhile drops files, also one that is just being read. `keep_trying` begins again then.
        """
        said = ""
        while True:
            try:
                if self._read_on():
                    return
            except (OSError, ValueError) as error:
                if not keep_trying:
                    raise
                if str(error) != said:
                    logger.warning("%s could not be read, and is tried again: %s", self.reader.store, error)
                said = str(error)
                time.sleep(FRESH_SECONDS)
            # Whoever waits for the lock gets it.
            time.sleep(0.01)

    def prepare(self) -> bool:
        """Give a store what makes it quick to show, where an older version has written it: an index, and then a filter
        of its texts. Both are made from the lines, while others are answered. Returns False where a run may still be
        writing there, so that this has to be done later."""
        table = self.reader.table
        self.catch_up(keep_trying=True)
        try:
            with self._table_lock:
                table.refresh()
            if not table.lacks_filter():
                return True
            quiet = table.is_quiet()
            table.save_filter()
            return quiet
        except (OSError, ValueError) as error:
            # A folder that may only be read, or a run that is resumed just now.
            logger.warning("searches in %s read all lines: it got no filter of texts: %s", self.reader.store, error)
            return True

    def keep_preparing(self) -> None:
        """Prepare the store as soon as no run writes there, and say so if that is not now."""
        if self.prepare():
            return
        logger.warning(
            "a run writes to %s, much of which has no filter of texts, as an older version leaves it: searches read "
            "all lines until nothing was written for a minute",
            self.reader.store,
        )
        while not self.prepare():
            time.sleep(AGAIN_SECONDS)

    def _read_on(self) -> bool:
        """Read some of the lines. Returns whether these were the last."""
        table = self.reader.table
        with self._table_lock:
            table.refresh()
            if table.complete:
                table.save()
            return table.complete

    def _read_entries(self) -> None:
        path = self.reader.store / METRICS
        try:
            found = path.stat()
        except OSError:
            if self._stamp is None:
                self._read_states()
            return
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        if stamp == self._stamp:
            return
        grown = self._stamp is not None and stamp[0] == self._stamp[0] and stamp[1] > self._stamp[1]
        new = _entries_from(path, self._stamp[1]) if grown and self._stamp is not None else None
        if new is None:
            self.entries, self.generation = self.reader.metrics(), self.generation + 1
        else:
            self.entries = self.entries + new
        self._stamp = stamp

    def _read_states(self) -> None:
        """Of a run without a store, as TRL leaves it: the logs are in its checkpoints, which are written one by one."""
        stamp = self.reader.state_stamp()
        if stamp == self._state_stamp:
            return
        before, self.entries, self._state_stamp = self.entries, self.reader.metrics(), stamp
        if self.entries[: len(before)] != before:
            self.generation += 1

    # -- rows

    def snapshot(self) -> tuple[np.ndarray, IndexNames]:
        """The records and their names, as of now."""
        self.refresh()
        return self.reader.table.view[:2]

    def find(self, query: Query) -> Found:
        """The rows that a query asks for."""
        self.refresh()
        records, names, indexed = self.reader.table.view
        wanted = chosen(records, names, query)
        if not query.text:
            return Found(records, names, np.flatnonzero(wanted))
        search = self._search(records, query.text, names.id, indexed)
        if query.limit:
            final = search.wait(PATIENCE_SECONDS) or _settled(search, records, names, wanted, query)
        else:
            final = search.wait(COUNT_SECONDS)
        # Before the matches: those of rows that are counted as searched are there.
        searched = search.looked / len(records) if len(records) else 1.0
        found = search.matches[: len(wanted)]
        wanted[: len(found)] &= found
        wanted[len(found) :] = False
        return Found(records, names, np.flatnonzero(wanted), searched, final or searched == 1.0)

    def _search(self, records: np.ndarray, text: str, version: str, indexed: int) -> TextSearch:
        """The search for a text, which may be going on already. Of too many, the one that was asked for longest ago is
        given up, and says so to who still waits for it."""
        with self._lock:
            known, search = self._searches.pop(text, ("", None))
            if search is not None and (known != version or not search.is_of(records)):
                search.stop()
                search = None
            if search is not None and search.error is not None:
                # The table is as it was, so the run was not resumed. Who asks again has it tried again.
                raise search.error
            if search is None or (search.ended and not search.done) or (search.done and search.looked < len(records)):
                # Where rows have come since, what was found before them stays.
                found = None if search is None else search.matches
                filtered = TextFilter(self.reader.store, version, indexed)
                search = TextSearch(self.reader.store, records, text, found, filtered).start()
                for _, older in self._searches.values():
                    older.give_way(search)
            self._searches[text] = (version, search)
            for other in list(self._searches)[:-SEARCHES]:
                self._searches.pop(other)[1].stop()
            return search


def _settled(search: TextSearch, records: np.ndarray, names: IndexNames, wanted: np.ndarray, query: Query) -> bool:
    """Search the rows of a query in its order, as far as its page goes. Returns whether that was done."""
    if len(search.records) < len(records):
        # Rows that came since are searched next.
        return False
    with search.held():
        possible = np.flatnonzero(wanted & (search.matches | ~search.seen))
        end, (looked, found) = query.offset + query.limit, (wanted & search.seen, wanted & search.matches)
        share = (1 + np.count_nonzero(found)) / (1 + np.count_nonzero(looked))
        if len(possible) > SETTLE_ROWS and share * SETTLE_ROWS < end:
            # By what is known so far, these rows hold too few: the search itself is sooner at its end.
            return False
        order = in_order(records, names, possible, query.sort, 0, SETTLE_ROWS)
        if search.settle(order, end, SETTLE_SECONDS):
            return True
        return len(order) == len(possible) and bool(search.seen[order].all())


def _entries_from(path: Path, start: int) -> list[dict[str, Any]] | None:
    """The entries of a log from an offset on. None where they cannot be told apart, so that all has to be read."""
    with path.open("rb") as file:
        file.seek(start - 1)
        if file.read(1) != b"\n":
            return None
        data = file.read()
    try:
        return [json.loads(line) for line in data.splitlines()] if data.endswith(b"\n") else None
    except ValueError:
        return None
