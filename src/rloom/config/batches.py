"""How many completions a rollout has, in whole groups."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.algo.advantages import ADVANTAGE_ESTIMATORS
from rloom.config.topic import Topic, option
from rloom.errors import ConfigError


@dataclass
class BatchTopic(Topic):
    """The size of a rollout."""

    generation_batch_size: int | None = option(
        None, "Completions per rollout, over all processes. Unset: those of `steps_per_generation` steps."
    )
    steps_per_generation: int | None = option(
        None, "Steps of `per_device_train_batch_size` per rollout. Unset: `gradient_accumulation_steps`."
    )

    def resolve_batches(self) -> None:
        """`generation_batch_size` and `steps_per_generation` from each other, in whole groups."""
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            if self.generation_batch_size != per_step * self.steps_per_generation:
                raise ConfigError(
                    "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time: "
                    f"{self.generation_batch_size} is not {per_step} × {self.steps_per_generation}"
                )
        elif self.generation_batch_size is not None:
            if self.generation_batch_size % per_step:
                raise ConfigError(
                    f"generation_batch_size ({self.generation_batch_size}) must be divisible by the global batch "
                    f"size ({per_step}): {_nearest(self.generation_batch_size, per_step)}"
                )
            self.steps_per_generation = self.generation_batch_size // per_step
        else:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_step * self.steps_per_generation
        self._check_groups()

    def _check_groups(self) -> None:
        if self.num_generations < ADVANTAGE_ESTIMATORS[self.choices.advantage_estimator].min_generations:
            raise ConfigError(
                "RLOO requires at least 2 generations per prompt: with one there is no other completion to compare "
                f"with. You set num_generations={self.num_generations}."
            )
        assert self.generation_batch_size is not None
        if self.generation_batch_size % self.num_generations:
            raise ConfigError(
                f"generation_batch_size ({self.generation_batch_size}) must be divisible by num_generations "
                f"({self.num_generations}), so that a rollout holds whole groups: "
                f"{_nearest(self.generation_batch_size, self.num_generations)}. It is "
                f"per_device_train_batch_size ({self.per_device_train_batch_size}) × processes ({self.world_size}) "
                f"× steps_per_generation ({self.steps_per_generation})."
            )
        prompts = self.generation_batch_size // self.num_generations
        if prompts % self.world_size:
            raise ConfigError(
                f"a rollout holds {prompts} prompts, which {self.world_size} processes cannot share evenly; "
                f"{_nearest(prompts, self.world_size)} prompts would do: change per_device_train_batch_size, "
                "steps_per_generation or num_generations"
            )
        per_eval = self.num_generations_eval or self.num_generations
        if self.eval_strategy != "no" and (self.per_device_eval_batch_size * self.world_size) % per_eval:
            raise ConfigError(
                f"The global eval batch size ({self.per_device_eval_batch_size} * {self.world_size}) must be "
                f"divisible by the number of generations used for evaluation ({per_eval}): "
                f"{_nearest(self.per_device_eval_batch_size * self.world_size, per_eval)}"
            )


def _nearest(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, in words."""
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    return f"the nearest that is: {above}" if not below else f"the nearest that are: {below} and {above}"
