r"""Whether an answer is right: mathematics by math-verify, multiple choice by its letter.

The functions of TRL that judge by math-verify are here too, under their names and with their rules.
"""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
from collections.abc import Callable
from typing import Any

from rloom.errors import RewardError, checks_options
from rloom.rewards.calling.call_options import reward, set_call_options
from rloom.rewards.completion_text import text_of
from rloom.rewards.library.inputs import column_of, optional_package

PARSING_SECONDS, VERIFYING_SECONDS = 10, 5


def _timeouts() -> tuple[int | None, int | None]:
    """math-verify's own time limits. They work by signals, so only in a main thread, which a worker process has.

    In other threads they are off, and so are math-verify's warnings about that.
    """
    if threading.current_thread() is threading.main_thread():
        return PARSING_SECONDS, VERIFYING_SECONDS
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return None, None


def _parse(text: str, **options: Any) -> list[Any]:
    math_verify = optional_package("math_verify", what="math_accuracy", package="math-verify", extra="math")
    return math_verify.parse(text, parsing_timeout=_timeouts()[0], **options)


def _verify(gold: list[Any], answer: list[Any]) -> float:
    from math_verify import verify

    return float(verify(gold, answer, timeout_seconds=_timeouts()[1]))


def _strict_latex(text: str) -> list[Any]:
    """Answers in well-formed LaTeX only, a boxed one first."""
    math_verify = optional_package("math_verify", what="accuracy_reward", package="math-verify", extra="math")
    from latex2sympy2_extended import NormalizationConfig

    config = math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return _parse(text, extraction_config=[config], extraction_mode="first_match")


@functools.cache
def _quick_numbers() -> None:
    """Let sympy look its names up once. Only in worker processes: in the trainer's process sympy is left as it is.

    Reading a number, sympy runs `from sympy import *` into a new dictionary, each time: half of what an answer takes.
    A copy of one such dictionary is the same.
    """
    try:
        from sympy.parsing import sympy_parser
    except ImportError:
        # The first call says what is missing.
        return
    plain = sympy_parser.parse_expr
    names: dict[str, Any] = {}
    plain("0", global_dict=None, transformations=(lambda tokens, local, known: names.update(known) or tokens,))

    def parse_expr(
        s: str,
        local_dict: dict[str, Any] | None = None,
        transformations: Any = sympy_parser.standard_transformations,
        global_dict: dict[str, Any] | None = None,
        evaluate: bool = True,
    ) -> Any:
        known = dict(names) if global_dict is None else global_dict
        return plain(s, local_dict, transformations, known, evaluate)

    sympy_parser.parse_expr = parse_expr


WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
# Characters at the end of a completion in which the answer is looked for.
MAX_CHARACTERS = 100_000


