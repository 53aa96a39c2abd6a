"""What rloom's own loggers say, on the terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any


class _ToStderr(logging.Handler):
    """Writes to the standard error of the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def show_messages() -> None:
    """Show rloom's messages. A handler on the root would show those of libraries too, which show theirs themselves."""
    logger: Any = logging.getLogger("rloom")
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())
