"""What a run shows: a panel in a terminal, lines elsewhere, the dictionary where asked; at start and end some lines."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.utils import logging as transformers_logging

from rloom import LiveProgress, RLOOTrainer
from rloom.errors import ConfigError
from rloom.observe.numbers import RunNumbers
from rloom.observe.view import LogDict, LogLines, View, as_lines, log_line
from tests.conftest import make_model, make_tokenizer


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def other(completions, **kwargs):
    return [0.0] * len(completions)


def trainer_of(args, rows, callbacks=(), rewards=length, **more):
    return RLOOTrainer(
        make_model(), rewards, args, rows, processing_class=make_tokenizer(), callbacks=list(callbacks), **more
    )


def views(trainer):
    kinds = (View, ProgressCallback, PrinterCallback)
    return [type(callback) for callback in trainer.callback_handler.callbacks if isinstance(callback, kinds)]


@pytest.fixture
def terminal(monkeypatch):
    """The standard output is a terminal, as far as one can tell."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")


# -- which view


def test_in_a_terminal_a_panel_elsewhere_lines(config, rows, terminal, monkeypatch):
    assert views(trainer_of(config(disable_tqdm=False), rows)) == [LiveProgress]
    assert views(trainer_of(config(disable_tqdm=True), rows)) == [LogLines]
    monkeypatch.setenv("TERM", "dumb")
    assert views(trainer_of(config(disable_tqdm=False), rows)) == [LogLines]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    # Colours were asked for, as on many servers, and still nothing is drawn into a file.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert views(trainer_of(config(disable_tqdm=False), rows)) == [LogLines]


def test_a_format_that_is_named_is_had(config, rows, terminal):
    for name, kind in {"panel": LiveProgress, "line": LogLines, "dict": LogDict}.items():
        assert views(trainer_of(config(disable_tqdm=False, log_format=name), rows)) == [kind]
    assert views(trainer_of(config(disable_tqdm=True, log_format="dict"), rows)) == [LogDict]


def test_formats_that_do_not_exist_or_contradict_are_refused(config):
    with pytest.raises(ConfigError, match="did you mean 'panel'"):
        config(log_format="pannel")
    with pytest.raises(ConfigError, match="contradict"):
        config(log_format="panel", disable_tqdm=True)


@pytest.mark.parametrize("kind", [PrinterCallback, ProgressCallback])
def test_a_view_of_the_users_own_takes_the_place_of_ours(config, rows, kind):
    class Own(kind):
        pass

    assert views(trainer_of(config(), rows, [Own()])) == [Own]
    assert views(trainer_of(config(disable_tqdm=False), rows, [LiveProgress(), Own()])) == [LiveProgress, Own]


@pytest.mark.parametrize("name", ["panel", "line", "dict"])
def test_views_are_removed_as_transformers_are(config, rows, name, capsys):
    """`trainer.remove_callback(PrinterCallback)`, as scripts for TRL do it, leaves a run that says nothing."""
    trainer = trainer_of(config(max_steps=1, log_format=name, disable_tqdm=None), rows)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.pop_callback(PrinterCallback)
    assert not views(trainer)
    trainer.train()
    assert not capsys.readouterr().out


def test_of_two_live_views_the_last_one_stays(config, rows):
    trainer = trainer_of(config(max_steps=1), rows)
    screen = io.StringIO()
    trainer.add_callback(LiveProgress(Console(file=screen, width=100)))
    trainer.train()
    assert views(trainer) == [LiveProgress]
    assert "1/1" in screen.getvalue()


def test_only_the_main_process_shows_anything(config, rows, monkeypatch):
    monkeypatch.setattr(RLOOTrainer, "is_world_process_zero", lambda self: False)
    assert not views(trainer_of(config(), rows, [LiveProgress()]))


# -- the panel


@pytest.mark.parametrize("terminal", [True, False])
def test_one_panel_is_left_on_the_screen(config, rows, terminal):
    screen = io.StringIO()
    view = LiveProgress(Console(file=screen, force_terminal=terminal, width=100))
    trainer_of(config(max_steps=3, beta=0.1), rows, [view]).train()
    text = screen.getvalue()
    assert "3/3" in text
    assert len(view.history["reward"]) == 3
    assert terminal or text.count("╭") == 1
    assert ("\x1b[" in text) == terminal  # no control sequences where there is no terminal
    last = text[text.rindex("╭") :]
    for label in ("reward", "KL per token", "entropy", "completion length", "truncated", "without signal"):
        assert label in last
    for words in ("generation ", "reference ", "update ", "per update", "tokens/s", "GiB", "over 1 log "):
        assert words in last


