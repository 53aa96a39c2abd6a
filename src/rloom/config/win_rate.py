"""Win rate in evaluation, as in `rloom eval`."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.config.topic import Topic, idle, option
from rloom.errors import ConfigError


@dataclass
class WinRateTopic(Topic):
    """Whom evaluation compares completions with, and who judges."""

    eval_reference_column: str | None = option(
        None, "Evaluation compares completions with the texts in this column, and reports a win rate."
    )
    eval_against: str | None = option(None, "Evaluation compares completions with those of this model.")
    eval_judge_model: str | None = option(None, "Who compares: a model's name at `eval_judge_url`.")
    eval_judge_url: str | None = option(
        None, "An OpenAI-compatible address; the key is OPENAI_API_KEY. Unset: OPENAI_BASE_URL, else OpenAI's."
    )
    eval_judge_reward_model: str | None = option(None, "Who compares: a reward model, by hub id or folder.")
    eval_judge_rubric: str | None = option(None, "What counts for the judge, in words.")
    eval_judge_cache: str | None = option(None, "File in which the judge's answers are kept.")

    def check_win_rate(self) -> None:
        """One opponent, one judge, and nothing that is told to neither. The trainer, which may be given a judge, asks
        for both."""
        if self.eval_reference_column and self.eval_against:
            raise ConfigError("give one of eval_reference_column and eval_against: one opponent at a time")
        if self.eval_judge_model and self.eval_judge_reward_model:
            raise ConfigError("give one of eval_judge_model and eval_judge_reward_model: one judge at a time")
        if self.eval_reference_column and self.remove_unused_columns:
            raise ConfigError("eval_reference_column needs its column: leave remove_unused_columns=False")
        for name in ("eval_judge_url", "eval_judge_rubric", "eval_judge_cache"):
            if getattr(self, name) and not self.eval_judge_model:
                raise idle(name, "eval_judge_model")
