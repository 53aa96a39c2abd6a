"""One evaluation after the last update, for `rloom train` with evaluation prompts and no `eval_strategy`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class LastEvaluation(TrainerCallback):
    """Evaluates once, after the last update and before its checkpoint: trackers and the saved state get the numbers."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for an evaluation if this update was the last."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True
        return control
