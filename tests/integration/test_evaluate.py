"""Evaluation in training reports what `rloom eval` does: intervals, pass@k over all prompts, win rates."""

from __future__ import annotations

import json
import math

import pytest

from rloom import RLOOTrainer
from rloom.errors import ConfigError, DataError, RewardError
from tests.conftest import make_model, make_tokenizer
from tests.services import serving
from tests.standins import save_llama, save_reward_model

REFERENCE = "a reference."


def even(completion_ids, **kwargs):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def with_references(rows):
    return [{**row, "summary": REFERENCE} for row in rows]


def trainer_of(args, rows, reward=even, **options):
    return RLOOTrainer(make_model(), reward, args, rows, rows, processing_class=make_tokenizer(), **options)


@pytest.fixture
def quick(config):
    def make(**changes):
        return config(**({"per_device_eval_batch_size": 4, "num_generations_eval": 2, "max_steps": 1} | changes))

    return make


def test_intervals_are_over_all_prompts(rows, quick):
    """Six prompts in batches of two: each number is the mean over the six, and inside of its interval."""
    found = trainer_of(quick(), rows).evaluate()
    names = ["reward", "rewards/even/mean", "rewards/even/pass@1", "rewards/even/pass@2", "kl",
             "completions/mean_length", "completions/clipped_ratio"]  # fmt: skip
    for name in names:
        low, value, high = (found[f"eval_{name}{end}"] for end in ("_low", "", "_high"))
        assert low <= value <= high, name
    assert found["eval_rewards/even/mean_low"] < found["eval_rewards/even/mean_high"]
    assert found["eval_rewards/even/pass@1"] == pytest.approx(found["eval_rewards/even/mean"])
    assert "eval_win_rate" not in found


def test_a_last_batch_that_is_smaller_counts_by_its_prompts(rows, quick):
    """Five prompts in batches of two: the mean of batch means would weigh the last prompt double."""

    def first_prompt(prompts, **kwargs):
        return [float(prompt == rows[4]["prompt"]) for prompt in prompts]

    found = trainer_of(quick(), rows[:5], first_prompt).evaluate()
    assert found["eval_rewards/first_prompt/mean"] == pytest.approx(0.2)
    assert found["eval_reward"] == pytest.approx(0.2)


def test_scores_of_0_and_1_in_one_batch_alone_make_no_pass_rate(rows, quick):
    def half_at_the_end(prompts, **kwargs):
        return [0.5 if prompt == rows[-1]["prompt"] else 1.0 for prompt in prompts]

    found = trainer_of(quick(), rows, half_at_the_end).evaluate()
    assert not any("pass@" in name for name in found)


def test_kl_is_per_token_of_the_reference(rows, quick):
    trainer = trainer_of(quick(beta=0.1, max_steps=3, learning_rate=1e-2), rows)
    assert trainer.evaluate()["eval_kl"] == pytest.approx(0.0, abs=1e-5)
    trainer.train()
    assert abs(trainer.evaluate()["eval_kl"]) > 1e-4


# -- win rates


def test_a_judge_of_ones_own_sees_both_completions(rows, quick):
    seen = []

    def judge(prompts, completions):
        seen.append((prompts, completions))
        return [1.0, 0.0] if prompts[0] in ("ab", "x", "1+1=") else [0.0, 1.0]

    trainer = trainer_of(quick(eval_reference_column="summary"), with_references(rows), eval_judge=judge)
    found = trainer.evaluate()
    assert found["eval_win_rate"] == 0.5
    assert 0.0 <= found["eval_win_rate_low"] < 0.5 < found["eval_win_rate_high"] <= 1.0
    assert {prompts[0] for prompts, _ in seen} == {row["prompt"] for row in rows}
    assert all(prompts[0] == prompts[1] and completions[1] == REFERENCE for prompts, completions in seen)
    assert "eval_win_rate" in trainer.state.log_history[-1]


def test_at_eval_steps_by_a_language_model_in_both_orders(rows, quick):
    def likes_the_reference(call):
        question = call.payload["messages"][0]["content"]
        first = question.index(REFERENCE) < question.index("-b>")
        call.answer({"choices": [{"message": {"content": json.dumps({"better": "A" if first else "B"})}}]})

    with serving(likes_the_reference) as (url, calls):
        options = {"eval_judge_model": "j", "eval_judge_url": url, "eval_reference_column": "summary"}
        args = quick(eval_strategy="steps", eval_steps=1, max_steps=2, **options)
        trainer = trainer_of(args, with_references(rows))
        trainer.train()
    rates = [entry["eval_win_rate"] for entry in trainer.state.log_history if "eval_win_rate" in entry]
    assert rates == [0.0, 0.0]
    assert len(calls) == 2 * 2 * len(rows)


def test_against_another_model_by_a_reward_model(rows, quick, tmp_path, monkeypatch):
    """The other model is asked once: a second evaluation has its answers already."""
    from rloom.evaluation import opponents

    save_llama(tmp_path / "other", seed=1)
    save_reward_model(tmp_path / "judge")
    options = {"eval_against": str(tmp_path / "other"), "eval_judge_reward_model": str(tmp_path / "judge")}
    trainer = trainer_of(quick(**options), rows)
    asked, writer = [], opponents.Writer
    monkeypatch.setattr(opponents, "Writer", lambda *a, **k: asked.append(a) or writer(*a, **k))
    first = trainer.evaluate()
    assert 0.0 <= first["eval_win_rate"] <= 1.0
    assert trainer.evaluate()["eval_win_rate"] == first["eval_win_rate"]
    assert len(asked) == 1
    known = trainer.win_rate.replies.known
    assert set(known) == {row["prompt"] for row in rows}


