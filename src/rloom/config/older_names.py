"""The option names of older documents, each mapped to what it became.

A name that was only renamed is a row of RENAMED; one that needs arithmetic has a method. Each is noted once per
process when used, and giving both the older and the present name is an error. docs/older-names.md is the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rloom.config.topic import Topic, option
from rloom.errors import ConfigError
from rloom.printable import get_logger

logger = get_logger(__name__)

RENAMED = {
    "rloo_k": "num_generations",
    "kl_coef": "beta",
    "kl_coeff": "beta",
    "cliprange": "epsilon",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "normalize_advantage": "normalize_advantages",
}

KEPT = {
    "sft_model_path": "the model if none is named, else the reference",
    "reward_model_path": "`reward_funcs`",
    "local_rollout_forward_batch_size": "nothing: it has no effect on results",
}
"""Names that stay options: of each, what it means."""

INIT_ONLY_NAMES = ("train_batch_size",)
"""Older names that TrainingArguments has a property for, so that they cannot be fields."""

_noted: set[str] = set()


def _older(help: str) -> Any:
    return option(None, f"Older name. {help}")


def note_once(name: str, became: str) -> None:
    """Tell the user, once per process, what an older name became."""
    if name not in _noted:
        _noted.add(name)
        logger.warning("`%s` is an older name: it is taken as %s", name, became)


@dataclass
class OlderNames(Topic):
    """Fields for the older names, and their translation. Mixed into [`RLOOConfig`]."""

    rloo_k: int | None = _older("Now `num_generations`.")
    kl_coef: float | None = _older("Now `beta`.")
    kl_coeff: float | None = _older("Now `beta`.")
    cliprange: float | None = _older("Now `epsilon`.")
    num_ppo_epochs: int | None = _older("Now `num_iterations`.")
    num_mini_batches: int | None = _older("Updates per pass over a rollout; sets `steps_per_generation`.")
    total_episodes: int | None = _older("Completions in all; sets `max_steps`.")
    response_length: int | None = _older("Now `max_completion_length`.")
    local_rollout_forward_batch_size: int | None = _older("Accepted; has no effect on results.")
    sft_model_path: str | None = _older("The model when none is named, else the reference.")
    reward_model_path: str | None = _older("A reward model, by name or path; now `reward_funcs`.")
    normalize_reward: bool | None = _older('Now `normalize_rewards="batch"`.')
    whiten_rewards: bool | None = _older('Now `normalize_rewards="batch"`.')
    normalize_advantage: bool | None = _older("Now `normalize_advantages`.")
    token_level_kl: bool | None = _older('Now `kl_placement="reward_tokens"` with `ratio_level="token"`.')
    stop_token: str | None = _older('Only "eos", which is what ends a completion anyway.')
    stop_token_id: int | None = _older("One more token that ends a completion.")
    num_sample_generations: int | None = _older("How often sample completions are printed during the run.")

    def translate_older_names(self) -> None:
        """Move every older name's value to its present place. Runs before the batch sizes are resolved."""
        for old, new in RENAMED.items():
            value = getattr(self, old)
            if value is not None:
                self._became(old, f"`{new}`", **{new: value})
                self._given |= {new}
        self._translate_normalization()
        self._translate_kl()
        self._translate_batches()
        for name, meaning in KEPT.items():
            if getattr(self, name) is not None:
                note_once(name, meaning)
        if self.stop_token not in (None, "eos"):
            raise ConfigError(f'stop_token must be "eos", not {self.stop_token!r}; for another token use stop_token_id')
        if self.stop_token == "eos" and "stop_token" not in _noted:
            _noted.add("stop_token")
            logger.warning('`stop_token="eos"` has no effect: the end token ends completions anyway')

    def finish_older_names(self) -> None:
        """`total_episodes`, which needs the resolved batch sizes."""
        if self.total_episodes is None:
            return
        self.require("total_episodes", self.total_episodes > 0, "positive")
        rollouts = math.ceil(self.total_episodes / self.generation_batch_size)
        steps = rollouts * self.steps_per_generation * self.num_iterations
        updates = max(1, math.ceil(steps / self.gradient_accumulation_steps))
        self._became("total_episodes", f"max_steps={updates}", max_steps=updates)

    def _became(self, old: str, meaning: str, **values: Any) -> None:
        """Give the present options their values, unless they were given too, and say so."""
        for new, value in values.items():
            if new in self._given and getattr(self, new) is not None:
                raise ConfigError(f"`{old}` is an older name of `{new}`: give one of them, not both")
            setattr(self, new, value)
        if old not in INIT_ONLY_NAMES:
            setattr(self, old, None)
        note_once(old, meaning)

    def _translate_normalization(self) -> None:
        if self.normalize_reward is not None and self.whiten_rewards is not None:
            raise ConfigError("`normalize_reward` and `whiten_rewards` mean the same here: give one of them, not both")
        for old in ("normalize_reward", "whiten_rewards"):
            value = getattr(self, old)
            if value is not None:
                self._became(old, '`normalize_rewards="batch"`', normalize_rewards="batch" if value else "off")

    def _translate_kl(self) -> None:
        if self.token_level_kl is None:
            return
        values = {"kl_placement": "reward_tokens" if self.token_level_kl else "reward"}
        if self.token_level_kl and self.ratio_level is None:
            values["ratio_level"] = "token"
        self._became("token_level_kl", '`kl_placement="reward_tokens"` with `ratio_level="token"`', **values)

    def _translate_batches(self) -> None:
        total = self._init_only.get("train_batch_size")
        if total is not None:
            per_step = self.per_device_train_batch_size * self.world_size
            if total % per_step:
                raise ConfigError(
                    f"train_batch_size ({total}) must be a multiple of per_device_train_batch_size × processes "
                    f"({per_step}); set per_device_train_batch_size to a divisor of {total // self.world_size}"
                )
            steps = total // per_step
            meaning = f"gradient_accumulation_steps={steps}"
            self._became("train_batch_size", meaning, gradient_accumulation_steps=steps)
        if self.num_mini_batches is not None:
            steps = self.num_mini_batches * self.gradient_accumulation_steps
            # A rollout of another size would contradict it, though it is no other name for that.
            values = {"steps_per_generation": steps, "generation_batch_size": None}
            self._became("num_mini_batches", f"steps_per_generation={steps}", **values)
