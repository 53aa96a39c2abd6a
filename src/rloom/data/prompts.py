"""Turns rows into token ids: plain text or chat messages.

Prompts are checked against the model's context length and chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rloom.data.datasets import prompt_format
from rloom.data.images import ImageSources, has_places, images_of, without_images
from rloom.data.vision import VisionEncoder, is_vision
from rloom.errors import DataError
from rloom.printable import get_logger
from rloom.types import Prompt

logger = get_logger(__name__)


MAX_SCANNED = 200_000
"""Data sets up to this size are scanned for their longest prompts before training."""


class PromptEncoder:
    """Turns rows into [`Prompt`]s with the model's tokenizer and chat template.

    `context_length` is the model's limit on prompt plus completion, None if it has none. With `hard_limit` it must not
    be exceeded: the user set it, or the model looks positions up in a table that ends there. (Rotary positions only get
    worse beyond it.) `columns` are those that reward functions may see, None for all.
    """

    def __init__(
        self,
        processing_class: Any,
        *,
        template_kwargs: dict[str, Any],
        context_length: int | None,
        max_completion_length: int,
        hard_limit: bool = False,
        columns: tuple[str, ...] | None = None,
        images: ImageSources | None = None,
    ) -> None:
        self.processing_class = processing_class
        self.template_kwargs = template_kwargs
        self.context_length = context_length
        self.max_completion_length = max_completion_length
        self.hard_limit = hard_limit
        self.columns = columns
        # The tokens of the longest prompt so far, and the longest prompt with images.
        self.longest = 1
        self.pictured: Prompt | None = None
        self._warned = False
        seeing = is_vision(processing_class)
        self.vision = VisionEncoder(processing_class, template_kwargs, images) if seeing else None

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[Prompt]:
        """Encode rows with prompts of one format, in order."""
        kinds = [prompt_format(row["prompt"], "prompt") for row in rows]
        if len(set(kinds)) > 1:
            raise DataError("mixed prompt formats: some prompts are text, others lists of messages; use one of them")
        if kinds[0] == "messages":
            self._check_template()
        if self.vision is not None:
            prompts = [self.vision.encode(row, self._columns(row)) for row in rows]
        else:
            prompts = self._encode_text(rows, chat=kinds[0] == "messages")
        for prompt in prompts:
            self._check_length(prompt)
            self.longest = max(self.longest, len(prompt.token_ids))
            if prompt.inputs and (self.pictured is None or len(prompt.token_ids) > len(self.pictured.token_ids)):
                self.pictured = prompt
        return prompts

    def _encode_text(self, rows: Sequence[dict[str, Any]], *, chat: bool) -> list[Prompt]:
        contents = [row["prompt"] for row in rows]
        if any(images_of(row) or has_places(row["prompt"]) for row in rows):
            raise DataError(
                f"a prompt has images, and {type(self.processing_class).__name__} is a tokenizer: pass a vision-"
                "language model with its processor as `processing_class`, or take the images out"
            )
        ids = self._chat_ids(contents) if chat else self._text_ids(contents)
        return [
            Prompt(content=content, token_ids=list(tokens), columns=self._columns(row))
            for content, tokens, row in zip(contents, ids, rows, strict=True)
        ]

    def check_early(self, rows: Sequence[dict[str, Any]]) -> None:
        """Find errors in prompts before training: no chat template, or prompts that are too long.

        Only the longest texts are encoded. A shorter text may still have more tokens; it is then found when it is used.
        """
        if len(rows) <= MAX_SCANNED:
            # Without the other columns, `datasets` decodes no images.
            texts: Any = rows.select_columns("prompt") if hasattr(rows, "select_columns") else rows
            size = [self._size(texts[i]["prompt"], i) for i in range(len(rows))]
            longest = sorted(range(len(rows)), key=size.__getitem__, reverse=True)[:8]
            self.encode([rows[i] for i in longest])
        else:
            self.encode([rows[0]])

    def _size(self, prompt: Any, number: int) -> int:
        prompt_format(prompt, f"row {number} of the data")
        return len(str(without_images(prompt)))

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return row if self.columns is None else {name: row[name] for name in self.columns if name in row}

    def _text_ids(self, texts: list[str]) -> list[list[int]]:
        return self.processing_class(text=texts)["input_ids"]

    def _check_template(self) -> None:
        if getattr(self.processing_class, "chat_template", None) is None:
            raise DataError(
                "the prompts are lists of messages and the tokenizer has no chat template; set "
                "`tokenizer.chat_template`, use an instruction-tuned model's tokenizer, or give the prompts as text"
            )

    def _chat_ids(self, conversations: list[Any]) -> list[list[int]]:
        return self.processing_class.apply_chat_template(
            conversation=conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.template_kwargs,
        )["input_ids"]

    def _check_length(self, prompt: Prompt) -> None:
        if not prompt.token_ids:
            raise DataError(
                "a prompt has no tokens (an empty text, and the tokenizer adds none): drop it, or give the tokenizer "
                "a beginning-of-sequence token"
            )
        if self.context_length is None:
            return
        room = self.context_length - len(prompt.token_ids)
        if room < 1:
            raise DataError(
                f"a prompt has {len(prompt.token_ids)} tokens, and the model's context is {self.context_length}: "
                f"shorten or filter the prompts. It begins: {str(prompt.content)[:80]!r}"
            )
        if room < self.max_completion_length and self.hard_limit:
            raise DataError(
                f"a prompt of {len(prompt.token_ids)} tokens and max_completion_length={self.max_completion_length} "
                f"exceed {self.context_length} tokens, which are all that the model takes (its positions, or "
                f"max_seq_length): set it to {room} or less, or shorten the prompts. It begins: "
                f"{str(prompt.content)[:80]!r}"
            )
        if room < self.max_completion_length and not self._warned:
            self._warned = True
            logger.warning(
                "a prompt of %d tokens and max_completion_length=%d exceed the model's context of %d; completions of "
                "such prompts run past what the model was trained for",
                len(prompt.token_ids),
                self.max_completion_length,
                self.context_length,
            )


def as_reply(text: Any, *, conversational: bool) -> Any:
    """A text in the form of its prompt: as a list of messages if the prompt is one.

    >>> as_reply("Yes.", conversational=True)
    [{'role': 'assistant', 'content': 'Yes.'}]
    """
    if not conversational or not isinstance(text, str):
        return text
    return [{"role": "assistant", "content": text}]
