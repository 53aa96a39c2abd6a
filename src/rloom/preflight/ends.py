"""Whether prompts are written, and completions end, as the model was trained to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rloom.data.prompt_checks import prompt_problems
from rloom.data.prompts import PromptEncoder
from rloom.types import Record

OFTEN = 0.25
"""Share of completions with a special token in them that makes it look like an end."""


def end_problems(
    encoder: PromptEncoder, tokenizer: Any, row: dict[str, Any], records: Sequence[Record], ends: Sequence[int]
) -> list[str]:
    """What is wrong with templates and end tokens, as lines that say what to change. `ends`: what generation stops
    at."""
    found = prompt_problems(encoder, row)
    completions = [record.completion for record in records]
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(end)) for end in ends)
    over = passed_over(completions, tokenizer.all_special_ids, ends)
    if over:
        shares = " and ".join(f"{share:.0%} after {tokenizer.convert_ids_to_tokens(t)}" for t, share in over.items())
        tokens = " or ".join(f"stop_token_id={token} ({tokenizer.convert_ids_to_tokens(token)})" for token in over)
        found.append(
            f"completions go on, {shares}, and generation stops at {names} only: if that ends the model's turns, set "
            f"{tokens}"
        )
    if completions and all(completion.truncated for completion in completions):
        found.append(
            f"no completion ends by itself (at {names}): raise max_completion_length, or compare the chat template and "
            "the end token with what the model was trained on"
        )
    return found


def passed_over(completions: Sequence[Any], special: Sequence[int], ends: Sequence[int]) -> dict[int, float]:
    """Special tokens that stand in many completions and end none of them, each with the share of completions."""
    others = set(special) - set(ends)
    counts = {
        token: sum(token in completion.drawn_ids for completion in completions) / max(1, len(completions))
        for token in sorted(others)
    }
    return {token: share for token, share in counts.items() if share >= OFTEN}


def end_notes(tokenizer: Any, ends: Sequence[int], *, chat: bool) -> list[str]:
    """What is worth knowing, and not wrong."""
    notes = [f"completions end at {', '.join(str(tokenizer.convert_ids_to_tokens(end)) for end in ends)}"]
    if tokenizer.pad_token_id in ends:
        notes.append("the padding token is an end token: fine here, ends are found by the first of them")
    if not chat and getattr(tokenizer, "chat_template", None):
        notes.append("prompts are plain text, and the tokenizer has a chat template: an instruction-tuned model wants "
                     'messages, [{"role": "user", "content": …}]')  # fmt: skip
    return notes
