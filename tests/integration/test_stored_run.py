"""What a training leaves in its store beside completions: logs, diagnoses, what the run is, values of tokens."""

from __future__ import annotations

import json

import pytest
import torch

from rloom import RLOOTrainer
from rloom.errors import ConfigError
from rloom.observe import RunReader
from tests.conftest import make_model, make_tokenizer


def ends_early(completions, **kwargs):
    return [-float(len(text)) for text in completions]


def train(args, rows, model=None, **options):
    trainer = RLOOTrainer(model or make_model(), ends_early, args, rows, processing_class=make_tokenizer(), **options)
    trainer.train()
    return trainer


def test_logs_and_facts_are_those_of_the_trainer(config, rows):
    args = config(max_steps=3, eval_strategy="steps", eval_steps=2, hub_token="a secret", logging_steps=1)
    trainer = train(args, rows, eval_dataset=rows)
    run = RunReader(args.output_dir)
    history = json.loads(json.dumps(trainer.state.log_history))
    assert run.metrics() == history
    facts = run.facts()
    assert facts["options"]["learning_rate"] == args.learning_rate
    assert facts["about"]["rewards"] == "ends_early"
    assert facts["environment"]["torch"] == torch.__version__
    assert (facts["max_steps"], run.max_steps()) == (3, 3)
    assert "a secret" not in json.dumps(facts)


def test_a_diagnosis_is_stored_with_its_step(config, rows):
    args = config(max_steps=4, max_completion_length=1)
    train(args, rows)
    found = {entry["rule"]: entry for entry in RunReader(args.output_dir).diagnoses()}
    assert found["nothing_ends"]["step"] == 3
    assert "max_completion_length (now 1)" in found["nothing_ends"]["diagnosis"]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_values_of_tokens_are_those_of_the_model(config, rows, beta):
    """One group per update is chosen; its log-probabilities are recomputed here by the model before its training."""
    args = config(max_steps=2, beta=beta, store_token_values=0.01, num_generations=4, per_device_train_batch_size=16)
    before, tokenizer = make_model(), make_tokenizer()
    train(args, rows)
    chosen = [row for row in RunReader(args.output_dir).completions() if "tokens" in row]
    assert sorted(row["step"] for row in chosen) == [1] * 4 + [2] * 4
    assert len({(row["step"], row["group"]) for row in chosen}) == 2
    for row in [row for row in chosen if row["step"] == 1]:
        tokens = row["tokens"]
        assert len(tokens["ids"]) == len(tokens["texts"]) == row["num_tokens"]
        assert tokenizer.decode(tokens["ids"], skip_special_tokens=True) == row["completion"]
        prompt = tokenizer(row["prompt"])["input_ids"]
        logits = before(torch.tensor([prompt + tokens["ids"]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(tokens["ids"])[:, None]).squeeze(-1)
        for name in ("policy", "sampling", *(["reference"] if beta else [])):
            torch.testing.assert_close(torch.tensor(tokens[name]), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.tensor(tokens["entropy"]), -(logprobs.exp() * logprobs).sum(-1), rtol=1e-4, atol=1e-4
        )
        assert ("kl" in tokens) == bool(beta)
    if beta:
        moved = [row["tokens"] for row in chosen if row["step"] == 2]
        for tokens in moved:
            ratio = torch.tensor(tokens["policy"]) - torch.tensor(tokens["reference"])
            torch.testing.assert_close(torch.tensor(tokens["kl"]), ratio)
            assert ratio.abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"beta": 0.05, "num_iterations": 2, "steps_per_generation": 2}])
def test_training_is_the_same_with_and_without_values_of_tokens(config, rows, tmp_path, options):
    models = []
    for share in (0.0, 1.0):
        args = config(max_steps=4, output_dir=str(tmp_path / str(share)), store_token_values=share, **options)
        models.append(train(args, rows).model)
        stored = ["tokens" in row for row in RunReader(args.output_dir).completions()]
        assert all(stored) if share else not any(stored)
    for (name, one), (_, other) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_texts_that_are_not_stored_are_not_stored_as_tokens(config, rows):
    args = config(max_steps=1, store_completions=False, store_token_values=1.0)
    train(args, rows)
    stored = RunReader(args.output_dir).completions()
    assert stored
    assert not any("tokens" in row or "completion" in row for row in stored)


def test_a_share_is_a_share(config):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        config(store_token_values=2)
