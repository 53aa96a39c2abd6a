"""How fast rewards are called: ours against the same function in a plain loop, what isolation costs, and overlap.

python bench/rewards.py [--count 1024] [--only math]

Numbers go to bench/RESULTS.md by hand, with date, machine and versions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import rloom
from rloom.generation.base import Engine
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, code_execution, math_accuracy
from rloom.types import Completion, Group, Prompt

STEPS = """Let us go step by step. There are %d crates with 12 bottles each, so $12 \\cdot %d$ bottles in all.
A third of them is sold on Monday, which leaves two thirds. On Tuesday $\\frac{1}{4}$ of the rest is sold. If x is what
is left, then x = 12 * %d * 2/3 * 3/4 = 6 * %d. Every bottle costs 0.25 dollars, so we divide by 4 and add the 3 dollars
that were there before.
"""
ANSWERS = [
    r"First we add, then we halve, so that \boxed{\frac{%d}{2}} remains.",
    "Let x be the number. Then 2x = %d, and the answer is %d.",
    r"We get $\sqrt{%d^2} = %d$, hence \boxed{%d}.",
    "I am not sure, maybe %d?",
]
PROGRAM = """Here is a function:
```python
def shifted(values, by=%d):
    result = []
    for value in values:
        result.append(value + by)
    return sorted(set(result))
```
"""


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("math", "code", "isolation", "overlap"))
    options = parser.parse_args()
    print(f"{options.count} completions, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    count, repeats = options.count, options.repeats
    parts: dict[str, Callable[[], None]] = {
        "math": lambda: compare("math_accuracy", count, repeats),
        "code": lambda: compare("code_execution", count, repeats),
        "isolation": lambda: isolation(count, repeats),
        "overlap": lambda: overlap(repeats),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


def math_batch(count: int, first: int) -> RewardBatch:
    """Answers in several forms, half of them right. Another `first`, other numbers: sympy remembers what it saw."""
    numbers = range(first, first + count)
    texts = [(STEPS + ANSWERS[i % 4]).replace("%d", str(i)) for i in numbers]
    return batch_of(texts, {"solution": [str(i + (i // 4) % 2) for i in numbers]})


def code_batch(count: int, first: int) -> RewardBatch:
    """Programs with three asserts each, as in MBPP."""
    numbers = range(first, first + count)
    tests = [
        [f"assert shifted([3, 1, 1]) == [{1 + i}, {3 + i}]", "assert shifted([]) == []", f"assert shifted([-{i}])==[0]"]
        for i in numbers
    ]
    return batch_of([PROGRAM % i for i in numbers], {"tests": tests})


def batch_of(texts: list[str], columns: dict[str, list[Any]], first: int = 0) -> RewardBatch:
    """Groups of eight, counted from `first`."""
    return RewardBatch(
        prompts=[f"p{first + i // 8}" for i in range(len(texts))],
        completions=texts,
        completion_ids=[[1, 2, 3]] * len(texts),
        columns=columns,
    )


def compare(name: str, count: int, repeats: int) -> None:
    """The function in a plain loop, one sample after the other, against a RewardSet; then two such loops side by side,
    and one call with all samples."""
    function, make = functions()[name]
    reward = FunctionReward(function)
    rewards = RewardSet([reward], None)
    warm = make(64, 0)  # so that workers and imports are there
    assert rewards.score(warm).scores[:, 0].tolist() == [reward.score(warm.take([row]))[0] for row in range(64)]
    loop, ours, both, once = [], [], [], []
    for turn in range(1, repeats + 1):  # in turns, so that whatever else runs here disturbs both alike
        batch = make(count, turn * 100_000)
        loop.append(seconds(lambda b=batch: [reward.score(b.take([row])) for row in range(count)]))  # type: ignore[misc]
        batch = make(count, turn * 100_000 + 50_000)
        ours.append(seconds(lambda b=batch: rewards.score(b)))  # type: ignore[misc]
        both.append(halves(name, count, turn * 100_000 + 20_000))
        batch = make(count, turn * 100_000 + 70_000)
        once.append(seconds(lambda b=batch: reward.score(b)))  # type: ignore[misc]
    rewards.close()
    a, b = statistics.median(loop), statistics.median(ours)
    best = min(loop) / min(ours)
    each, limit = b / count * 1000, a / statistics.median(both)
    print(f"{name}: plain loop {a:.2f} s, ours {b:.2f} s ({each:.2f} ms a sample): {a / b:.2f}×; the best: {best:.2f}×")
    print(f"  two plain loops side by side, half of the samples each: {limit:.2f}×")
    print(f"  one call with all samples: {statistics.median(once):.2f} s")
    print(f"  turn by turn: {', '.join(f'{x:.2f} / {y:.2f} s' for x, y in zip(loop, ours, strict=True))}")


def halves(name: str, count: int, first: int) -> float:
    """Seconds that two plain loops over half of the samples each take side by side: what the processor allows."""
    context = multiprocessing.get_context("spawn")
    barrier, times = context.Barrier(2), context.Queue()
    loops = [context.Process(target=half, args=(name, count // 2, first + i * count, barrier, times)) for i in (0, 1)]
    for loop in loops:
        loop.start()
    took = [times.get() for _ in loops]
    for loop in loops:
        loop.join()
    return max(took)


def half(name: str, count: int, first: int, barrier: Any, times: Any) -> None:
    """One of them, begun when both are warm."""
    function, make = functions()[name]
    reward = FunctionReward(function)
    for batch, wait in ((make(32, 0), True), (make(count, first), False)):
        took = seconds(lambda b=batch: [reward.score(b.take([row])) for row in range(len(b.completions))])  # type: ignore[misc]
        if wait:
            barrier.wait()
    times.put(took)


def functions() -> dict[str, tuple[Any, Callable[[int, int], RewardBatch]]]:
    """What is compared, and on what."""
    return {
        "math_accuracy": (math_accuracy, math_batch),
        "code_execution": (code_execution(time_limit=5.0), code_batch),
    }


def isolation(count: int, repeats: int) -> None:
    """What a worker process adds to a function that does next to nothing, with one worker."""

    def tiny(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    batch = batch_of(["some words " * 50] * count, {"answer": list(range(count))})
    here = RewardSet([FunctionReward(rloom.reward(tiny, per_sample=True))], None)
    there = RewardSet([FunctionReward(rloom.reward(tiny, isolated=True))], None, workers=1)
    for rewards in (here, there):
        rewards.score(batch)
    a = statistics.median(seconds(lambda: here.score(batch)) for _ in range(repeats))
    b = statistics.median(seconds(lambda: there.score(batch)) for _ in range(repeats))
    there.close()
    print(f"isolation: {(b - a) / count * 1000:.3f} ms a sample more than a call in a thread of the same process")


class SleepingEngine(Engine):
    """Takes `total` seconds for its groups, without the processor: as a GPU does."""

    def __init__(self, total: float) -> None:
        self.total = total

    def generate(self, prompts: Any, num_generations: int, *, seed: int) -> Any:
        """Groups, one after the other."""
        for prompt in prompts:
            time.sleep(self.total / len(prompts))
            completions = [Completion(token_ids=[1], stop_reason="eos", text="x") for _ in range(num_generations)]
            yield Group(prompt=prompt, completions=completions)


def overlap(repeats: int, *, groups: int = 16, total: float = 2.0) -> None:
    """A step whose rewards take as long as its generation, scored as groups arrive."""
    prompts = [Prompt(content=f"p{i}", token_ids=[1]) for i in range(groups)]

    @rloom.reward(streaming=True)
    def slow(completions: list[str], **kwargs: Any) -> list[float]:
        time.sleep(total / groups)
        return [1.0] * len(completions)

    @rloom.reward(isolated=True, time_limit=60.0)
    def busy(completions: list[str], **kwargs: Any) -> list[float]:
        end = time.perf_counter() + total / groups / 8
        while time.perf_counter() < end:
            pass
        return [1.0]

    for name, function, workers in (("waiting", slow, None), ("computing in one worker", busy, 1)):
        rewards = RewardSet([FunctionReward(function)], None, workers=workers)
        rewards.score(batch_of(["x"] * 8, {}))
        took = statistics.median(seconds(lambda r=rewards: step(r, prompts, total)) for _ in range(repeats))  # type: ignore[misc]
        rewards.close()
        what = f"{total:g} s of generation and {total:g} s of rewards ({name})"
        print(f"a step of {what}: {took:.2f} s, {took / total:.3f}×")


def step(rewards: RewardSet, prompts: list[Prompt], total: float) -> None:
    """What the collector does: add each group as it comes, then ask for all scores."""
    scoring = rewards.begin()
    for position, group in enumerate(SleepingEngine(total).generate(prompts, 8, seed=0)):
        scoring.add(position, batch_of([c.text for c in group.completions], {}, position))
    scoring.score(batch_of(["x"] * (8 * len(prompts)), {}))


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
