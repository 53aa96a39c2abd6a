"""Images of prompts: finds them in rows and messages, and reads them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rloom.errors import DataError

IMAGE_COLUMNS = ("image", "images")
"""Columns of a data set that hold a prompt's image, or the list of its images."""

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
WEB = re.compile(r"https?://")
FETCH_SECONDS = 60.0
"""How long fetching an image may take."""

SOURCES = ("image", "image_url", "url", "path", "base64")
"""Keys of a message's part that may hold an image, or its path or address."""

Messages = list[dict[str, Any]]


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in a row's columns, in order.

    >>> images_of({"prompt": "a", "images": ["one.png", "two.png"]}), images_of({"prompt": "a", "image": None})
    (['one.png', 'two.png'], [])
    """
    one, several = row.get("image"), row.get("images")
    if one is not None and several is not None:
        raise DataError("a row has an 'image' and 'images' too: put all of them, in order, into 'images'")
    if isinstance(one, (list, tuple)):
        raise DataError("the column 'image' holds a list: call it 'images', or give one image in each row")
    if several is not None and not isinstance(several, (list, tuple)):
        raise DataError(f"the column 'images' holds lists of images, not {type(several).__name__}; call it 'image'")
    return list(several or []) if one is None else [one]


def with_images(messages: Messages, images: list[Any]) -> Messages:
    """A copy of the messages in parts (text, images), with each image in its place.

    Images fill the empty parts of type "image". Where no message has parts, they go before the text of the user's first
    message.

    >>> with_images([{"role": "user", "content": "What is it?"}], ["cat.png"])[0]["content"]
    [{'type': 'image', 'image': 'cat.png'}, {'type': 'text', 'text': 'What is it?'}]
    """
    plain = all(isinstance(message.get("content"), (str, type(None))) for message in messages)
    result = [_in_parts(message) for message in messages]
    if images and plain:
        first = next((message for message in result if message["role"] == "user"), None)
        if first is None:
            raise DataError("a prompt has images, and no message of the user to put them in")
        first["content"] = [{"type": "image"} for _ in images] + first["content"]
    places = [part for part in _image_parts(result) if "image" not in part]
    if len(places) != len(images):
        raise DataError(
            f"a prompt has {len(images)} images, and its messages have {len(places)} places for them: give one part "
            "{'type': 'image'} for each image, or give the contents as plain text"
        )
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return result


def images_in(messages: Messages) -> list[Any]:
    """The images in messages made by [`with_images`]."""
    return [part["image"] for part in _image_parts(messages)]


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message whose content is a list of parts."""
    content = message.get("content")
    # A tool call has no content.
    if content is None:
        return dict(message)
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """One part, without the keys that `datasets` fills with None: chat templates test whether a key exists."""
    known = {key: value for key, value in part.items() if value is not None}
    kind = known.get("type", "image" if "image" in known else "text")
    if kind in ("image", "image_url"):
        source = next((known[key] for key in SOURCES if key in known), None)
        # This is OpenAI's format: {"image_url": {"url": …}}.
        if isinstance(source, Mapping) and "url" in source:
            source = source["url"]
        return {"type": "image"} if source is None else {"type": "image", "image": source}
    if kind != "text":
        raise DataError(f"a message has a part of type {kind!r}: rloom trains on text and images")
    return {**known, "type": "text"}


