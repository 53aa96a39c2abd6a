"""RLOOConfig: transformers' TrainingArguments plus RLOO's own options, under TRL's names.

A topic is one file: its options with their help texts, what is left open and gets its value, what is refused. Defaults
that differ from TrainingArguments follow TRL. `older_names.py` has the names that older documents use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import TrainingArguments

from rloom.config.algorithm import ObjectiveTopic
from rloom.config.batches import BatchTopic
from rloom.config.data import DataTopic, ImageTopic
from rloom.config.generation import ContinuousBatchingTopic, SamplingTopic
from rloom.config.given import Remembering
from rloom.config.model import ModelTopic
from rloom.config.older_names import OlderNames
from rloom.config.output import OutputTopic
from rloom.config.rewards import RewardTopic
from rloom.config.speed import SpeedTopic
from rloom.config.training import TrainingTopic
from rloom.config.vllm import VllmTopic
from rloom.config.win_rate import WinRateTopic

__all__ = ["RLOOConfig"]


# The bases stand in the reverse order of their fields: a dataclass takes those of its last base first.
@dataclass
class RLOOConfig(
    ContinuousBatchingTopic,
    OutputTopic,
    WinRateTopic,
    RewardTopic,
    SpeedTopic,
    ObjectiveTopic,
    VllmTopic,
    SamplingTopic,
    BatchTopic,
    DataTopic,
    ModelTopic,
    ImageTopic,
    TrainingTopic,
    OlderNames,
    TrainingArguments,
    metaclass=Remembering,
):
    """Options of [`RLOOTrainer`]: all of [`~transformers.TrainingArguments`], TRL's for RLOO, and rloom's own.

    An option that does not exist is an error that names the nearest one. The names of older documents (`rloo_k`,
    `kl_coef`, `total_episodes`, …) are accepted: see docs/older-names.md.

    >>> config = RLOOConfig("out", per_device_train_batch_size=8, num_generations=4, report_to="none")
    >>> config.generation_batch_size, config.steps_per_generation, config.beta
    (8, 1, 0.05)
    >>> RLOOConfig("out", betta=0.1)
    Traceback (most recent call last):
        ...
    rloom.errors.UnknownOptionError: RLOOConfig has no option 'betta'; did you mean 'beta'?

    Options that `objective` decides are None unless given; `config.choices` has them resolved.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "transformers_continuous_batching_config",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    def __post_init__(self) -> None:
        self.resolve_precision()
        self.resolve_sharding()
        super().__post_init__()
        self.translate_older_names()
        self.resolve_padding()
        self.resolve_objective()
        self.resolve_batches()
        self.check_lengths()
        self.check_sampling()
        self.check_training()
        self.resolve_engine()
        self.check_continuous_batching()
        self.check_speed()
        self.check_rewards()
        self.check_win_rate()
        self.check_output()
        self.finish_older_names()

    def to_dict(self) -> dict[str, Any]:
        """As TrainingArguments', which takes `stop_token` for a secret and masks it."""
        return {**super().to_dict(), "stop_token": self.stop_token}
