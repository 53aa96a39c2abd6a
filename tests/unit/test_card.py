"""The model card: whatever names say, it has the fields and the text that it should have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from rloom.training.card import SHOWN, as_yaml, model_card

EVIL = 'x"\nlicense: mit\n---\n# Gone\n<script>alert(1)</script> [a](javascript:b) | ``` \x1b[2J'


def card(**given) -> tuple[dict, str]:
    args = SimpleNamespace(**dict.fromkeys(SHOWN, "value"))
    names = {"model_id": "org/base", "name": "model", "repository": "org/model", "dataset": None, "tags": {"rloo"}}
    text = model_card(args, **{**names, **given})
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_plain_names_stay_as_they_are():
    front, body = card(dataset="org/data_set-1.5")
    assert front == {
        "library_name": "transformers",
        "model_name": "model",
        "base_model": "org/base",
        "datasets": "org/data_set-1.5",
        "tags": ["generated_from_trainer", "rloo"],
    }
    assert "[org/base](https://huggingface.co/org/base), trained on org/data_set-1.5." in body
    assert 'model="org/model")' in body


@pytest.mark.parametrize("field", ["model_id", "name", "repository", "dataset", "tags", "front_matter"])
def test_names_add_nothing(field):
    given = {"tags": {EVIL}, "front_matter": {"language": EVIL}}.get(field, EVIL)
    plain = {"tags": {"x"}, "front_matter": {"language": "x"}}.get(field, "x")
    front, body = card(**{field: given})
    expected, usual = card(**{field: plain})
    assert front.keys() == expected.keys()
    assert [line[:3] for line in body.splitlines()] == [line[:3] for line in usual.splitlines()]
    assert "\x1b" not in body
    if field != "repository":  # where it stands in a block of code
        assert "<script>" not in body
        assert "](javascript" not in body.replace("\\]", "")
    values = {"model_id": "base_model", "name": "model_name", "dataset": "datasets", "front_matter": "language"}
    if field in values:
        assert front[values[field]] == EVIL
    if field == "tags":
        assert EVIL in front["tags"]


@pytest.mark.parametrize(
    "name", ["no", "1.5", "2024-01-01", "null", "- a", "a: b", "#a", "", "é", "😀", "\x9b1m\u2028\x7f"]
)
def test_names_that_yaml_would_read_as_something_else(name):
    front, _ = card(name=name)
    assert front["model_name"] == name


def test_lists_of_names():
    assert yaml.safe_load(as_yaml(["no", "x\x7f", ["\x9b", 1.5]])) == ["no", "x\x7f", ["\x9b", 1.5]]
    as_yaml(["a\ud800"]).encode()  # a file can be written of it
