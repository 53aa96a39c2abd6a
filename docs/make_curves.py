"""Draws docs/tutorial.svg: reward and KL of the tutorial's three runs, from what their trainers logged.

python docs/make_curves.py RUN1 RUN2 RUN3     # folders with trainer_state.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("tutorial.svg")
WIDTH, HEIGHT, LEFT, TOP = 340, 200, 44, 28
# Told apart on white and on black.
COLORS = ("#2f81f7", "#d29922", "#3fb950")
GREY = "#848d97"


def curves(folder: str, name: str) -> list[tuple[int, float]]:
    """(update, value) of one metric."""
    logs = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [(log["step"], log[name]) for log in logs if name in log]


def smooth(points: list[tuple[int, float]], width: int = 5) -> list[tuple[int, float]]:
    """The mean of the last few."""
    kept = []
    for i, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, i + 1 - width) : i + 1]]
        kept.append((step, sum(window) / len(window)))
    return kept


def panel(title: str, lines: list[list[tuple[int, float]]], top: float, left: int) -> list[str]:
    """One diagram: axes from 0 to the last update and to `top`, a line for each run."""
    last = max(step for line in lines for step, _ in line)

    def at(step: float, value: float) -> str:
        return f"{left + step / last * WIDTH:.1f},{TOP + HEIGHT - value / top * HEIGHT:.1f}"

    parts = [f'<text x="{left}" y="16" font-weight="bold" fill="{GREY}">{title}</text>']
    for i in range(5):
        value = top * i / 4
        y = TOP + HEIGHT - HEIGHT * i / 4
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="{GREY}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{value:g}</text>')
        x = left + WIDTH * i / 4
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle" fill="{GREY}">{last * i // 4}</text>')
    for line, color in zip(lines, COLORS, strict=True):
        points = " ".join(at(*point) for point in smooth(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return parts


def main() -> None:
    """Both diagrams, side by side."""
    runs = sys.argv[1:]
    second = LEFT * 2 + WIDTH + 10
    parts = panel("reward", [curves(run, "reward") for run in runs], 1.0, LEFT)
    parts += panel("KL per token, nats", [curves(run, "kl") for run in runs], 0.4, second)
    size = f'width="{second + WIDTH + 16}" height="{TOP + HEIGHT + 26}"'
    style = 'font-family="system-ui, sans-serif" font-size="12"'
    PAGE.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>' + "\n".join(["", *parts]) + "\n</svg>\n")


if __name__ == "__main__":
    main()