@reward(streaming=True, isolated=True, at_start=_quick_numbers)
def math_accuracy(
    completions: list[Any], solution: list[Any] | None = None, answer: list[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""1.0 where a completion's answer equals the one in the column `solution` or `answer`, else 0.0; by math-verify.

    The answer is what stands in the last \\boxed{…}, else what reads like a final answer, else the last number. A
    solution may be LaTeX, a number, or worked out with the answer after `####` (GSM8K). None where the solution
    cannot be parsed.

    >>> math_accuracy([r"So it is \boxed{\frac{1}{2}}.", "It is 7."], solution=["0.5", "8"])
    [1.0, 0.0]
    """
    needed = "math_accuracy needs a column 'solution' or 'answer' with the right answers"
    right = column_of({"solution": solution, "answer": answer}, "solution", "answer", needed=needed)
    return [_math_score(text_of(c)[-MAX_CHARACTERS:], r) for c, r in zip(completions, right, strict=True)]


def _math_score(text: str, right: Any) -> float | None:
    if right is None:
        return None
    gold_text = str(right).rsplit("####", 1)[-1].strip()
    gold = _parse(gold_text)
    # It may be LaTeX without its dollars. Words would pass for products of letters.
    if not gold and not WORDS.search(gold_text):
        gold = _parse(f"${gold_text}$")
    if not gold:
        return None
    boxed = _last_boxed(text)
    answer = _parse(f"\\boxed{{{boxed}}}") if boxed is not None else _parse(text)
    return _verify(gold, answer) if answer else 0.0


def _last_boxed(text: str) -> str | None:
    r"""What the last \\boxed{…} holds; None if there is none.

    >>> _last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + 6, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start + 7 : position]
    return None


STATED = re.compile(r"(?:answer|choice|option)\s{0,9}(?:is|:|=)?\s{0,9}\*{0,4}\s{0,9}[\(\[]?([A-Z])\b", re.IGNORECASE)
# Characters at the end of a completion in which a stated choice is looked for.
STATED_CHARACTERS = 2000
LONE = re.compile(r"(?<![A-Za-z])[\(\[]?([A-Z])[\)\].:]?(?![A-Za-z'])")


def chosen_letter(text: str) -> str | None:
    r"""The letter that a completion settles on: boxed, else the last that it calls its answer, else the only one there.

    >>> chosen_letter("I think B. The answer is (C)."), chosen_letter("B"), chosen_letter("A or B?")
    ('C', 'B', None)
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        found = re.findall(r"[A-Z]", re.sub(r"\\[a-z]+", "", boxed).upper())
        return found[0] if len(found) == 1 else None
    stated = STATED.findall(text[-STATED_CHARACTERS:])
    if stated:
        return stated[-1].upper()
    lone = set(LONE.findall(text.strip()[-200:]))
    return lone.pop() if len(lone) == 1 else None


@reward(streaming=True)
def choice_accuracy(
    completions: list[Any], answer: list[Any] | None = None, solution: list[Any] | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 where a completion chooses the letter in the column `answer` (or `solution`), else 0.0.

    >>> choice_accuracy(["The answer is (B).", "A", "A, B or C"], answer=["B", "B", "B"])
    [1.0, 0.0, 0.0]
    """
    needed = "choice_accuracy needs a column 'answer' or 'solution' with the right letters"
    right = column_of({"solution": solution, "answer": answer}, "answer", "solution", needed=needed)
    letters = [chosen_letter(text_of(c)[-MAX_CHARACTERS:]) for c in completions]
    return [None if r is None else float(c == _right_letter(r)) for c, r in zip(letters, right, strict=True)]


def _right_letter(right: Any) -> str:
    letter = str(right).strip().strip("().").upper()
    if letter.isdigit():
        raise RewardError(
            f"choice_accuracy compares letters, and the right answer {right!r} is a number: make it a letter in the "
            "data set, as by 'ABCD'[number]"
        )
    return letter


# -- as in TRL


@reward(streaming=True, isolated=True, at_start=_quick_numbers)
def accuracy_reward(
    completions: list[Any], solution: list[str], log_extra: Callable[..., None] | None = None, **kwargs: Any
) -> list[float | None]:
    r"""TRL's: 1.0 where the LaTeX answer in a completion equals `solution`, 0.0 where not, None for no valid solution.

    >>> accuracy_reward([r"My answer is \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], [r"\frac{1}{3}"] * 2)
    [1.0, 0.0]
    """
    return _accuracies([text_of(c) for c in completions], solution, log_extra)


@reward(streaming=True, isolated=True, at_start=_quick_numbers)
def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""TRL's: as `accuracy_reward`, on what follows the reasoning; 0.0 where the reasoning does not end.

    >>> reasoning_accuracy_reward([r"<think>x</think> \boxed{2}", r"<think> \boxed{2}"], ["2", "2"])
    [1.0, 0.0]
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    return _accuracies([_after(text_of(c), delimiters) for c in completions], solution, log_extra)


def _after(text: str, delimiters: list[str]) -> str | None:
    found = next((d for d in delimiters if d in text), None)
    return None if found is None else text.split(found)[-1]


def _accuracies(texts: list[str | None], solution: list[str], log_extra: Any) -> list[float | None]:
    scores: list[float | None] = []
    golds, answers = [], []
    for text, right in zip(texts, solution, strict=True):
        gold = _parse(right) if text is not None else None
        answer = _strict_latex(text) if text is not None and gold else []
        scores.append(_verify(gold, answer) if gold else 0.0 if text is None else None)
        nothing = "[incomplete reasoning]" if text is None else "[unparseable]"
        golds.append(str(gold) if gold else nothing)
        answers.append(str(answer) if answer else nothing if text is None or gold else "[skipped]")
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", answers)
    return scores


@checks_options
def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""TRL's: accuracy, scaled by length along a cosine: short right answers are worth most, short wrong ones least.

    low + (high − low)·(1 + cos(π·min(length / max_len, 1))) / 2, with (low, high) the two values for right answers,
    and for wrong ones swapped (Yeo et al. 2025, arXiv 2502.03373, appendix C.1).

    >>> scaled = get_cosine_scaled_reward(max_len=100)
    >>> scaled([r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"], [r"\frac{1}{3}"] * 2, [[1] * 50] * 2)
    [0.75, -0.75]
    """

    def cosine_scaled_reward(
        completions: list[Any], solution: list[str], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        scores: list[float | None] = []
        for right, ids in zip(accuracy_reward(completions, solution), completion_ids, strict=True):
            low, high = (min_value_correct, max_value_correct) if right else (max_value_wrong, min_value_wrong)
            share = 0.5 * (1.0 + math.cos(math.pi * min(len(ids) / max_len, 1.0)))
            scores.append(None if right is None else low + (high - low) * share)
        return scores

    return set_call_options(cosine_scaled_reward, streaming=True, isolated=True, at_start=_quick_numbers)
