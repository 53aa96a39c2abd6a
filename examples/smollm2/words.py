"""The reward of the tutorial: one sentence of a sensible length, with all the words that were asked for."""

from __future__ import annotations

import re
from typing import Any


def one_sentence(completions: list[Any], words: list[list[str]], **_: Any) -> list[float]:
    """1 for a single sentence of 6 to 25 words that ends in a period and contains each of `words`, else 0.

    >>> one_sentence([[{"role": "assistant", "content": "The cat sat on the warm mat."}]], [["cat", "mat"]])
    [1.0]
    """
    return [
        float(is_right(messages[-1]["content"], wanted)) for messages, wanted in zip(completions, words, strict=True)
    ]


def is_right(text: str, wanted: list[str]) -> bool:
    """Whether a text is what was asked for. A period, "!", "?" or a new line before the end makes it two sentences."""
    if not text.endswith(".") or re.search(r"[.!?\n]", text[:-1]):
        return False
    found = re.findall(r"[a-z]+", text.lower())
    return 6 <= len(found) <= 25 and all(word in found for word in wanted)
