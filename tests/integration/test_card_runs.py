"""What a run leaves behind: a card whose snippet runs, and its state, with or without checkpoints."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from rloom import RLOOTrainer
from rloom.models.adapters import lora
from tests.conftest import make_model, make_tokenizer


def length(completions):
    return [float(len(str(c))) for c in completions]


def chat(rows):
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


@pytest.mark.parametrize("kind", ["text", "chat", "no template", "adapter"])
def test_the_snippet_runs(kind, config, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    make_model().save_pretrained("base")
    tokenizer.save_pretrained("base")
    if kind == "no template":
        tokenizer.chat_template = None
    args = config(max_steps=2, output_dir="out")
    adapter = lora(r=2) if kind == "adapter" else None
    prompts = chat(rows) if kind in ("chat", "adapter") else rows
    trainer = RLOOTrainer("base", length, args, prompts, processing_class=tokenizer, peft_config=adapter)
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == ("peft" if adapter else "transformers")
    assert ('"role"' in card) == (kind in ("chat", "adapter"))
    assert "Rewards: length." in card
    assert re.search(r"\| reward \| [\d.]+ \| [\d.]+ \| [\d.]+ \| `[▁-█]{2}` \|", card)
    [code] = re.findall(r"## Use\n\n```python\n(.*?)\n```", card, re.S)
    capsys.readouterr()
    exec(code.replace("max_new_tokens=128", "max_new_tokens=4"), {})
    assert capsys.readouterr().out.strip()


def test_the_state_is_there_without_a_checkpoint(config, rows, tmp_path):
    args = config(max_steps=2, save_strategy="no")
    RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer()).train()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert [entry["step"] for entry in state["log_history"] if "reward" in entry] == [1, 2]


def test_a_full_disk_costs_the_state_and_not_the_run(config, rows, monkeypatch, caplog):
    trainer = RLOOTrainer(make_model(), length, config(max_steps=1), rows, processing_class=make_tokenizer())

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RLOOTrainer, "save_state", full)
    trainer.train()
    assert "trainer_state.json cannot be written" in caplog.text
