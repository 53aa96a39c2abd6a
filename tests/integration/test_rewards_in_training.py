"""Rewards in a run: scored while generation goes on, failures counted, statistics kept, services asked."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import rloom
from rloom import FakeEngine, RLOOTrainer
from rloom.errors import ConfigError, EngineError, RewardError
from rloom.observe import read_store
from rloom.rewards import get_repetition_penalty_reward, think_format_reward
from tests.conftest import LETTERS, make_model, make_tokenizer
from tests.services import serving

ROWS = [{"prompt": text, "task": "ab"[i % 2], "n": i} for i, text in enumerate(["ab", "hello", "1+1=", "x", "y", "z"])]


def tokens(text):
    return [LETTERS.index(c) + 4 for c in text] + [2]


class LateEngine(FakeEngine):
    """Yields groups in reverse, and not before it is told to."""

    def __init__(self, script, before_each):
        super().__init__(script, eos_token_ids=[2])
        self.before_each = before_each

    def generate(self, prompts, num_generations, *, seed):
        for number, group in enumerate(reversed(list(super().generate(prompts, num_generations, seed=seed)))):
            self.before_each(number)
            yield group


def script(prompt, sample, seed):
    return tokens("abcdefgh"[: 1 + sample] + "12"[sample % 2])


def trainer_of(config, reward, *, engine=None, rows=ROWS, eval_rows=None, **options):
    args = config(
        **({"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "shuffle_dataset": False} | options)
    )
    return RLOOTrainer(make_model(), reward, args, rows, eval_rows, processing_class=make_tokenizer(),
                       engine=engine or FakeEngine(script, eos_token_ids=[2]))  # fmt: skip


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def test_scoring_begins_with_the_first_group(config):
    """The engine does not go on to its second group before the first has been scored: a deadlock, if scoring waited."""
    scored = threading.Event()
    calls = []

    @rloom.reward(streaming=True)
    def early(prompts, completions, log_extra, **kwargs):
        calls.append((len(completions), len(set(prompts))))
        log_extra("prompt again", prompts)
        scored.set()
        return length(completions)

    def before_each(number):
        if number == 1:
            assert scored.wait(20), "nothing was scored while the engine was at work"

    whole = []

    def plain(completions, **kwargs):
        whole.append(len(completions))
        return length(completions)

    trainer = trainer_of(config, [early, plain], engine=LateEngine(script, before_each))
    trainer.train()
    assert calls == [(4, 1)] * 4  # two steps of two groups
    assert whole == [8, 8]  # as TRL calls it
    scores = list(trainer.completion_log.columns["rewards"]["early"])
    assert scores == list(trainer.completion_log.columns["rewards"]["plain"])
    table = trainer.completion_log.table(2)
    assert table["prompt again"] == table["prompt"]  # in the prompts' order, though groups came in another
    assert trainer.state.log_history[0]["rewards/early/time"] >= 0


def test_a_run_with_streaming_equals_one_without(config):
    def marked(**marks):
        def reward(completions, n, **kwargs):
            return [len(c) + 0.1 * k for c, k in zip(completions, n, strict=True)]

        return rloom.reward(reward, **marks) if marks else reward

    weights = []
    for marks in ({}, {"streaming": True}, {"isolated": True}, {"per_sample": True, "threads": True}):
        trainer = trainer_of(config, marked(**marks), engine=LateEngine(script, lambda n: None))
        trainer.train()
        trainer.rewards.close()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    for other in weights[1:]:
        assert torch.equal(weights[0], other)


def test_a_hang_does_not_stop_the_run(config, caplog):
    @rloom.reward(isolated=True, time_limit=0.5)
    def hangs(completions, n):
        while n[0] == 0 and completions[0].startswith("abcd"):
            pass
        return [float(len(completions[0]))]

    trainer = trainer_of(config, hangs, rows=ROWS[:2])
    trainer.train()
    trainer.rewards.close()
    log = trainer.state.log_history[0]
    assert log["rewards/hangs/timeouts"] == 1
    assert log["completions/unscored_ratio"] == pytest.approx(1 / 8)
    assert log["rewards/hangs/none_ratio"] == pytest.approx(1 / 8)
    assert "'hangs' was not done after 0.5 seconds" in caplog.text
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(("how", "mean"), [("none", None), (-1.0, -1.0), ("-1.0", -1.0)])
def test_on_reward_error(config, how, mean):
    def fails(completions, **kwargs):
        raise OSError("the disk is full")

    trainer = trainer_of(config, [fails, length], on_reward_error=how)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/fails/errors"] == 8
    assert log["rewards/fails/mean"] == mean
    assert trainer.state.global_step == 2
    with pytest.raises(OSError, match="the disk is full"):
        trainer_of(config, fails).train()


def test_options_that_make_no_sense(config):
    with pytest.raises(ConfigError, match="did you mean 'raise'"):
        config(on_reward_error="rise")
    with pytest.raises(ConfigError, match="finite number"):
        config(on_reward_error=float("nan"))
    with pytest.raises(ConfigError, match="reward_time_limit must be above 0"):
        config(reward_time_limit=0)
    with pytest.raises(RewardError, match="given twice"):
        trainer_of(config, [rloom.term(length, weight=2.0)], reward_weights=[1.0])


def test_an_engine_that_fails_leaves_nothing_behind(config):
    release = threading.Event()

    @rloom.reward(streaming=True)
    def slow(completions, **kwargs):
        release.wait(5)
        return length(completions)

    def before_each(number):
        if number == 1:
            raise EngineError("out of tokens")

    trainer = trainer_of(config, slow, engine=LateEngine(script, before_each))
    with pytest.raises(EngineError, match="out of tokens"):
        trainer.train()
    release.set()
    assert trainer.collector._scoring is None


def test_a_trainer_that_scores_in_its_own_way(config):
    """TRL's hook wins over what was started in the background."""

    class Own(RLOOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return torch.arange(float(len(completions))).unsqueeze(1)

    args = config(max_steps=1, per_device_train_batch_size=8, num_generations=4)
    reward = rloom.reward(length, streaming=True)
    trainer = Own(
        make_model(),
        reward,
        args,
        ROWS,
        processing_class=make_tokenizer(),
        engine=FakeEngine(script, eos_token_ids=[2]),
    )
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == pytest.approx(3.5)
    assert trainer.collector._scoring is None


# -- composition


def has_two(completions, **kwargs):
    return [float("2" in c) for c in completions]


def test_gates_weights_and_routes(config):
    terms = [
        rloom.term(length, only_if=has_two, weight=0.5),
        rloom.term(has_two, weight=0.0),
        *rloom.route("task", {"b": lambda completions: [10.0] * len(completions)}),
    ]
    trainer = trainer_of(config, terms, beta=0.0)
    trainer.train()
    log = trainer.state.log_history[0]
    # lengths 2, 3, 4, 5; those with a 2 are 3 and 5: a quarter of the sum of 0.5 · (3 + 5), and 10 for half of the rows
    assert log["reward"] == pytest.approx(0.5 * 8 / 4 + 10 / 2)
    assert log["rewards/length/mean"] == pytest.approx(3.5)  # as the function gave it
    assert log["rewards/<lambda>/none_ratio"] == 0.5
    assert trainer.reward_weights.tolist() == [0.5, 0.0, 1.0]


def test_running_statistics_are_kept_in_checkpoints(config):
    def reward():
        return [rloom.term(length, normalize=True), get_repetition_penalty_reward()]

    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    straight = trainer_of(config, reward(), **options)
    straight.train()
    state = straight.shaper.composition.state_dict()
    assert state["length"][0] == 24
    again = trainer_of(config, reward(), **options)
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-1")
    assert again.shaper.composition.state_dict() == state
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


# -- over HTTP


def test_a_service_as_reward(config):
    def script_of(call):
        if call.number == 0:
            return call.answer(b"", 503)
        return call.answer({"scores": [float(len(c)) for c in call.payload["completions"]]})

    with serving(script_of) as (url, calls):
        trainer = trainer_of(config, [url + "/score", think_format_reward])
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["rewards/score/mean"] == pytest.approx(3.5)
        assert "n" in calls[-1].payload["columns"]
        assert trainer.reward_func_names == ["score", "think_format_reward"]


def test_a_step_takes_as_long_as_the_longer_of_its_parts(config):
    """Not a timing test: it only shows that both went on at once, with room to spare."""
    times = {}

    @rloom.reward(streaming=True)
    def slow(completions, **kwargs):
        times.setdefault("first scored", time.monotonic())
        time.sleep(0.05)
        return length(completions)

    def before_each(number):
        time.sleep(0.05)
        times["last generated"] = time.monotonic()

    trainer_of(
        config, slow, engine=LateEngine(script, before_each), max_steps=1, per_device_train_batch_size=24
    ).train()
    assert times["first scored"] < times["last generated"]


def quick():
    """A function that a worker need not import this file for."""

    def length(completions, **kwargs):
        return [float(len(c)) for c in completions]

    return length


def workers():
    lines = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if "worker.py" in line]


