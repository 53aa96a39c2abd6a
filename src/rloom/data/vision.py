"""Turns prompts with images into token ids and image tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import ProcessorMixin

from rloom.data.images import ImageSources, as_picture, images_in, images_of, with_images
from rloom.errors import DataError
from rloom.types import Prompt


def is_vision(processing_class: Any) -> bool:
    """Whether this is a processor of text and images, and not a tokenizer."""
    return (
        isinstance(processing_class, ProcessorMixin) and getattr(processing_class, "image_processor", None) is not None
    )


class VisionEncoder:
    """Turns rows into [`Prompt`]s, one at a time. Each prompt keeps the tensors of its own images."""

    def __init__(self, processor: Any, template_kwargs: dict[str, Any], sources: ImageSources | None = None) -> None:
        self.processor, self.template_kwargs, self.sources = processor, template_kwargs, sources
        names = [getattr(processor, name, None) for name in ("boi_token", "image_token")]
        self.marks = list(dict.fromkeys(name for name in names if isinstance(name, str)))

    def encode(self, row: dict[str, Any], columns: dict[str, Any]) -> Prompt:
        """The prompt of one row; `columns` are those that rewards see."""
        given, content = images_of(row), row["prompt"]
        if isinstance(content, str):
            pictures = [as_picture(image, self.sources) for image in given]
            self._check_marks(content, len(pictures))
            encoded = self._call(len(pictures), self.processor, text=[content], images=[pictures] if pictures else None)
        else:
            content = with_images(content, given)
            pictures = [as_picture(image, self.sources) for image in images_in(content)]
            encoded = self._chat(content, pictures)
        ids, inputs = _split(encoded)
        self._check_placed(ids, len(pictures))
        return Prompt(
            content=content,
            token_ids=ids,
            columns=columns,
            inputs=inputs if pictures else {},
            images=pictures,
        )

    def _chat(self, content: list[dict[str, Any]], pictures: list[Any]) -> Any:
        rest = iter(pictures)
        messages = [
            {**m, "content": [{**p, "image": next(rest)} if p["type"] == "image" else p for p in m["content"]]}
            if m.get("content")
            else m
            for m in content
        ]
        return self._call(
            len(pictures),
            self.processor.apply_chat_template,
            conversation=[messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.template_kwargs,
        )

    def _call(self, count: int, function: Any, **arguments: Any) -> Any:
        """Call the processor. Its errors are errors of the data: the number of images, or their sizes."""
        try:
            return function(**arguments, return_tensors="pt")
        except (ValueError, TypeError, IndexError, KeyError) as error:
            name = type(self.processor).__name__
            raise DataError(f"{name} does not take a prompt with {count} image(s): {error}") from error

    def _check_marks(self, text: str, count: int) -> None:
        """Refuse a text that does not have one placeholder for each image."""
        named = sum(text.count(mark) for mark in self.marks)
        if self.marks and named != count:
            raise DataError(
                f"a prompt has {count} image(s), and its text names {named}: write {self.marks[0]!r} where each image "
                f"stands, or give the prompt as messages. It begins: {text[:80]!r}"
            )

    def _check_placed(self, ids: list[int], count: int) -> None:
        token = getattr(self.processor, "image_token_id", None)
        if count and isinstance(token, int) and token not in ids:
            raise DataError(
                f"the chat template of {type(self.processor).__name__} leaves no place for images: use a template that "
                "renders parts of type 'image'"
            )


def _split(encoded: Any) -> tuple[list[int], dict[str, Tensor]]:
    """The token ids, and the other inputs of the model."""
    rest = {name: value for name, value in encoded.items() if name not in ("input_ids", "attention_mask")}
    return encoded["input_ids"][0].tolist(), {n: value for n, value in rest.items() if isinstance(value, Tensor)}
