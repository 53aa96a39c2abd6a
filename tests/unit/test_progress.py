"""The live view: in a terminal drawn in its place, elsewhere once; no other progress beside it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback

from rloom import LiveProgress, RLOOTrainer
from tests.conftest import make_model, make_tokenizer


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def trainer_of(args, rows, callbacks):
    return RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer(), callbacks=callbacks)


@pytest.mark.parametrize("terminal", [True, False])
def test_one_view_is_left_on_the_screen(config, rows, terminal):
    screen = io.StringIO()
    view = LiveProgress(Console(file=screen, force_terminal=terminal, width=100))
    trainer_of(config(max_steps=3), rows, [view]).train()
    text = screen.getvalue()
    assert "3/3" in text
    assert len(view.history["reward"]) == 3
    assert terminal or text.count("╭") == 1
    assert ("\x1b[" in text) == terminal  # no control sequences where there is no terminal


@pytest.mark.parametrize("quiet", [True, False])
def test_it_takes_the_place_of_the_usual_ones(config, rows, quiet):
    usual = PrinterCallback if quiet else ProgressCallback
    plain = trainer_of(config(disable_tqdm=quiet), rows, [])
    assert any(isinstance(c, usual) for c in plain.callback_handler.callbacks)
    live = trainer_of(config(disable_tqdm=quiet), rows, [LiveProgress()])
    assert not any(isinstance(c, (PrinterCallback, ProgressCallback)) for c in live.callback_handler.callbacks)


def test_an_evaluation_may_come_before_training(config, rows):
    progress = LiveProgress(Console(file=io.StringIO()))
    trainer = RLOOTrainer(
        make_model(), length, config(eval_strategy="no"), rows, eval_dataset=rows[:2], callbacks=[progress],
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.evaluate()
    progress.on_log(None, trainer.state, None, logs={"kl": float("inf"), "reward": 1.0})
    assert progress.view()
