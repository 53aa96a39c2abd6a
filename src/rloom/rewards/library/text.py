"""What a text is like: its language, its mood, how near it is to a reference. Each on a library made for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rloom.errors import check_choice, checks_options
from rloom.rewards.calling.call_options import named_reward, reward
from rloom.rewards.completion_text import text_of, without_surrogates
from rloom.rewards.library.inputs import column_of, optional_package

# Characters that are read of a completion: these measures do not change much beyond, and some take quadratic time.
MAX_CHARACTERS = 20_000


@checks_options
def language(code: str | None = None, *, column: str = "language") -> Callable[..., list[float | None]]:
    """Make a reward: the probability that a completion is in a language, given by its ISO 639-1 code, by py3langid.

    Without `code`, each row names its own in a column.

    >>> scores = language("en")(["This is the house where we live.", "Das ist das Haus, in dem wir wohnen."])
    >>> [round(score) for score in scores]
    [1, 0]
    """
    identifier = _identifier()
    if code is not None and code not in identifier.labels:
        check_choice("language", code, sorted(identifier.labels))

    def language_reward(completions: list[Any], **columns: Any) -> list[float | None]:
        needed = f"language needs a code, or a column '{column}' with one for each row"
        codes = [code] * len(completions) if code is not None else column_of(columns, column, needed=needed)
        return [_probability(text_of(c), wanted) for c, wanted in zip(completions, codes, strict=True)]

    return named_reward(language_reward, "language", streaming=True, isolated=True)


@functools.cache
def _identifier() -> Any:
    langid = optional_package("py3langid.langid", what="language", package="py3langid", extra="text")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _probability(text: str, code: str | None) -> float | None:
    if code is None:
        return None
    text = without_surrogates(text[:MAX_CHARACTERS]).strip()
    # Digits and signs are in no language.
    if not any(character.isalpha() for character in text):
        return 0.0
    return float(dict(_identifier().rank(text)).get(code, 0.0))


@reward(streaming=True, isolated=True)
def sentiment(completions: list[Any], **kwargs: Any) -> list[float]:
    """How positive a text is, from −1 to 1, by VADER (Hutto & Gilbert 2014). English.

    >>> [round(score) for score in sentiment(["What a wonderful day!", "This is horrible.", ""])]
    [1, -1, 0]
    """
    analyzer = _analyzer()
    return [analyzer.polarity_scores(text_of(c)[:MAX_CHARACTERS])["compound"] for c in completions]


@functools.cache
def _analyzer() -> Any:
    name = "vaderSentiment.vaderSentiment"
    return optional_package(name, what="sentiment", package="vaderSentiment", extra="text").SentimentIntensityAnalyzer()


@checks_options
def rouge(kind: str = "rougeL", *, column: str = "reference", stem: bool = True) -> Callable[..., list[float | None]]:
    """Make a reward: the ROUGE F1 score against a reference in a column, by rouge-score.

    >>> rouge("rouge1")(["the cat sat"], reference=["the cat"])
    [0.8]
    """
    check_choice("kind", kind, ("rouge1", "rouge2", "rouge3", "rougeL", "rougeLsum"))
    optional_package("rouge_score", what="rouge", package="rouge-score", extra="text")

    def rouge_reward(completions: list[Any], **columns: Any) -> list[float | None]:
        scorer = _rouge_scorer(kind, stem)
        return [
            None if references is None else max(scorer.score(r, text)[kind].fmeasure for r in references)
            for text, references in _with_references(completions, columns, column, "rouge")
        ]

    return named_reward(rouge_reward, kind, streaming=True, isolated=True)


@functools.cache
def _rouge_scorer(kind: str, stem: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=stem)


@checks_options
def bleu(*, column: str = "reference") -> Callable[..., list[float | None]]:
    """Make a reward: the sentence BLEU score, from 0 to 1, against a reference (or several) in a column, by sacrebleu.

    >>> bleu()(["the cat sat on the mat"], reference=["the cat sat on the mat"])
    [1.0]
    """
    optional_package("sacrebleu", what="bleu", package="sacrebleu", extra="text")

    def bleu_reward(completions: list[Any], **columns: Any) -> list[float | None]:
        scorer = _bleu_scorer()
        return [
            None if references is None else round(min(scorer.sentence_score(text, references).score / 100, 1.0), 10)
            for text, references in _with_references(completions, columns, column, "bleu")
        ]

    return named_reward(bleu_reward, "bleu", streaming=True, isolated=True)


@functools.cache
def _bleu_scorer() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)


def _with_references(
    completions: list[Any], columns: dict[str, Any], column: str, what: str
) -> list[tuple[str, list[str] | None]]:
    """The text of each completion, and the references to compare it with."""
    needed = f"{what} needs a column '{column}' with a text (or several) to compare with"
    references = column_of(columns, column, needed=needed)
    return [
        (text_of(completion)[:MAX_CHARACTERS], [reference] if isinstance(reference, str) else reference)
        for completion, reference in zip(completions, references, strict=True)
    ]