def _image_parts(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        for part in message.get("content") or ():
            if part["type"] == "image":
                yield part


@dataclass(frozen=True, slots=True)
class ImageSources:
    """Where images that a data set names may be read from.

    The author of a data set must not decide which files of this machine are read, or which addresses are fetched.
    """

    fetch: bool = False
    folder: str | None = None
    """The folder that paths are read from. None means the working folder."""

    def read(self, name: str) -> Any:
        """Read an image given by a path in the folder, by an address if these are allowed, or in base64."""
        from transformers.image_utils import load_image

        if ADDRESS.match(name):
            if not self.fetch:
                raise DataError(
                    f"an image is named by an address, {name[:100]!r}, and addresses are not fetched: set "
                    "fetch_images=True if you trust who made the data"
                )
            if not WEB.match(name):
                raise DataError(f"an image is named by the address {name[:100]!r}: only http and https are fetched")
            return _readable(lambda: load_image(name, timeout=FETCH_SECONDS), name)
        if (path := self._found(name)) is not None:
            return _readable(lambda: load_image(str(path)), name)
        try:
            # There is no such file, so it must be base64.
            return load_image(name)
        except ValueError:
            raise DataError(
                f"an image is named {name[:100]!r}, which is no file in the image_folder, {self._where()}, and no "
                "image in base64"
            ) from None

    def _where(self) -> Path:
        return Path(self.folder or ".").resolve()

    def _found(self, name: str) -> Path | None:
        """The file of a path, None if there is none. A file outside of the folder is an error."""
        where = self._where()
        try:
            path = (where / name).resolve()
            if not path.is_file():
                # `load_image` would read the path from the working folder.
                path = Path(name).resolve()
            if not path.is_file():
                return None
        except (OSError, ValueError, RuntimeError):
            # The name is too long for a path, contains a zero byte, or is a loop of links.
            return None
        if not path.is_relative_to(where):
            raise DataError(
                f"an image is named by the path {name[:100]!r}, which is not within {where}: set image_folder to a "
                "folder that its images may be read from"
            )
        return path


def folder_of(data: str | None) -> str | None:
    """The image folder for local data: the data's own folder, or None if that is within the working folder."""
    if not data or not Path(data).exists():
        return None
    folder = Path(data).resolve() if Path(data).is_dir() else Path(data).resolve().parent
    # The root folder would allow all files of the machine.
    if folder == Path(folder.anchor):
        return None
    return None if folder.is_relative_to(Path.cwd()) else str(folder)


def _readable(load: Callable[[], Any], value: Any) -> Any:
    """Load an image completely. Pillow opens broken images and raises errors of many kinds later."""
    try:
        image = load()
        image.load()
    except Exception as error:
        raise DataError(f"an image, {value[:100]!r}, cannot be read: {type(error).__name__}: {error}") from None
    return image


def as_picture(value: Any, sources: ImageSources | None = None) -> Any:
    """An image in RGB, from a PIL image, an array, bytes, a path, an address, or a dict of `datasets`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images need the package Pillow: pip install 'rloom[vision]'") from error
    # `datasets` gives a dict for an image that it does not decode.
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        data = value
        value = _readable(lambda: Image.open(io.BytesIO(data)), data)
    elif isinstance(value, (str, Path)):
        value = (sources or ImageSources()).read(str(value))
    elif not isinstance(value, Image.Image) and (isinstance(value, Tensor) or hasattr(value, "__array_interface__")):
        value = Image.fromarray(_pixels(value))
    if not isinstance(value, Image.Image):
        raise DataError(f"an image is a PIL image, an array, bytes, a path or an address, not {type(value).__name__}")
    return value if value.mode == "RGB" else value.convert("RGB")


def _pixels(value: Any) -> Any:
    """An array in Pillow's layout: (height, width) or (height, width, channels), uint8."""
    import numpy

    array = numpy.asarray(value)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):
        # torch's layout is (channels, height, width).
        array = array.transpose(1, 2, 0)
    if array.dtype != numpy.uint8 or array.ndim not in (2, 3):
        raise DataError(
            f"an image is an array of shape {array.shape} and type {array.dtype}: give it as uint8 from 0 to 255, "
            "(height, width, channels)"
        )
    return array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array


def has_places(prompt: Any) -> bool:
    """Whether a prompt has places for images among its messages, filled or not."""
    return not isinstance(prompt, str) and any(
        len(words["content"]) < len(message["content"])
        for message, words in zip(prompt, without_images(prompt), strict=True)
        if isinstance(message.get("content"), list)
    )


def without_images(prompt: Any) -> Any:
    """A prompt without its images: it can be printed, and is the same in every run.

    >>> without_images([{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text"}]}])
    [{'role': 'user', 'content': [{'type': 'text'}]}]
    """
    if isinstance(prompt, str):
        return prompt
    return [
        {**message, "content": [p for p in message["content"] if p.get("type") not in ("image", "image_url")]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]