def test_conversations_are_compared_as_conversations(rows, quick):
    seen = []

    def judge(prompts, completions):
        seen.append(completions[1])
        return [None, None]

    chats = [{"prompt": [{"role": "user", "content": r["prompt"]}], "summary": REFERENCE} for r in rows]
    found = trainer_of(quick(eval_reference_column="summary"), chats, eval_judge=judge).evaluate()
    assert seen[0] == [{"role": "assistant", "content": REFERENCE}]
    assert found["eval_win_rate"] is None  # the judge said nothing


def test_a_judge_that_fails(rows, quick, caplog):
    def judge(prompts, completions):
        raise RewardError("out of paper")

    args = quick(eval_reference_column="summary", on_reward_error="none")
    found = trainer_of(args, with_references(rows), eval_judge=judge).evaluate()
    assert "eval_win_rate" not in found
    assert math.isfinite(found["eval_reward"])
    assert "no win rate this time: RewardError: out of paper" in caplog.text
    with pytest.raises(RewardError, match="out of paper"):
        trainer_of(quick(eval_reference_column="summary"), with_references(rows), eval_judge=judge).evaluate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_reference_column": "summary"}, "needs an opponent .* and a judge"),
        ({"eval_judge_model": "j"}, "needs an opponent .* and a judge"),
        ({"eval_reference_column": "summary", "eval_against": "x"}, "one opponent at a time"),
        ({"eval_judge_model": "j", "eval_judge_reward_model": "k"}, "one judge at a time"),
        ({"eval_judge_rubric": "short"}, "`eval_judge_rubric` has no effect without eval_judge_model"),
        ({"eval_reference_column": "summary", "remove_unused_columns": True}, "needs its column"),
    ],
)
def test_half_a_win_rate_is_refused(rows, quick, options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(quick(**options), with_references(rows))


def test_wrong_column_is_said_before_a_model_is_loaded(rows, quick):
    args = quick(eval_reference_column="summry")
    with pytest.raises(DataError, match="no column 'summry' to compare with; did you mean 'summary'"):
        RLOOTrainer("no/such-model", even, args, rows, with_references(rows), eval_judge=lambda p, c: [1.0, 0.0])


def test_a_judge_that_raises_costs_the_win_rate_and_not_the_run(rows, quick):
    def judge(prompts, completions):
        raise ConnectionError("nobody is there")

    args = {"eval_reference_column": "summary"}
    found = trainer_of(quick(on_reward_error="none", **args), with_references(rows), eval_judge=judge).evaluate()
    assert "eval_win_rate" not in found
    assert "eval_reward" in found
    with pytest.raises(ConnectionError):
        trainer_of(quick(**args), with_references(rows), eval_judge=judge).evaluate()


def test_rows_without_a_reference_are_left_out_of_the_win_rate(rows, quick):
    data = with_references(rows)
    data[1] = {**data[1], "summary": None}
    judge = lambda prompts, completions: [1.0, 0.0] if None not in completions else [0.0, 1.0]  # noqa: E731
    assert trainer_of(quick(eval_reference_column="summary"), data, eval_judge=judge).evaluate()["eval_win_rate"] == 1.0


def test_an_opponent_that_is_not_there_is_told_at_the_start(rows, quick):
    with pytest.raises(ConfigError, match="eval_against"):
        trainer_of(quick(eval_against="/no/such/model"), rows, eval_judge=lambda prompts, completions: [1.0, 0.0])


def test_a_judge_that_is_not_there_is_told_at_the_start(rows, quick):
    options = {"eval_judge_reward_model": "/no/such/judge", "eval_reference_column": "summary"}
    with pytest.raises(ConfigError, match="eval_judge_reward_model: the model '/no/such/judge' cannot be loaded"):
        trainer_of(quick(**options), with_references(rows))


def test_evaluation_without_prompts_is_told_before_a_model_is_loaded(rows, config):
    with pytest.raises(ConfigError, match="--eval_data"):
        RLOOTrainer("/no/such/model", lambda completions: [0.0], config(eval_strategy="steps", eval_steps=1), rows)


def test_a_win_rate_without_prompts_is_said(rows, config, caplog):
    args = config(eval_reference_column="summary")
    judge = lambda prompts, completions: [1.0, 0.0]  # noqa: E731
    tokenizer = make_tokenizer()
    RLOOTrainer(make_model(), lambda completions: [0.0], args, rows, processing_class=tokenizer, eval_judge=judge)
    assert "there is no evaluation set" in caplog.text


def test_a_reward_model_that_is_not_there_is_named(rows, config, monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("there is no network")

    monkeypatch.setattr("rloom.training.assemble.load_reward_model", offline)
    with pytest.raises(RewardError, match=r"'math_accuracy' cannot be loaded: .* rloom.rewards.math_accuracy"):
        RLOOTrainer(make_model(), "math_accuracy", config(), rows, processing_class=make_tokenizer())
