"""The text of a completion, whatever form it came in."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """A completion's text: itself, or the content of its messages.

    >>> text_of("four"), text_of([{"role": "assistant", "content": "four"}])
    ('four', 'four')
    """
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") or "" for message in completion]
    return "".join(c if isinstance(c, str) else "".join(part.get("text", "") for part in c) for c in contents)


def without_surrogates(text: str) -> str:
    """Text that can be encoded: half a surrogate pair, which a byte-level tokenizer may leave, becomes a question mark.

    >>> without_surrogates("a\\ud800b")
    'a?b'
    """
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
