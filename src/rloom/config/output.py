"""What a run shows, writes and keeps."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.config.topic import Topic, idle, option
from rloom.errors import ConfigError, did_you_mean

LOG_FORMATS = ("auto", "panel", "line", "dict")


@dataclass
class OutputTopic(Topic):
    """What a run shows, writes and keeps."""

    log_format: str = option(
        "auto",
        "How a run shows itself: panel (live; without a terminal or notebook, once at the end), line (one per log), or "
        "dict (the dictionary, at each log). auto: a panel in a terminal or a notebook unless `disable_tqdm`; else "
        "lines.",
    )
    advice: bool = option(True, "Say at the start which options are outside the ranges that documents recommend.")
    diagnosis: bool = option(
        True, "Say during the run what is going wrong and what to change, in a line at the log that shows it."
    )
    early_stop_on: list[str] | None = option(
        None,
        "Diagnoses that end the run, with a checkpoint: kl_explodes entropy_collapses …, by their names in "
        "docs/metrics.md, or all.",
    )
    early_stop_patience: int = option(3, "Logs in a row at which one of them has to be made.")
    log_older_metrics: bool = option(
        False, "Log the metrics of older documents too: objective/…, policy/…, loss/…, val/…, eps, episode, lr."
    )
    overwrite_output_dir: bool = option(
        False,
        "Delete what an earlier run left in output_dir. Unset: a new run moves it to output_dir/_previous.",
    )
    resume_changed_run: bool = option(
        False,
        "Go on from a checkpoint even if its model, data, rewards, num_generations or objective are not this run's.",
    )
    store_completions: bool = option(
        True, "Keep prompts and completions in the run's store (output_dir/_rollouts); scores are kept there anyway."
    )
    store_token_values: float = option(
        0.01,
        "Share of an update's groups whose tokens are stored with their log-probabilities, KL, entropy and advantage; "
        "at least one group. 0: none. `rloom show` colours tokens by them.",
    )
    log_completions: bool = option(False, "Print a table of completions at each log, and send it to the trackers.")
    log_multimodal: bool = option(True, "Include images in those tables, in W&B and Trackio.")
    num_completions_to_print: int | None = option(None, "Rows of the printed table; unset: all.")
    log_unique_prompts: bool = option(False, "One row per prompt in the tables.")

    def check_output(self) -> None:
        """`log_format` means something, and does not contradict `disable_tqdm`; shares are shares; what may end the run
        can be seen."""
        if not 0.0 <= self.store_token_values <= 1.0:
            raise ConfigError(f"store_token_values is a share, from 0 to 1, not {self.store_token_values!r}")
        self._check_early_stop()
        if self.log_format not in LOG_FORMATS:
            hint = did_you_mean(str(self.log_format), LOG_FORMATS)
            raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, not {self.log_format!r}{hint}")
        if self.log_format == "panel" and self.disable_tqdm and "disable_tqdm" in self._given:
            raise ConfigError("log_format='panel' and disable_tqdm=True contradict each other: leave one of them out")

    def _check_early_stop(self) -> None:
        if self.early_stop_on is None:
            if "early_stop_patience" in self._given:
                raise idle("early_stop_patience", "early_stop_on")
            return
        self.require("early_stop_patience", self.early_stop_patience >= 1, "at least 1")
        if getattr(self.logging_strategy, "value", self.logging_strategy) == "no":
            raise ConfigError("early_stop_on looks at logs, and logging_strategy='no' makes none: set it to 'steps'")