def test_workers_and_threads_are_let_go_when_a_run_is_over(config):
    args = config(max_steps=2, per_device_train_batch_size=8, num_generations=4, eval_strategy="steps", eval_steps=1)
    trainer = RLOOTrainer(make_model(), rloom.reward(quick(), isolated=True), args, ROWS, ROWS[:2],
                          processing_class=make_tokenizer(), engine=FakeEngine(script, eos_token_ids=[2]))  # fmt: skip
    closed = []
    close = trainer.rewards.close
    trainer.rewards.close = lambda: (closed.append(trainer.state.global_step), close())
    trainer.train()
    assert closed == [2]  # once, at the end: not with each evaluation
    assert workers() == []
    trainer.evaluate()  # they start again
    assert len(closed) == 2
    assert workers() == []
    trainer.predict(trainer.train_dataset)
    assert len(closed) == 3
    assert workers() == []


def test_workers_are_let_go_when_a_run_fails(config):
    def boom(completions, **kwargs):
        raise KeyError("x")

    trainer = trainer_of(config, [rloom.reward(quick(), isolated=True), boom])
    with pytest.raises(KeyError):
        trainer.train()
    assert workers() == []


def test_a_trainer_that_changes_what_is_scored(config):
    class Own(RLOOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(inputs, prompts, ["" for _ in completions], completion_ids_list)

    for marks in ({}, {"streaming": True}, {"isolated": True}):
        args = config(max_steps=1, per_device_train_batch_size=8, num_generations=4, logging_steps=1)
        trainer = Own(make_model(), rloom.reward(quick(), **marks), args, ROWS, processing_class=make_tokenizer(),
                      engine=FakeEngine(script, eos_token_ids=[2]))  # fmt: skip
        trainer.train()
        assert trainer.state.log_history[0]["reward"] == 0.0


def test_a_gate_that_fails_is_shut_in_a_run(config):
    @rloom.reward(isolated=True, time_limit=0.5)
    def gate(completions, **kwargs):
        if "2" in completions[0]:
            raise ValueError("no")
        return [1.0]

    trainer = trainer_of(config, [rloom.term(length, only_if=gate), rloom.term(gate, weight=0.0)], max_steps=1,
                         on_reward_error="none", logging_steps=1)  # fmt: skip
    trainer.train()
    scores = trainer.completion_log.columns["rewards"]
    counted = [v for v, g in zip(scores["length"], scores["gate"], strict=True) if g == 1.0]
    assert 0 < len(counted) < len(scores["gate"])
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(counted) / len(scores["gate"]))


