"""Checks of how prompts are written for a model: chat templates that leave something out, or put it there twice."""

from __future__ import annotations

from typing import Any

from rloom.data.prompts import PromptEncoder


def prompt_problems(encoder: PromptEncoder, row: dict[str, Any]) -> list[str]:
    """What is wrong with the prompt of a row, as lines that say what to change. A prompt with images is not looked at.

    >>> from types import SimpleNamespace
    >>> encoder = SimpleNamespace(vision=None, processing_class=SimpleNamespace(bos_token_id=1, bos_token="<s>"))
    >>> encoder.encode = lambda rows: [SimpleNamespace(token_ids=[1, 1, 7])]
    >>> [line.split(":")[0] for line in prompt_problems(encoder, {"prompt": "<s>Hi"})]
    ['prompts begin with two <s>']
    """
    if encoder.vision is not None:
        return []
    found = [_no_generation_prompt(encoder, row["prompt"]), _doubled_bos(encoder, row)]
    return [line for line in found if line is not None]


def _no_generation_prompt(encoder: PromptEncoder, prompt: Any) -> str | None:
    """The template ignores `add_generation_prompt`, so that the model is not told that it is its turn."""
    # A prompt that ends with the assistant's words is continued as it is.
    if isinstance(prompt, str) or prompt[-1].get("role") == "assistant":
        return None
    with_it, without = (
        encoder.processing_class.apply_chat_template(
            conversation=prompt, tokenize=False, add_generation_prompt=adding, **encoder.template_kwargs
        )
        for adding in (True, False)
    )
    if with_it != without:
        return None
    return (
        "the chat template adds no generation prompt: a prompt ends with the user's turn, and the model has to begin "
        "its own; add `{% if add_generation_prompt %}…{% endif %}` to tokenizer.chat_template, as in its training"
    )


def _doubled_bos(encoder: PromptEncoder, row: dict[str, Any]) -> str | None:
    """The beginning-of-sequence token is there twice: by the tokenizer, and by the prompt's own text or template."""
    bos = getattr(encoder.processing_class, "bos_token_id", None)
    (prompt,) = encoder.encode([row])
    if bos is None or prompt.token_ids[:2] != [bos, bos]:
        return None
    name = encoder.processing_class.bos_token
    return (
        f"prompts begin with two {name}: the tokenizer adds one to what begins with one; take it out of the prompts' "
        "text, or set tokenizer.add_bos_token=False"
    )
