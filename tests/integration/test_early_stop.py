"""`early_stop_on`: a diagnosis that lasts ends a run, with a checkpoint; resumed, it ends at the same update."""

from __future__ import annotations

import pytest

from rloom import RLOOConfig, RLOOTrainer
from rloom.errors import ConfigError
from tests.conftest import make_model, make_tokenizer


def zero(completions, **kwargs):
    return [0.0] * len(completions)


def run(config, rows, resume=None, eval_dataset=None, **changes):
    options = {"max_steps": 9, "early_stop_on": ["scores_are_constant"], "early_stop_patience": 3, **changes}
    data = {"train_dataset": rows, "eval_dataset": eval_dataset}
    trainer = RLOOTrainer(make_model(), zero, config(**options), **data, processing_class=make_tokenizer())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_diagnosis_at_three_logs_in_a_row_ends_the_run(config, rows, tmp_path, caplog, capsys):
    # The rule needs three logs, and has then to hold at two more.
    trainer = run(config, rows)
    assert trainer.state.global_step == 5
    assert (tmp_path / "out" / "checkpoint-5" / "trainer_state.json").exists()
    (line,) = [message for message in caplog.messages if "early stop" in message]
    assert "after update 5" in line
    assert "at 3 logs in a row scores_are_constant: every completion scores 0" in line
    said = capsys.readouterr().out
    assert "stopped after update 5 of 9: scores_are_constant" in said
    assert "those of update 5, as the diagnosis found them; there is no earlier checkpoint" in said


def test_the_checkpoint_is_written_where_only_the_best_are(config, rows, tmp_path, caplog):
    """transformers decides after the evaluation of that update, which is no better than the first."""
    best = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward"}
    trainer = run(config, rows, eval_dataset=rows[:2], **best)
    assert trainer.state.global_step == 5
    assert any("with a checkpoint" in message for message in caplog.messages)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-5"]
    assert trainer.state.best_global_step == 1


def test_an_earlier_checkpoint_is_named(config, rows, tmp_path, capsys):
    run(config, rows, save_strategy="steps", save_steps=2)
    assert f"earlier ones are in {tmp_path / 'out' / 'checkpoint-4'}" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_ends_where_the_run_would_have(config, rows, tmp_path):
    run(config, rows, early_stop_on=["kl_explodes"], max_steps=4, save_strategy="steps", save_steps=4)
    trainer = run(config, rows, resume=str(tmp_path / "out" / "checkpoint-4"))
    assert trainer.state.global_step == 5


def test_other_diagnoses_end_nothing(config, rows):
    assert run(config, rows, early_stop_on=["kl_explodes"], max_steps=6).state.global_step == 6
    assert run(config, rows, early_stop_on=["all"], early_stop_patience=1, diagnosis=False).state.global_step == 3


def test_what_makes_no_sense_is_refused(config, rows, tmp_path):
    with pytest.raises(ConfigError, match="no diagnosis 'kl_explode'; did you mean 'kl_explodes'"):
        run(config, rows, early_stop_on=["kl_explode"])
    with pytest.raises(ConfigError, match=r"no diagnosis 'kl'; there are kl_explodes, .*no_progress, or all"):
        run(config, rows, early_stop_on=["kl"])
    for options, words in (
        ({"early_stop_patience": 2}, "has no effect without early_stop_on"),
        ({"early_stop_on": ["all"], "early_stop_patience": 0}, "at least 1"),
        ({"early_stop_on": ["all"], "logging_strategy": "no"}, "looks at logs"),
    ):
        with pytest.raises(ConfigError, match=words):
            RLOOConfig(str(tmp_path), report_to="none", use_cpu=True, **options)
