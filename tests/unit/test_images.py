"""Images of rows: where they stand, as what they come, and how several rows' go together."""

from __future__ import annotations

import base64
import io

import numpy
import pytest
import torch
from PIL import Image

from rloom.data.images import (
    ImageSources,
    as_picture,
    folder_of,
    has_places,
    images_in,
    images_of,
    with_images,
    without_images,
)
from rloom.data.model_inputs import fitted_to, join, placeholder_ids
from rloom.errors import DataError


def test_columns():
    assert images_of({"prompt": "a"}) == []
    assert images_of({"prompt": "a", "image": "x"}) == ["x"]
    assert images_of({"prompt": "a", "images": ("x", "y"), "image": None}) == ["x", "y"]
    with pytest.raises(DataError, match="put all of them"):
        images_of({"image": "x", "images": ["y"]})
    with pytest.raises(DataError, match="call it 'images'"):
        images_of({"image": ["x"]})
    with pytest.raises(DataError, match="call it 'image'"):
        images_of({"images": "x"})


def test_images_fill_their_places_in_order():
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [{"type": "text", "text": "a", "image": None}, {"type": "image", "text": None}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "image", "image": "own"}, {"type": "image"}]},
    ]
    made = with_images(messages, ["x", "y"])
    assert images_in(made) == ["x", "own", "y"]
    assert made[1]["content"][0] == {"type": "text", "text": "a"}  # a key with None would read as an image
    assert messages[1]["content"][1] == {"type": "image", "text": None}
    assert without_images(made)[3]["content"] == []
    assert has_places(messages)
    assert not has_places(tuple(without_images(messages)))
    for count in (1, 3):
        with pytest.raises(DataError, match=f"{count} images, and its messages have 2 places"):
            with_images(messages, ["x"] * count)


def test_plain_messages_get_their_images_first():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    made = with_images(messages, ["x", "y"])
    assert [len(m["content"]) for m in made] == [1, 3, 1]
    assert made[1]["content"][:2] == [{"type": "image", "image": "x"}, {"type": "image", "image": "y"}]
    with pytest.raises(DataError, match="no message of the user"):
        with_images(messages[:1], ["x"])


