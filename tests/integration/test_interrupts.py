"""Ctrl-C and SIGTERM: the update is finished, a checkpoint saved, and the run goes on to the same weights."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from rloom import RLOOTrainer
from rloom.training.interrupts import Interrupts
from tests.conftest import make_model, make_tokenizer


@pytest.fixture(autouse=True)
def as_in_a_script():
    """What a signal does is Python's own default, whatever the tests were started by."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trainer_for(config, rows, reward, **changes):
    return RLOOTrainer(make_model(), reward, config(max_steps=4, **changes), rows, processing_class=make_tokenizer())


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


def interrupted_at(call, *signals):
    """A reward that is in the middle of its work when signals come."""
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) == call:
            for number in signals:
                os.kill(os.getpid(), number)
                time.sleep(0.5)  # rewards run in threads, and the main one takes signals: two at once would be one
        return lengths(completions)

    reward.__name__ = lengths.__name__  # a run goes on with the rewards that it had
    return reward


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_the_running_update_is_finished_and_saved(config, rows, tmp_path, capsys, number, error):
    before = signal.getsignal(number)
    whole = trainer_for(config, rows, lengths, output_dir=str(tmp_path / "whole"))
    whole.train()
    trainer = trainer_for(config, rows, interrupted_at(2, number))
    with pytest.raises(error) as raised:
        trainer.train()
    assert getattr(raised.value, "code", 143) == 143
    assert trainer.state.global_step == 2
    said = capsys.readouterr().err
    assert f"{number.name}: the running update is finished" in said
    assert f"saved in {tmp_path / 'out' / 'checkpoint-2'}" in said
    assert signal.getsignal(number) is before
    again = trainer_for(config, rows, lengths)
    again.train(resume_from_checkpoint="auto")
    assert f"going on from {tmp_path / 'out' / 'checkpoint-2'}, after update 2" in capsys.readouterr().err
    assert again.state.global_step == 4
    pairs = zip(whole.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_second_signal_stops_at_once(config, rows, tmp_path):
    trainer = trainer_for(config, rows, interrupted_at(2, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_run_in_another_thread_leaves_signals_alone(config, rows):
    before, seen = signal.getsignal(signal.SIGINT), []

    def reward(completions, **kwargs):
        seen.append(signal.getsignal(signal.SIGINT))
        return lengths(completions)

    trainer = trainer_for(config, rows, reward)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 4
    assert set(seen) == {before}


def test_a_run_that_fails_gives_signals_back(config, rows):
    before = signal.getsignal(signal.SIGTERM)

    def broken(completions, **kwargs):
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        trainer_for(config, rows, broken).train()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_after_the_last_update_names_no_checkpoint(tmp_path, capsys):
    interrupts = Interrupts()
    with interrupts.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    with pytest.raises(SystemExit):
        interrupts.leave(str(tmp_path), 5)
    assert "rloom: stopped after update 5, which was the last. To go on" in capsys.readouterr().err
