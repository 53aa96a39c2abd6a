"""The option names of older documents, each mapped to what it became.

A name that was only renamed is a row of RENAMED; one that needs arithmetic has a method. Each is noted once per
process when used, and giving both the older and the present name is an error. docs/older-names.md is the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

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

INIT_ONLY_NAMES = ("train_batch_size",)
"""Older names that TrainingArguments has a property for, so that they cannot be fields."""

_noted: set[str] = set()


def _older(help: str) -> Any:
    return field(default=None, metadata={"help": f"Older name. {help}"})


def note_once(name: str, became: str) -> None:
    """Tell the user, once per process, what an older name became."""
    if name not in _noted:
        _noted.add(name)
        logger.warning("`%s` is an older name: it is taken as %s", name, became)


@dataclass
class OlderNames:
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
            self._rename(old, new)
        self._translate_normalization()
        self._translate_kl()
        self._translate_batches()
        if self.stop_token not in (None, "eos"):
            raise ConfigError(f'stop_token must be "eos", not {self.stop_token!r}; for another token use stop_token_id')
        noted = {
            "sft_model_path": "the model if none is named, else the reference",
            "reward_model_path": "`reward_funcs`",
        }
        for name, became in noted.items():
            if getattr(self, name) is not None:
                note_once(name, became)
        if self.stop_token == "eos" and "stop_token" not in _noted:
            _noted.add("stop_token")
            logger.warning('`stop_token="eos"` has no effect: the end token ends completions anyway')
        if self.local_rollout_forward_batch_size is not None:
            note_once("local_rollout_forward_batch_size", "nothing: it has no effect on results")

    def finish_older_names(self) -> None:
        """`total_episodes`, which needs the resolved batch sizes."""
        config: Any = self
        if self.total_episodes is None:
            return
        self._refuse_both("total_episodes", "max_steps")
        if self.total_episodes < 1:
            raise ConfigError(f"total_episodes must be positive, not {self.total_episodes}")
        rollouts = math.ceil(self.total_episodes / config.generation_batch_size)
        steps = rollouts * config.steps_per_generation * config.num_iterations
        config.max_steps = max(1, math.ceil(steps / config.gradient_accumulation_steps))
        note_once("total_episodes", f"max_steps={config.max_steps}")
        self.total_episodes = None

    def _rename(self, old: str, new: str) -> None:
        value = getattr(self, old)
        if value is None:
            return
        self._refuse_both(old, new)
        setattr(self, new, value)
        setattr(self, old, None)
        config: Any = self
        config._given = config._given | {new}
        note_once(old, f"`{new}`")

    def _refuse_both(self, old: str, new: str) -> None:
        given: frozenset[str] = getattr(self, "_given", frozenset())
        if new in given:
            raise ConfigError(f"`{old}` is an older name of `{new}`: give one of them, not both")

    def _translate_normalization(self) -> None:
        if self.normalize_reward is not None and self.whiten_rewards is not None:
            raise ConfigError("`normalize_reward` and `whiten_rewards` mean the same here: give one of them, not both")
        for old in ("normalize_reward", "whiten_rewards"):
            value = getattr(self, old)
            if value is None:
                continue
            self._refuse_both(old, "normalize_rewards")
            config: Any = self
            config.normalize_rewards = "batch" if value else "off"
            setattr(self, old, None)
            note_once(old, '`normalize_rewards="batch"`')

    def _translate_kl(self) -> None:
        if self.token_level_kl is None:
            return
        self._refuse_both("token_level_kl", "kl_placement")
        config: Any = self
        if self.token_level_kl:
            config.kl_placement = "reward_tokens"
            config.ratio_level = config.ratio_level or "token"
        else:
            config.kl_placement = "reward"
        self.token_level_kl = None
        note_once("token_level_kl", '`kl_placement="reward_tokens"` with `ratio_level="token"`')

    def _translate_batches(self) -> None:
        config: Any = self
        total = config._init_only.get("train_batch_size")
        if total is not None:
            self._refuse_both("train_batch_size", "gradient_accumulation_steps")
            per_step = config.per_device_train_batch_size * config.world_size
            if total % per_step:
                raise ConfigError(
                    f"train_batch_size ({total}) must be a multiple of per_device_train_batch_size × processes "
                    f"({per_step}); set per_device_train_batch_size to a divisor of {total // config.world_size}"
                )
            config.gradient_accumulation_steps = total // per_step
            note_once("train_batch_size", f"gradient_accumulation_steps={total // per_step}")
        if self.num_mini_batches is not None:
            self._refuse_both("num_mini_batches", "steps_per_generation")
            self._refuse_both("num_mini_batches", "generation_batch_size")
            config.steps_per_generation = self.num_mini_batches * config.gradient_accumulation_steps
            note_once("num_mini_batches", f"steps_per_generation={config.steps_per_generation}")
            self.num_mini_batches = None
