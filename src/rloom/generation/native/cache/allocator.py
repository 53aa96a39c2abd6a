"""Memory for keys and values, counted in pages. No tensors here."""

from __future__ import annotations


class PageAllocator:
    """Hands out page numbers and takes them back. Page 0 is never handed out: rows without a sequence write there.

    >>> pages = PageAllocator(total=4, size=16)
    >>> pages.take(2)
    [1, 2]
    >>> pages.take(2) is None  # only one is left: nothing is taken
    True
    >>> pages.give([1, 2]); pages.free
    3
    """

    def __init__(self, *, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._free = list(range(total - 1, 0, -1))

    @property
    def free(self) -> int:
        """Pages that are left."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Pages there are in all."""
        return self.total - 1

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None and nothing taken."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))