def test_addresses_and_other_media():
    address = {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
    assert images_in(with_images([{"role": "user", "content": [address]}], [])) == ["http://example.org/a.png"]
    with pytest.raises(DataError, match="type 'video': rloom trains on text and images"):
        with_images([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], [])


def test_what_data_names_is_read_with_care(tmp_path, monkeypatch):
    """Whoever made the data chooses neither files of this machine nor what it asks for."""
    import transformers.image_utils

    asked = []
    opened = transformers.image_utils.load_image
    monkeypatch.setattr(
        transformers.image_utils, "load_image", lambda name, **options: asked.append(name) or opened(name)
    )
    for folder in ("own", "other"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (2, 3)).save(tmp_path / folder / "a.png")
    (tmp_path / "own" / "link.png").symlink_to(tmp_path / "other" / "a.png")
    monkeypatch.chdir(tmp_path / "own")
    inside = ["a.png", str(tmp_path / "own" / "a.png"), "../own/a.png", {"bytes": None, "path": "a.png"}]
    outside = ["../other/a.png", str(tmp_path / "other" / "a.png"), "link.png", {"path": "../other/a.png"}]
    for name in inside:
        assert as_picture(name).size == (2, 3)
    asked.clear()
    for name in outside:
        with pytest.raises(DataError, match=r"not within .*own: set image_folder"):
            as_picture(name)
    for name in ("http://127.0.0.1:9/a.png", "https://example.org/a.png", "HTTP://x/a.png", "file:///etc/hostname"):
        with pytest.raises(DataError, match="fetch_images=True"):
            as_picture(name)
    assert asked == []
    elsewhere = ImageSources(folder=str(tmp_path / "other"))
    assert as_picture(str(tmp_path / "other" / "a.png"), elsewhere).size == (2, 3)
    with pytest.raises(DataError, match="not within"):
        as_picture(str(tmp_path / "own" / "a.png"), elsewhere)
    with pytest.raises(DataError, match="no file in the image_folder"):
        as_picture("b.png")


def test_addresses_are_fetched_where_that_is_allowed(monkeypatch):
    import transformers.image_utils

    monkeypatch.setattr(transformers.image_utils, "load_image", lambda name, timeout: Image.new("RGB", (len(name), 1)))
    assert as_picture("http://a/b", ImageSources(fetch=True)).size == (10, 1)


def test_images_in_base64():
    written = io.BytesIO()
    Image.new("RGB", (40, 30), (9, 8, 7)).save(written, "png")
    text = base64.b64encode(written.getvalue()).decode()
    for form in (text, f"data:image/png;base64,{text}", base64.b64encode(written.getvalue() + bytes(9000)).decode()):
        assert as_picture(form).size == (40, 30)


def test_the_folder_of_local_data(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "data.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    assert folder_of("../data.jsonl") == folder_of(str(tmp_path)) == str(tmp_path)
    assert folder_of("org/data") is None
    monkeypatch.chdir(tmp_path)
    assert folder_of("data.jsonl") is None  # which the working folder holds


def test_whatever_stands_for_an_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = numpy.arange(60, dtype=numpy.uint8).reshape(4, 5, 3)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png")
    written = io.BytesIO()
    image.save(written, "png")
    forms = [
        image,
        pixels,
        torch.tensor(pixels).permute(2, 0, 1),
        written.getvalue(),
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        {"bytes": written.getvalue(), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]
    for form in forms:
        assert numpy.array_equal(numpy.asarray(as_picture(form)), pixels)
    for mode in ("L", "RGBA", "P"):
        assert as_picture(image.convert(mode)).mode == "RGB"
    assert as_picture(pixels[..., :1]).size == (5, 4)
    with pytest.raises(DataError, match="give it as uint8"):
        as_picture(pixels.astype(numpy.float32))
    with pytest.raises(DataError, match="not int"):
        as_picture(3)


def test_rows_are_joined_and_padded():
    one = {"pixel_values": torch.ones(1, 2, 3), "image_position_ids": torch.ones(1, 2, 2)}
    two = {"pixel_values": torch.ones(2, 1, 4), "image_position_ids": torch.ones(2, 1, 2)}
    joined = join([one, {}, two], left=4, right=2)
    assert joined["pixel_values"].shape == (3, 2, 4)
    assert joined["pixel_values"].sum() == 6 + 8
    assert joined["image_position_ids"].min() == -1
    assert join([{}, {}], left=4, right=2) == {}


def test_images_take_the_models_precision():
    model = torch.nn.Linear(2, 2).bfloat16()
    model.dtype = torch.bfloat16
    made = fitted_to(model, {"pixel_values": torch.ones(1, 2), "image_grid_thw": torch.ones(1, 3, dtype=torch.long)})
    assert (made["pixel_values"].dtype, made["image_grid_thw"].dtype) == (torch.bfloat16, torch.long)


def test_tokens_that_stand_for_images():
    class Config:
        image_token_id, image_token_index, video_token_id = 7, 7, 9

    assert placeholder_ids(Config()) == (7, 9)
    assert placeholder_ids(object()) == ()


def test_images_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "text.png").write_text("no image")
    written = io.BytesIO()
    Image.effect_noise((50, 50), 50).save(written, "png")
    for value in ("loop.png", "text.png", b"no image", written.getvalue()[:200], {"bytes": b"no image"}):
        words = value if isinstance(value, str) else "no image" if len(value) < 100 else "PNG"
        with pytest.raises(DataError, match=words):
            as_picture(value)
    for name in ("file:///etc/hostname", "ftp://127.0.0.1:9/a.png", "http://127.0.0.1:9/a.png"):
        with pytest.raises(DataError, match=name):
            as_picture(name, ImageSources(fetch=True))


def test_all_of_the_disk_is_no_folder_of_images(monkeypatch):
    monkeypatch.setattr("rloom.data.images.Path.exists", lambda path: True)
    assert folder_of("/data.jsonl") is None
    assert folder_of("/") is None
