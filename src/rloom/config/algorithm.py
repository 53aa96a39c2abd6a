"""What is maximised: the KL, the baseline, the ratio, the loss, and what happens to scores before."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rloom.algo.advantages import ADVANTAGE_ESTIMATORS
from rloom.algo.kl import KL, KL_ESTIMATORS, KL_PLACEMENTS
from rloom.algo.loss import AGGREGATIONS, RATIO_LEVELS, SURROGATES
from rloom.algo.normalizers import NORMALIZERS, OFF
from rloom.algo.objectives import OBJECTIVES, TABLES, Objective
from rloom.algo.shaping import LENGTH_REGULARIZATIONS, TRUNCATIONS, Truncation
from rloom.algo.tables import described, readers
from rloom.config.topic import Topic, idle, option
from rloom.errors import ConfigError, check_choice, in_words
from rloom.printable import get_logger

logger = get_logger(__name__)


@dataclass
class ObjectiveTopic(Topic):
    """The options of the objective, and how those that `objective` decides are resolved."""

    # As in TRL
    beta: float = option(0.05, "Weight of the KL from the reference; 0: no reference is kept.")
    num_iterations: int = option(1, "Passes over each rollout (μ).")
    epsilon: float = option(0.2, "Clip of the ratio, below and (unless `epsilon_high` is set) above 1.")
    epsilon_high: float | None = option(None, "Clip of the ratio above 1.")
    reward_weights: list[float] | None = option(None, "One weight per reward function; unset: 1 each.")
    normalize_advantages: bool | None = option(
        None,
        "Bring the advantages of a rollout to mean 0 and standard deviation 1. Unset: as `objective` says.",
    )
    reward_clip_range: tuple[float, float] | None = option(None, "Hold scores within (min, max).")
    mask_truncated_completions: bool = option(
        False, 'Leave truncated completions out of the loss; the same as `truncated_completions="mask"`.'
    )
    sync_ref_model: bool = option(False, "Let the reference follow the policy.")
    ref_model_mixup_alpha: float = option(0.6, "reference ← α·policy + (1−α)·reference at each sync.")
    ref_model_sync_steps: int = option(512, "Updates between two syncs of the reference.")

    # Beyond TRL
    objective: str = option(
        "trl",
        f"Whose RLOO: {in_words(OBJECTIVES)}. The options below override its choices.",
    )
    advantage_estimator: str | None = option(None, f"The baseline: {', '.join(ADVANTAGE_ESTIMATORS)}.")
    baseline_momentum: float = option(
        0.9, f'Memory of the "{in_words(readers("baseline_momentum", ADVANTAGE_ESTIMATORS))}" baseline.'
    )
    kl_estimator: str | None = option(None, f"{described(KL_ESTIMATORS)}.")
    kl_target: float | None = option(
        None, "Adapt `beta` after each rollout so that `kl` (nats per token) goes to this value; unset: constant."
    )
    kl_target_gain: float = option(
        0.1, "beta ← beta · (1 + this · clip(kl / kl_target − 1, −0.2, 2)); larger: quicker, and less steady."
    )
    kl_placement: str | None = option(None, f"Where the KL goes: {', '.join(KL_PLACEMENTS)}.")
    ratio_level: str | None = option(
        None, f"One ratio {in_words(f'{level.note} ({name})' for name, level in RATIO_LEVELS.items())}."
    )
    surrogate: str | None = option(None, f"{described(SURROGATES)}.")
    loss_aggregation: str | None = option(None, f"How the loss is averaged: {', '.join(AGGREGATIONS)}.")
    dual_clip: float | None = option(None, "Bound of the ratio where the advantage is negative; 0: off.")
    advantage_clip: float | None = option(None, "Hold advantages within ± this; 0: off.")
    normalize_rewards: str | None = option(None, f"Bring scores to a common scale: {in_words([*NORMALIZERS, OFF])}.")
    missing_eos_penalty: float | None = option(
        None, "Taken from the score of a completion that does not end by itself."
    )
    length_regularization: str | None = option(None, f"Charge for length: {described(LENGTH_REGULARIZATIONS)}.")
    length_coefficient: float = option(1.0, "The most that the length of a completion can cost.")
    length_margin: int | None = option(
        None,
        f"{in_words(readers('length_margin', LENGTH_REGULARIZATIONS))}: the last tokens over which the charge rises; "
        "unset: a fifth of the limit.",
    )
    truncated_completions: str | None = option(None, f"Completions cut off at the limit: {described(TRUNCATIONS)}.")

    def resolve_objective(self) -> None:
        """`choices`: what `objective` says, but for the options that were given."""
        check_choice("objective", self.objective, OBJECTIVES)
        preset = OBJECTIVES[self.objective]
        chosen = {name: getattr(self, name) for name in Objective.names()}
        chosen = {name: getattr(preset, name) if value is None else value for name, value in chosen.items()}
        for name in ("dual_clip", "advantage_clip"):
            chosen[name] = chosen[name] or None
        chosen["normalize_rewards"] = None if chosen["normalize_rewards"] == OFF else chosen["normalize_rewards"]
        self.choices = Objective(**chosen)
        for name, table in TABLES.items():
            check_choice(name, chosen[name], table)
        if self.normalize_rewards is not None:
            check_choice("normalize_rewards", self.normalize_rewards, [*NORMALIZERS, OFF])
        if self.length_regularization is not None:
            check_choice("length_regularization", self.length_regularization, LENGTH_REGULARIZATIONS)
        self._check_truncation()
        self._check_objective()

    @property
    def truncation(self) -> Truncation:
        """What happens to truncated completions."""
        return TRUNCATIONS[self.truncated_completions or ("mask" if self.mask_truncated_completions else "keep")]

    def _check_truncation(self) -> None:
        if self.truncated_completions is not None:
            check_choice("truncated_completions", self.truncated_completions, TRUNCATIONS)
        if self.mask_truncated_completions and self.truncation.trained:
            raise ConfigError(
                f'mask_truncated_completions=True and truncated_completions="{self.truncation.name}" contradict each '
                "other; give one of them"
            )

    def _check_objective(self) -> None:
        if (self.epsilon_high is not None and self.epsilon_high < 0) or self.epsilon < 0:
            raise ConfigError("epsilon and epsilon_high must not be negative")
        per_token = KL_PLACEMENTS[self.choices.kl_placement].per_token
        if per_token and not RATIO_LEVELS[self.choices.ratio_level].per_token:
            raise ConfigError(
                f'kl_placement="{self.choices.kl_placement}" gives each token its own advantage, which a ratio per '
                'completion cannot use; set ratio_level="token" or kl_placement="reward"'
            )
        if self.sync_ref_model and not self.beta:
            raise ConfigError(
                "sync_ref_model=True needs a reference, and with beta=0.0 there is none; set beta above 0 or "
                "sync_ref_model=False"
            )
        self._check_kl_target()
        if self.reward_clip_range is not None and not self.reward_clip_range[0] < self.reward_clip_range[1]:
            raise ConfigError(f"reward_clip_range must be (min, max), not {self.reward_clip_range}")
        self._check_ranges()
        self._check_read()
        self._hint_unsound_kl()

    def _check_kl_target(self) -> None:
        if self.kl_target is None:
            if "kl_target_gain" in self._given:
                raise idle("kl_target_gain", "kl_target")
            return
        self.require("kl_target", self.kl_target > 0, "positive: nats per token, such as 0.02")
        self.require("kl_target_gain", 0 < self.kl_target_gain <= 1, "above 0 and at most 1")
        if not self.beta:
            raise ConfigError(
                "kl_target adapts beta, and beta=0.0 stays 0 whatever it is multiplied by; set beta to a first value, "
                "such as 0.05"
            )

    def _check_ranges(self) -> None:
        self.require("num_iterations", self.num_iterations >= 1, "at least 1")
        self.require("beta", self.beta >= 0, "0 (no KL) or positive")
        self.require("dual_clip", not self.dual_clip or self.dual_clip > 1, "0 (off) or above 1")
        self.require("advantage_clip", not self.advantage_clip or self.advantage_clip > 0, "0 (off) or positive")
        self.require("baseline_momentum", 0 <= self.baseline_momentum < 1, "in [0, 1)")
        self.require(
            "length_margin",
            self.length_margin is None or 0 < self.length_margin <= self.max_completion_length,
            "between 1 and max_completion_length",
        )

    def _check_read(self) -> None:
        """An option that none of the choices made reads is refused rather than ignored."""
        defaults = {f.name: f.default for f in fields(self)}
        chosen = {choice: (getattr(self.choices, choice), table) for choice, table in TABLES.items()}
        chosen["length_regularization"] = (self.length_regularization, LENGTH_REGULARIZATIONS)
        for choice, (value, table) in chosen.items():
            for name in dict.fromkeys(name for entry in table.values() for name in entry.options):
                known = readers(name, table)
                if name in self._given and getattr(self, name) != defaults[name] and value not in known:
                    raise idle(name, choice if len(known) == len(table) else f'{choice}="{known[0]}"')

    def _hint_unsound_kl(self) -> None:
        if not self.beta and self._given & {"kl_estimator", "kl_placement"}:
            logger.warning("beta is 0: `kl_estimator` and `kl_placement` have no effect")
        in_loss = KL_PLACEMENTS[self.choices.kl_placement].in_loss
        gradients = {n: e.loss_gradient if in_loss else e.reward_gradient for n, e in KL_ESTIMATORS.items()}
        if self.beta and gradients[self.choices.kl_estimator] is None:
            logger.warning(
                'kl_estimator="%s" in the %s does not give the gradient of the KL (docs/algorithms.md says what it '
                "gives); %s does",
                self.choices.kl_estimator,
                "loss" if in_loss else "reward",
                in_words(f'"{name}"' for name, gradient in gradients.items() if gradient == KL),
            )
