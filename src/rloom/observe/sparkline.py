"""A curve as one row of blocks, for terminals."""

from __future__ import annotations

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values as a row of blocks, each the mean of an equal share of them.

    >>> sparkline([0.0, 1.0, 2.0, 3.0], width=4)
    '▁▃▆█'
    """
    if not values:
        return ""
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] for m in means)