def test_an_evaluation_may_come_before_training(config, rows):
    screen = io.StringIO()
    progress = LiveProgress(Console(file=screen, width=100))
    trainer = trainer_of(config(eval_strategy="no", max_steps=1), rows, [progress], eval_dataset=rows[:2])
    trainer.evaluate()
    assert "evaluation after update 0: reward " in screen.getvalue()
    progress.on_log(None, trainer.state, None, logs={"kl": float("inf"), "reward": 1.0})
    assert progress.view()
    trainer.train()
    # It is where the run began.
    assert [step for step, _ in progress.numbers.evaluations["eval"]] == [0]


class Speaks(TrainerCallback):
    """Says something in every way there is, in the middle of a run."""

    def __init__(self, handler):
        self.handler = handler

    def on_step_end(self, args, state, control, **kwargs):
        print("printed in the run")
        self.handler.stream.write("")  # it is open
        self.handler.emit(logging.LogRecord("rloom", logging.WARNING, "", 0, "logged in the run", None, None))


def test_what_others_say_stands_above_the_panel(config, rows, monkeypatch):
    """Prints, log messages and tables go through the panel's console: the panel is never written into."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    handler = logging.StreamHandler(screen)
    logging.getLogger("rloom.tested").addHandler(handler)
    view = LiveProgress(Console(file=screen, force_terminal=True, width=100))
    args = config(max_steps=2, log_completions=True, num_completions_to_print=1, save_strategy="steps", save_steps=1)
    try:
        trainer_of(args, rows, [view, Speaks(handler)]).train()
    finally:
        logging.getLogger("rloom.tested").removeHandler(handler)
    assert handler.stream is screen
    text = screen.getvalue()
    assert "Writing model shards" not in text
    for said in ("printed in the run", "logged in the run", "Step 1"):
        before = text[: text.index(said)]
        # The panel that was there has been erased: each of its lines, just before.
        assert before.rindex("\x1b[2K") > before.rindex("╯"), said


def test_an_error_closes_the_panel(config, rows):
    def fails(completions, **kwargs):
        raise ValueError("no reward today")

    screen = io.StringIO()
    trainer = trainer_of(config(), rows, [LiveProgress(Console(file=screen, force_terminal=True))], rewards=fails)
    before, bars = sys.stderr, transformers_logging.is_progress_bar_enabled()
    with pytest.raises(ValueError, match="no reward today"):
        trainer.train()
    assert sys.stderr is before
    assert transformers_logging.is_progress_bar_enabled() == bars
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")  # the cursor is back


def test_the_latest_diagnosis_stays_in_the_panel(config, rows):
    screen = io.StringIO()
    view = LiveProgress(Console(file=screen, width=200))
    trainer_of(config(max_steps=3, max_completion_length=1), rows, [view], rewards=other).train()
    text = screen.getvalue()
    assert "diagnosis" in text
    assert "at update 3: " in text


def test_names_from_outside_cannot_steer_the_terminal():
    numbers = RunNumbers()
    logs = {"loss": 0.0, "reward": 1.0, "rewards/a\x1b[2J/mean": 1.0, "rewards/b/mean": 0.0, "rewards/b/errors": 2.0}
    line = log_line(numbers, logs)
    assert "\x1b" not in line
    assert "a\\x1b[2J 1.000" in line
    assert "errors of b: 2" in line
    assert "\x1b" not in as_lines([("rloom", "x"), ("model", "\x1b[2J")])
    view = LiveProgress(Console(file=io.StringIO(), width=100))
    view.note("\x1b[2J")
    view.console.print(view.view())
    assert "\x1b[2J" not in view.console.file.getvalue()


# -- lines, and the dictionary


def test_lines_say_what_matters_first_and_nothing_else_is_printed(config, rows, capsys):
    args = config(max_steps=2, beta=0.1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer_of(args, rows, rewards=[length, other], eval_dataset=rows[:2]).train()
    out = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(out) if line.startswith("update 1/2"))
    end = next(i for i, line in enumerate(out) if line.startswith("rloom: trained"))
    first, second, evaluation = out[begin:end]
    assert first.startswith("update 1/2 | reward ")
    assert second.startswith("update 2/2 | reward ")
    parts = [part.split()[0] for part in second.split(" | ")[:5]]
    assert parts == ["update", "reward", "kl", "entropy", "length"]
    for words in ("trend ", "length ", "other 0.000", "truncated", "without signal", "generation ", "tokens/s", "GiB"):
        assert words in second
    assert first.endswith(" left")
    assert evaluation.startswith("evaluation after update 2: reward ")
    assert "{" not in "".join(out)


def test_the_dictionary_is_transformers(config, rows, capsys):
    trainer_of(config(max_steps=1, log_format="dict"), rows).train()
    out = capsys.readouterr().out
    assert "{'loss': " in out
    assert "'time/generation': " in out
    assert "update 1/1 |" not in out


def test_beta_is_shown_where_it_is_logged():
    view = LiveProgress(Console(file=io.StringIO(), width=100))
    view.numbers.take_in(TrainerState(), logs := {"loss": 0.0, "kl": 0.1, "beta": 0.000512})
    assert " | kl 0.100 | beta 0.000512 | " in log_line(view.numbers, logs)
    assert ("weight of the KL", "0.000512", "▁") in view.lines()


def test_what_users_log_is_a_line_too():
    assert log_line(RunNumbers(), {"mine": 0.25, "words": "so"}) == "update 0: mine 0.25, words so"


def test_a_narrow_encoding_does_not_end_a_run(config, rows, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    trainer_of(config(max_steps=1), rows).train()
    assert b"update 1/1" in raw.getvalue()


# -- start and end


def rows_of(text, title):
    """The labelled lines below a title."""
    lines = text[text.index(title) :].splitlines()[1:]
    found = {}
    for line in lines:
        if not line.startswith("  "):
            break
        label, words = line.split(maxsplit=1)
        found[label] = words
    return found


def test_a_run_says_what_will_happen_and_what_has(config, rows, capsys):
    args = config(
        max_steps=4, num_generations=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, beta=0.1,
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, reward_weights=[1.0, 0.5],
    )  # fmt: skip
    trainer = trainer_of(args, rows, rewards=[length, other], eval_dataset=rows[:2])
    assert not capsys.readouterr().out
    trainer.train()
    out = capsys.readouterr().out
    start, end = rows_of(out, "rloom: RLOO"), rows_of(out, "rloom: trained")
    count = sum(p.numel() for p in trainer.model.parameters())
    assert start["model"].endswith(f"{count:,} parameters, all trained")
    assert "float32" in start["dtype"]
    assert "native engine" in start["engine"]
    assert "the first that fits" in start["engine"]
    assert "packed rows of up to 8,192 tokens" in start["training"]
    assert start["update"] == "4 prompts × 2 completions = 8, of up to 6 tokens"
    assert start["run"] == "4 updates, 1 per epoch: 4 epochs"
    assert "GiB in use" in start["device"]
    assert start["rewards"] == "length, 0.5 × other"
    assert start["files"] == f"{args.output_dir}; checkpoints every 2 updates; rollouts in _rollouts"
    assert "nothing is resumed" in start["begins"]
    assert "→" in end["reward"]
    assert end["reward"].endswith("(the first and the last log)")
    assert "(after updates 2 and 4)" in end["evaluation"]
    assert "tokens" in end["time"]
    assert "evaluation " in end["time"]
    assert "checkpoint-4" in end["files"]
    assert "trainer.save_model()" in end["next"]


def test_a_resumed_run_says_from_where_and_has_its_earlier_logs(config, rows, capsys):
    args = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer_of(config(**args), rows).train()
    view = LiveProgress(Console(file=io.StringIO(), width=100))
    trainer = trainer_of(config(**args | {"max_steps": 3}), rows, [view])
    trainer.train(resume_from_checkpoint="auto")
    text = view.console.file.getvalue()
    assert rows_of(text, "rloom: RLOO")["begins"].startswith("after update 2, from ")
    assert len(view.history["reward"]) == 3


def test_a_run_that_is_stopped_says_so(config, rows, capsys):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer_of(config(max_steps=3), rows, [Stop()]).train()
    end = rows_of(capsys.readouterr().out, "rloom: stopped after update 1 of 3")
    assert "next" not in end


# -- the numbers


class State:
    def __init__(self, step, total=10, tokens=0, history=()):
        self.global_step, self.max_steps, self.num_input_tokens_seen = step, total, tokens
        self.log_history = list(history)


def test_speed_and_time_left_leave_evaluations_out():
    now = [0.0]
    numbers = RunNumbers(now=lambda: now[0])
    numbers.begin(State(0, tokens=100))
    for step in range(1, 5):
        now[0] += 2.0
        numbers.move(State(step))
        numbers.take_in(State(step, tokens=100 + 60 * step), {"loss": 0.0, "time/generation": 1.5, "time/update": 0.5})
        if step == 3:
            now[0] += 50.0
            numbers.take_in(State(step), {"eval_reward": 0.5, "eval_runtime": 50.0})
    assert numbers.seconds == 2.0
    assert numbers.tokens_per_second == 30.0
    assert numbers.left() == 6 * 2.0
    now[0] += 1.0
    assert numbers.left() == 6 * 2.0 - 1.0
    # The next update takes long. There are still five others.
    now[0] += 100.0
    assert numbers.left() == 5 * 2.0
    assert numbers.shares() == {"generation": 0.75, "update": 0.25}
    assert numbers.evaluations == {"eval": [(3, 0.5)]}


def test_a_second_run_begins_with_nothing():
    numbers = RunNumbers()
    numbers.begin(State(0))
    numbers.take_in(State(1), {"loss": 0.0, "reward": 1.0})
    numbers.take_in(State(1), {"eval_reward": 0.5, "eval_runtime": 1.0})
    numbers.finish()
    numbers.begin(State(0))
    assert not numbers.history["reward"]
    assert not numbers.evaluations