def test_a_judges_totals_are_totals(config):
    def answer(call):
        content = {"choices": [{"message": {"content": '{"score": 5}'}}], "usage": {"prompt_tokens": 10}}
        call.answer(content)

    with serving(answer) as (url, calls):
        reward = rloom.rewards.judge("m", base_url=url)
        trainer = trainer_of(config, reward, max_steps=2, logging_steps=2)
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["judge/calls"] == len(calls) == 16
        assert log["judge/prompt_tokens"] == 160


def test_every_value_is_in_the_store(config):
    """Raw values, whatever weights, gates and clips make of them; why there is none; what each completion was."""

    @rloom.reward(isolated=True, time_limit=0.5)
    def hangs(completions):
        while completions[0] == "a1":
            pass
        return [0.1]

    def fails(completions, n, log_extra, **kwargs):
        log_extra("n", n)
        return ["three" if c == "ab2" else None if c == "abc1" else 3.0 for c in completions]

    parts = [rloom.term(hangs, weight=2.0), rloom.term(fails, clip=(0.0, 1.0)), length]
    options = {"on_reward_error": "none", "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(config, parts, rows=ROWS[:2], eval_rows=ROWS[2:4], **options)
    trainer.train()
    rows = read_store(trainer.args.output_dir)
    assert [(r["step"], r["mode"]) for r in rows] == [
        (step, mode) for step in (1, 2) for mode in ("train", "eval") for _ in range(8)
    ]
    first, second, third, fourth = rows[:4]
    assert [r["completion"] for r in rows[:4]] == ["a1", "ab2", "abc1", "abcd2"]
    assert first["scores"] == {"hangs": None, "fails": 3.0, "length": 2.0}
    assert first["failures"] == {"hangs": "timeouts: TimeoutError: "}
    assert second["scores"]["fails"] is None
    assert "'three'" in second["failures"]["fails"]
    assert third["scores"]["fails"] is None
    assert third["failures"] == {}
    assert fourth["scores"] == {"hangs": 0.1, "fails": 3.0, "length": 5.0}
    assert fourth["reward"] == pytest.approx(2 * 0.1 + 1.0 + 5.0)
    assert [r["group"] for r in rows[:8]] == [0] * 4 + [1] * 4
    assert [r["extra"]["n"] for r in rows[:8]] == [0] * 4 + [1] * 4
    assert (first["prompt"], first["stop_reason"], first["num_tokens"]) == ("ab", "eos", 3)
    rewards = [r["reward"] for r in rows[:4]]
    for index, r in enumerate(rows[:4]):
        others = rewards[:index] + rewards[index + 1 :]
        assert r["advantage"] == pytest.approx(r["reward"] - sum(others) / 3, abs=1e-5)


def test_groups_that_were_replaced_are_in_the_store_without_an_advantage(config):
    def by_row(completions, n, **kwargs):
        return [float(len(c)) if k % 2 else 1.0 for c, k in zip(completions, n, strict=True)]

    trainer = trainer_of(config, by_row, rows=ROWS, dynamic_sampling=3, max_steps=1)
    trainer.train()
    rows = read_store(trainer.args.output_dir)
    replaced = [r for r in rows if r["advantage"] is None]
    assert len(rows) - len(replaced) == 8
    assert replaced
    assert all(r["scores"]["by_row"] == 1.0 for r in replaced)
    assert any(r["advantage"] for r in rows)
    members = Counter(r["group"] for r in rows)
    assert members == dict.fromkeys(range(len(rows) // 4), 4)
    assert all(len({r["advantage"] is None for r in rows if r["group"] == group}) == 1 for group in members)


def test_the_table_shows_each_completion_of_the_rollout_with_its_own_advantage(config):
    """Those of groups that were replaced are left out, and counted; so are groups that were drawn in vain."""

    def by_row(prompts, completions, n, log_extra, **kwargs):
        log_extra("prompt again", prompts)
        return [float(len(c)) * (1 + k) if k % 2 else 1.0 for c, k in zip(completions, n, strict=True)]

    trainer = trainer_of(config, by_row, rows=ROWS, dynamic_sampling=5, max_steps=1, seed=2)
    trainer.train()
    table = trainer.completion_log.table(1)
    assert len(table["prompt"]) == 8
    assert table["prompt again"] == table["prompt"]
    stored = [r for r in read_store(trainer.args.output_dir) if r["advantage"] is not None]
    names = ("prompt", "completion", "by_row", "advantage")
    shown = sorted(zip(*(table[name] for name in names), strict=True))
    for one, other in zip(shown, sorted(_as_shown(r) for r in stored), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert trainer.state.log_history[0]["completions/replaced_groups"] == 1
    assert len({r["group"] for r in read_store(trainer.args.output_dir)}) > 3  # one was drawn in vain
    for group in (slice(4), slice(4, 8)):  # groups are together, and each is compared with itself
        assert len(set(table["prompt"][group])) == 1
        assert sum(table["advantage"][group]) == pytest.approx(0.0, abs=1e-4)
        assert sorted(table["advantage"][group]) == table["advantage"][group]  # longer ones have more


def _as_shown(row):
    return row["prompt"], row["completion"], row["scores"]["by_row"], row["advantage"]


def test_groups_of_an_evaluation_in_batches_are_told_apart_in_the_store(config):
    options = {"per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(config, length, eval_rows=ROWS, **options)
    trainer.train()
    rows = read_store(trainer.args.output_dir)
    for step in (1, 2):
        there = [(r["group"], r["prompt"]) for r in rows if (r["step"], r["mode"]) == (step, "eval")]
        assert there == [(number, row["prompt"]) for number, row in enumerate(ROWS) for _ in range(4)]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_resumed_run_goes_on_in_its_store(config, kind):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    trainer_of(config, length, **options).train()
    again = trainer_of(config, length, **options)
    before = read_store(again.args.output_dir)
    again.train(resume_from_checkpoint=kind(f"{again.args.output_dir}/checkpoint-1"))
    assert read_store(again.args.output_dir) == before
    assert [p.name for p in Path(again.args.output_dir).glob("_rollouts*")] == ["_rollouts"]


def test_columns_of_the_same_name_are_both_in_the_store(config):
    def first(completions, log_extra, **kwargs):
        log_extra("length", [len(c) for c in completions])
        return [0.0] * len(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("length", [-len(c) for c in completions])
        return [float(len(c)) for c in completions]

    trainer = trainer_of(config, [first, second])
    trainer.train()
    rows = read_store(trainer.args.output_dir)
    assert [r["extra"] for r in rows] == [
        {"length": len(r["completion"]), "length (2)": -len(r["completion"])} for r in rows
    ]
    table = trainer.completion_log.table(2)
    assert table["length"] == [-value for value in table["length (2)"]] == [len(c) for c in table["completion"]]


# -- the table of completions


def test_an_update_that_is_made_again_shows_and_stores_each_completion_once(config, rows, tmp_path):
    """Its first rollout is there already, its second could not be scored at first."""
    calls = []

    class Retrying(RLOOTrainer):
        def training_step(self, *inputs):
            try:
                return super().training_step(*inputs)
            except RuntimeError:
                return super().training_step(*inputs)

    def flaky(completions, **kwargs):
        calls.append(completions)
        if len(calls) == 2:
            raise RuntimeError("a service is down")
        return [float(i) for i in range(len(completions))]

    args = config(output_dir=str(tmp_path), max_steps=1, gradient_accumulation_steps=2, steps_per_generation=1)
    trainer = Retrying(make_model(), flaky, args, rows, processing_class=make_tokenizer())
    trainer.train()
    del calls[1]
    stored = read_store(tmp_path)
    assert [row["completion"] for row in stored] == [text for call in calls for text in call]
    assert all(row["advantage"] is not None for row in stored)
    table = trainer.completion_log.table(2)
    assert table["completion"] == [text for call in calls for text in call][-len(table["completion"]) :]


def test_what_a_subclass_adds_to_the_log_stands_beside_its_completion(config, rows):
    """TRL's way: `_logs["extra"]` grows while rewards are calculated."""

    class Own(RLOOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, ids):
            self._logs["extra"]["first"].extend(text[:1] for text in completions)
            if self.state.global_step == 0:
                self._logs["extra"]["once"].extend(completions)
            return super()._calculate_rewards(inputs, prompts, completions, ids)

    trainer = Own(make_model(), lambda completions, **kwargs: [1.0] * len(completions), config(max_steps=3), rows,
                  processing_class=make_tokenizer())  # fmt: skip
    trainer.train()
    table = trainer.completion_log.table(3)
    assert table["first"] == [text[:1] for text in table["completion"]]
    assert "once" not in table  # its rows have left the table


@pytest.mark.parametrize("column", ["prompt", "advantage", "noted"])
def test_columns_of_the_table_cannot_be_written_over(config, rows, column):
    def noted(completions, log_extra, **kwargs):
        log_extra(column, completions)
        return [1.0] * len(completions)

    trainer = RLOOTrainer(make_model(), noted, config(max_steps=1), rows, processing_class=make_tokenizer())
    with pytest.raises(RewardError, match="that column of the table is the trainer's own"):
        trainer.train()


def test_a_run_in_which_nothing_is_scored_is_told_so(config, caplog):
    rewards = rloom.route("task", {"mth": lambda completions: [1.0] * len(completions)})
    RLOOTrainer(make_model(), rewards, config(max_steps=3), ROWS, processing_class=make_tokenizer()).train()
    assert "no completion gets a score, so nothing is learned" in caplog.text
