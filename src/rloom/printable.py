"""Text from outside (completions, exceptions, services, names) in a form that is harmless for terminals."""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    """Without control characters, which are spelt out; lines and tabs stay.

    >>> printable("red: \\x1b[31m\\u202eno\\n")
    'red: \\\\x1b[31m\\\\u202eno\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def get_logger(name: str) -> logging.Logger:
    """A logger whose messages are printable, whoever shows them."""
    logger = logging.getLogger(name)
    if _CLEAN not in logger.filters:
        logger.addFilter(_CLEAN)
    return logger


class _Clean(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except (TypeError, ValueError):  # arguments that do not fit: whoever shows it says so
            return True
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


_CLEAN = _Clean()
