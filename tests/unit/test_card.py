"""The model card: whatever names say, it has the fields and the text that it should have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from rloom.training.card import SHOWN, ModelFacts, as_yaml, model_card
from rloom.training.results import RunResults

EVIL = 'x"\nlicense: mit\n---\n# Gone\n<script>alert(1)</script> [a](javascript:b) | ``` \x1b[2J'


def card(**given) -> tuple[dict, str]:
    args = SimpleNamespace(**dict.fromkeys(SHOWN, "value"))
    names = {"name": "model", "repository": "org/model", "dataset": None, "tags": {"rloo"}}
    facts = {"base": given.pop("model_id", "org/base"), **given.pop("facts", {})}
    results = given.pop("results", RunResults())
    text = model_card(args, model=ModelFacts(**facts), results=results, **{**names, **given})
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


def rewarded(name):
    return RunResults(rewards=[(name, 1.0), ("b", 2.0)], logs=[{"reward": 1.0, f"rewards/{name}/mean": 2.0, "step": 1}])


@pytest.mark.parametrize("field", ["model_id", "name", "repository", "dataset", "tags", "front_matter", "results"])
def test_names_add_nothing(field):
    given = {"tags": {EVIL}, "front_matter": {"language": EVIL}, "results": rewarded(EVIL)}.get(field, EVIL)
    plain = {"tags": {"x"}, "front_matter": {"language": "x"}, "results": rewarded("x")}.get(field, "x")
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


def test_an_adapter_is_peft_s():
    front, body = card(facts={"adapter": "lora"})
    assert (front["library_name"], front["base_model"]) == ("peft", "org/base")
    assert "lora" in front["tags"]
    assert "an adapter (lora) of [org/base]" in body
    assert "pip install peft" in body


def test_of_a_folder_only_the_name_is_told(tmp_path):
    (tmp_path / "private").mkdir()
    front, body = card(model_id=str(tmp_path / "private"))
    assert "base_model" not in front
    assert "a fine-tuned version of private." in body
    assert str(tmp_path) not in body


def test_messages_only_for_a_model_with_a_template():
    _, body = card()
    assert 'prompt = "What would you like to know?"' in body
    _, body = card(facts={"chat": True})
    assert 'prompt = [{"role": "user", "content": "What would you like to know?"}]' in body
    _, body = card(facts={"chat": True, "vision": True})
    assert 'pipeline("image-text-to-text", model="org/model")' in body


def test_rewards_results_and_curve():
    logs = [{"step": n, "reward": n / 10, "rewards/right/mean": n / 20, "rewards/form/mean": 1.0} for n in range(1, 11)]
    logs += [{"step": 10, "eval_reward": 0.75}, {"step": 10, "train_loss": 0.1}]
    _, body = card(results=RunResults(rewards=[("right", 1.0), ("form", 0.5)], logs=logs))
    assert "Rewards: right, form (weight 0.5)." in body
    assert "After 10 updates (means of the first and the last 2 logs):" in body
    assert "| reward | 0.15 | 0.95 | 1 | `▁▂▃▃▄▅▆▆▇█` |" in body
    assert "| right | 0.075 | 0.475 | 0.5 | `" in body
    assert "| form | 1 | 1 | 1 | `▁▁▁▁▁▁▁▁▁▁` |" in body
    assert "| reward on evaluation prompts | 0.75 | 0.75 | 0.75 | `▁` |" in body
    _, body = card(results=RunResults(rewards=[("right", 1.0)]))  # before the first log
    assert "Rewards: right." in body
    assert "After" not in body
