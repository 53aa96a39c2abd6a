"""RLOOConfig: transformers' TrainingArguments plus RLOO's own options, under TRL's names.

Options are grouped as in TRL's own class; what rloom adds stands in groups of its own. Defaults that differ from
TrainingArguments follow TRL. `older_names.py` owns the names that older documents use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from rloom.algo.objectives import (
    AGGREGATIONS,
    ESTIMATORS,
    KL_PLACEMENTS,
    OBJECTIVES,
    RATIO_LEVELS,
    SURROGATES,
    Objective,
)
from rloom.errors import ConfigError, UnknownOptionError, check_choice, did_you_mean
from rloom.models.cpu_bfloat16 import make_bfloat16_safe
from rloom.older_names import INIT_ONLY_NAMES, OlderNames
from rloom.printable import get_logger
from rloom.sampling_rules import RULES, check_sampling
from rloom.vllm_names import resolve_vllm

logger = get_logger(__name__)

ENGINES = ("native", "forked", "transformers", "vllm")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


MEANT = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens", "max_response_length"), "max_completion_length"),
    **dict.fromkeys(("K", "k", "group_size", "n", "num_samples"), "num_generations"),
    **dict.fromkeys(("lr", "actor_lr"), "learning_rate"),
    **dict.fromkeys(("batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    **dict.fromkeys(("clip_range", "clip_ratio", "clip_eps"), "epsilon"),
    "loss_type": "loss_aggregation",
    "penalty_reward_value": "missing_eos_penalty",
}
MEANT = {name: f"did you mean '{option}'?" for name, option in MEANT.items()} | {
    "max_prompt_length": "prompts are not cut here: filter or shorten them in the data set, and set "
    "'max_seq_length' to bound prompt and completion together"
}
"""Names that other trainers use, which do not look like ours."""

OLDER = frozenset(f.name for f in fields(OlderNames))


class _Remembering(type):
    """Calls the constructor, after noting which options were given and refusing those that do not exist.

    A metaclass rather than a wrapped `__init__`, so that subclasses, whose constructors dataclasses write anew, have
    it too.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        options = {f.name: f.default for f in fields(cls) if f.init}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in options and name not in INIT_ONLY_NAMES:
                present = [option for option in options if option not in OLDER]
                hint = f"; {MEANT[name]}" if name in MEANT else did_you_mean(name, present)
                raise UnknownOptionError(f"{cls.__name__} has no option '{name}'{hint}")
        values = dict(zip(options, args, strict=False)) | kwargs
        given = set(values)
        if given.issuperset(options):  # a command-line parser passes every option: tell by the value then
            given = {name for name in given if name in INIT_ONLY_NAMES or values[name] != options[name]}
        config = cls.__new__(cls)  # type: ignore[call-overload]
        config._given = frozenset(given)
        config._init_only = {name: kwargs.pop(name) for name in INIT_ONLY_NAMES if name in kwargs}
        config.__init__(*args, **kwargs)
        return config


@dataclass
class RLOOConfig(OlderNames, TrainingArguments, metaclass=_Remembering):
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

    _given: ClassVar[frozenset[str]] = frozenset()
    _init_only: ClassVar[dict[str, Any]] = {}
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "transformers_continuous_batching_config",
        "generation_kwargs",
        "chat_template_kwargs",
    ]

    # TrainingArguments' own, with TRL's defaults
    learning_rate: float = _option(1e-6, "Initial learning rate.")
    logging_steps: float = _option(10, "Updates between two logs; below 1: as a share of the run.")
    gradient_checkpointing: bool = _option(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = _option(
        None,
        "bfloat16 mixed precision. Unset: on, unless fp16 is set or the device does not do bfloat16 fast.",
    )
    lr_scheduler_kwargs: dict | str | None = _option(None, "Further arguments of the learning-rate schedule.")
    remove_unused_columns: bool | None = _option(
        False, "Keep only the prompt (and images); reward functions then see no other column."
    )

    fetch_images: bool = _option(
        False,
        "Fetch images that the data names by address. Off, these are an error: who made the data chose them.",
    )
    image_folder: str | None = _option(
        None,
        "Folder that images named by paths are read from, and no other. Unset: the working folder, or in commands the "
        "folder of local data elsewhere.",
    )

    # The model and the reference
    model_init_kwargs: dict[str, Any] | str | None = _option(
        None, "Arguments of `from_pretrained` when the model is given by name (`dtype`, `revision`, …)."
    )
    trust_remote_code: bool = _option(False, "Allow models and tokenizers that bring their own Python code.")
    router_aux_loss_coef: float | None = _option(
        None, "Weight of a mixture-of-experts model's load-balancing loss; unset: the model's own; 0: off."
    )
    disable_dropout: bool = _option(False, "Switch dropout off in policy and reference.")

    # The data
    num_generations: int = _option(2, "K, the number of completions per prompt; at least 2.")
    num_generations_eval: int | None = _option(None, "Completions per prompt in evaluation; unset: K.")
    max_completion_length: int = _option(512, "Longest completion, in tokens.")
    max_seq_length: int | None = _option(
        None, "Most tokens of prompt and completion together. Unset: what `load_model` was told, else the model's own."
    )
    ds3_gather_for_generation: bool = _option(True, "DeepSpeed ZeRO-3: gather the weights to generate.")
    shuffle_dataset: bool | None = _option(True, "Shuffle the training prompts, anew in each epoch.")
    pad_to_multiple_of: int | str | None = _option("auto", "Pad prompts and completions to such a multiple.")

    # Generation
    generation_batch_size: int | None = _option(
        None, "Completions per rollout, over all processes. Unset: those of `steps_per_generation` steps."
    )
    steps_per_generation: int | None = _option(
        None, "Steps of `per_device_train_batch_size` per rollout. Unset: `gradient_accumulation_steps`."
    )
    temperature: float = _option(1.0, "Sampling temperature, above 0; also that of all log-probabilities.")
    top_p: float = _option(1.0, "Nucleus sampling: keep the smallest set of tokens with this probability.")
    top_k: int = _option(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float | None = _option(None, "Keep tokens at least this likely, relative to the likeliest.")
    generation_kwargs: dict | str | None = _option(None, "Further options of the generation engine.")
    chat_template_kwargs: dict | str | None = _option(None, "Further arguments of the chat template.")
    repetition_penalty: float = _option(1.0, "Above 1: discourage tokens that have appeared already.")
    cache_implementation: str | None = _option(None, "The cache that `model.generate` uses.")
    engine: str | None = _option(
        None,
        "What generates: native (our engine, on the trained weights), forked (the library's cache, repeated for each "
        "group), transformers (`model.generate`) or vllm. Unset: the first of the first three that proves right on the "
        "model.",
    )
    compile_generation: bool | None = _option(
        None,
        "Compile the native engine's decode step: a seventh faster on an H200, after 20 seconds at the start; unset: "
        "no. Compile vLLM's model; unset: on a GPU.",
    )
    merge_generation: bool | None = _option(
        None,
        "Let the native engine draw from copies of the weights into which a LoRA adapter is merged: faster, in more "
        "memory, and in half precision with what the adapter adds rounded. Unset: in float32, where there is room.",
    )

    # vLLM
    use_vllm: bool = _option(False, 'Generate with vLLM; the same as `engine="vllm"`.')
    vllm_mode: str = _option("colocate", 'How vLLM runs: "colocate" (in this process) or "server".')
    vllm_model_impl: str = _option("vllm", 'Model implementation inside vLLM: "vllm" or "transformers".')
    vllm_enable_sleep_mode: bool = _option(False, "Let a colocated vLLM's GPU memory go while training.")
    vllm_structured_outputs_regex: str | None = _option(None, "Completions must match this expression.")
    vllm_server_base_url: str | None = _option(None, "Address of the vLLM server.")
    vllm_server_host: str = _option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = _option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = _option(240.0, "Seconds to wait for the vLLM server.")
    vllm_group_port: int = _option(51216, "Not used: weights go by `vllm_weights_dir`.")
    vllm_weights_dir: str | None = _option(
        None, "Folder that trainer and vLLM server both see, for weights on their way. Unset: in `output_dir`."
    )
    vllm_gpu_memory_utilization: float = _option(0.3, "Share of the device's memory for a colocated vLLM.")
    vllm_max_model_length: int | None = _option(None, "Context length of a colocated vLLM; unset: the model's.")
    vllm_tensor_parallel_size: int = _option(1, "Tensor parallelism of a colocated vLLM: 1.")

    # The objective, as in TRL
    beta: float = _option(0.05, "Weight of the KL from the reference; 0: no reference is kept.")
    num_iterations: int = _option(1, "Passes over each rollout (μ).")
    epsilon: float = _option(0.2, "Clip of the ratio, below and (unless `epsilon_high` is set) above 1.")
    epsilon_high: float | None = _option(None, "Clip of the ratio above 1.")
    reward_weights: list[float] | None = _option(None, "One weight per reward function; unset: 1 each.")
    normalize_advantages: bool | None = _option(
        None,
        "Bring the advantages of a rollout to mean 0 and standard deviation 1. Unset: as `objective` says.",
    )
    reward_clip_range: tuple[float, float] | None = _option(None, "Hold scores within (min, max).")
    mask_truncated_completions: bool = _option(
        False, 'Leave truncated completions out of the loss; the same as `truncated_completions="mask"`.'
    )
    sync_ref_model: bool = _option(False, "Let the reference follow the policy.")
    ref_model_mixup_alpha: float = _option(0.6, "reference ← α·policy + (1−α)·reference at each sync.")
    ref_model_sync_steps: int = _option(512, "Updates between two syncs of the reference.")

    # The objective, beyond TRL
    objective: str = _option(
        "trl",
        "Whose RLOO: trl, paper, openrlhf, verl or reinforce++. The options below override its choices.",
    )
    advantage_estimator: str | None = _option(None, f"The baseline: {', '.join(ESTIMATORS)}.")
    baseline_momentum: float = _option(0.9, 'Memory of the "moving_average" baseline.')
    kl_estimator: str | None = _option(None, "k1, k2, k3, or full (over the whole vocabulary).")
    kl_placement: str | None = _option(None, f"Where the KL goes: {', '.join(KL_PLACEMENTS)}.")
    ratio_level: str | None = _option(None, "One ratio per completion (sequence) or per token (token).")
    surrogate: str | None = _option(None, "clip (PPO's clipped ratio) or reinforce (plain log-probabilities).")
    loss_aggregation: str | None = _option(None, f"How the loss is averaged: {', '.join(AGGREGATIONS)}.")
    dual_clip: float | None = _option(None, "Bound of the ratio where the advantage is negative; 0: off.")
    advantage_clip: float | None = _option(None, "Hold advantages within ± this; 0: off.")
    normalize_rewards: str | None = _option(None, "Bring scores to a common scale: batch, running or off.")
    missing_eos_penalty: float | None = _option(
        None, "Taken from the score of a completion that does not end by itself."
    )
    length_regularization: str | None = _option(None, "Charge for length: linear or soft_overlong.")
    length_coefficient: float = _option(1.0, "The most that the length of a completion can cost.")
    length_margin: int | None = _option(
        None, "soft_overlong: the last tokens over which the charge rises; unset: a fifth of the limit."
    )
    truncated_completions: str | None = _option(
        None, "Completions cut off at the limit: keep, mask (no loss) or exclude (no loss, no baseline)."
    )

    # Speed and memory: how the same gradient is computed
    max_tokens_per_micro_batch: int | None = _option(
        None,
        "Tokens run forward and backward at a time. Unset: so many that a GPU of this kind is busy with a layer for "
        "longer than the host takes to launch it.",
    )
    packing: bool | None = _option(
        None, "Train with each prompt once per group. Unset: wherever the model proves to allow it; False: padded rows."
    )

    split_weights: bool | None = _option(
        None,
        "Hold float32 weights as bfloat16, which is computed with, and the 16 bits that it drops, which the optimizer "
        "uses and `save_model` writes. Unset: under `bf16` on a GPU, unless `model_init_kwargs` asks for float32; "
        "False: float32 weights that are cast for each product, as torch's autocast does.",
    )
    offload_reference: bool = _option(
        False, "Keep the reference's weights in the host's memory, and on the device only while they are used."
    )
    dynamic_sampling: int = _option(
        0,
        "Replace groups whose scores are all equal by groups of other prompts, in at most so many rounds per rollout.",
    )
    compile_layers: bool | None = _option(
        None,
        "Compile the decoder layers for training, after half a minute at the start. Unset: no; our own kernels for "
        "what stands between a layer's products are there from the first update.",
    )
    keep_logits: bool | None = _option(
        None,
        "Keep a micro-batch's logits for its backward instead of computing them again: a little faster with a wide "
        "vocabulary, for as many numbers as vocabulary times trained tokens. Unset: where they take less than 3 GiB.",
    )

    # How rewards are called
    on_reward_error: str = _option(
        "raise",
        "A reward function that fails: raise, none (its samples have no score, and are counted), or a number instead.",
    )
    reward_time_limit: float = _option(60.0, "Seconds per sample for isolated reward functions that do not say.")
    reward_workers: int | None = _option(
        None,
        "Worker processes of isolated reward functions, and threads of others. Unset: one per core, at most 8; of "
        "several training processes on a machine each has its share of the cores.",
    )
    reward_concurrency: int = _option(64, "Calls of an async reward function at a time, where it does not say.")

    # Win rate in evaluation, as in `rloom eval`
    eval_reference_column: str | None = _option(
        None, "Evaluation compares completions with the texts in this column, and reports a win rate."
    )
    eval_against: str | None = _option(None, "Evaluation compares completions with those of this model.")
    eval_judge_model: str | None = _option(None, "Who compares: a model's name at `eval_judge_url`.")
    eval_judge_url: str | None = _option(
        None, "An OpenAI-compatible address; the key is OPENAI_API_KEY. Unset: OPENAI_BASE_URL, else OpenAI's."
    )
    eval_judge_reward_model: str | None = _option(None, "Who compares: a reward model, by hub id or folder.")
    eval_judge_rubric: str | None = _option(None, "What counts for the judge, in words.")
    eval_judge_cache: str | None = _option(None, "File in which the judge's answers are kept.")

    # What is shown
    advice: bool = _option(True, "Say at the start which options are outside the ranges that documents recommend.")
    diagnosis: bool = _option(
        True, "Say during the run what is going wrong and what to change, in a line at the log that shows it."
    )
    log_older_metrics: bool = _option(
        False, "Log the metrics of older documents too: objective/…, policy/…, loss/…, val/…, eps, episode, lr."
    )
    overwrite_output_dir: bool = _option(
        False,
        "Delete what an earlier run left in output_dir. Unset: a new run moves it to output_dir/_previous.",
    )
    resume_changed_run: bool = _option(
        False,
        "Go on from a checkpoint even if its model, data, rewards, num_generations or objective are not this run's.",
    )
    store_completions: bool = _option(
        True, "Keep prompts and completions in the run's store (output_dir/_rollouts); scores are kept there anyway."
    )
    log_completions: bool = _option(False, "Print a table of completions at each log, and send it to the trackers.")
    log_multimodal: bool = _option(True, "Include images in those tables, in W&B and Trackio.")
    num_completions_to_print: int | None = _option(None, "Rows of the printed table; unset: all.")
    log_unique_prompts: bool = _option(False, "One row per prompt in the tables.")

    # transformers' continuous batching
    use_transformers_continuous_batching: bool = _option(False, "Generate with transformers' own engine.")
    transformers_continuous_batching_config: dict | str | None = _option(None, "Options of that engine.")
    use_transformers_paged: bool = _option(False, "Older name of `use_transformers_continuous_batching`.")

    def __post_init__(self) -> None:
        if self.auto_find_batch_size:  # type: ignore[has-type]  # transformers would restart training with smaller batches, cutting groups apart
            logger.warning(
                "auto_find_batch_size: micro-batches shrink by themselves here, and batches stay as they are"
            )
            self.auto_find_batch_size = False
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _bf16_is_fast(self.use_cpu)
        if self.bf16 and not torch.accelerator.is_available():  # transformers wants to be told that there is no GPU
            self.use_cpu: bool = True
        if self.bf16 and self.use_cpu:
            make_bfloat16_safe()
        super().__post_init__()
        self.translate_older_names()
        self._resolve_padding()
        self._resolve_objective()
        self._resolve_batches()
        self._check_sampling()
        self._check_unsupported()
        self._check_rewards()
        self._check_contest()
        self.finish_older_names()

    # -- resolution: what was left open gets its value

    def _resolve_padding(self) -> None:
        if self.pad_to_multiple_of in ("auto", None, "none", "null"):
            self.pad_to_multiple_of = None
        else:
            self.pad_to_multiple_of = int(self.pad_to_multiple_of)

    def _resolve_batches(self) -> None:
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
        in_groups = self.choices.advantage_estimator in ("leave_one_out", "group_mean", "group_mean_std")
        if self.num_generations < (2 if in_groups else 1):
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

    def _resolve_objective(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)
        preset = OBJECTIVES[self.objective]
        chosen = {name: getattr(self, name) for name in Objective.names()}
        chosen = {name: getattr(preset, name) if value is None else value for name, value in chosen.items()}
        for name in ("dual_clip", "advantage_clip"):
            chosen[name] = chosen[name] or None
        chosen["normalize_rewards"] = None if chosen["normalize_rewards"] == "off" else chosen["normalize_rewards"]
        self.choices = Objective(**chosen)
        check_choice("advantage_estimator", self.choices.advantage_estimator, ESTIMATORS)
        check_choice("kl_estimator", self.choices.kl_estimator, ("k1", "k2", "k3", "full"))
        check_choice("kl_placement", self.choices.kl_placement, KL_PLACEMENTS)
        check_choice("ratio_level", self.choices.ratio_level, RATIO_LEVELS)
        check_choice("surrogate", self.choices.surrogate, SURROGATES)
        check_choice("loss_aggregation", self.choices.loss_aggregation, AGGREGATIONS)
        if self.normalize_rewards is not None:
            check_choice("normalize_rewards", self.normalize_rewards, ("batch", "running", "off"))
        if self.length_regularization is not None:
            check_choice("length_regularization", self.length_regularization, ("linear", "soft_overlong"))
        self._check_truncation()
        self._check_objective()

    @property
    def truncation(self) -> str:
        """What happens to truncated completions: keep, mask or exclude."""
        return self.truncated_completions or ("mask" if self.mask_truncated_completions else "keep")

    def _check_truncation(self) -> None:
        check_choice("truncated_completions", self.truncation, ("keep", "mask", "exclude"))
        if self.mask_truncated_completions and self.truncation == "keep":
            raise ConfigError(
                'mask_truncated_completions=True and truncated_completions="keep" contradict each other; '
                "give one of them"
            )

    def _check_objective(self) -> None:
        if (self.epsilon_high is not None and self.epsilon_high < 0) or self.epsilon < 0:
            raise ConfigError("epsilon and epsilon_high must not be negative")
        if self.choices.kl_placement.startswith("reward_tokens") and self.choices.ratio_level == "sequence":
            raise ConfigError(
                f'kl_placement="{self.choices.kl_placement}" gives each token its own advantage, which a ratio per '
                'completion cannot use; set ratio_level="token" or kl_placement="reward"'
            )
        if self.sync_ref_model and not self.beta:
            raise ConfigError(
                "sync_ref_model=True needs a reference, and with beta=0.0 there is none; set beta above 0 or "
                "sync_ref_model=False"
            )
        if self.reward_clip_range is not None and not self.reward_clip_range[0] < self.reward_clip_range[1]:
            raise ConfigError(f"reward_clip_range must be (min, max), not {self.reward_clip_range}")
        self._check_ranges()
        self._check_without_effect()
        self._hint_unsound_kl()

    def _check_ranges(self) -> None:
        rules = {
            "max_seq_length": (
                self.max_seq_length is None or self.max_seq_length > self.max_completion_length,
                f"above max_completion_length ({self.max_completion_length}), so that there is room for a prompt",
            ),
            "num_iterations": (self.num_iterations >= 1, "at least 1"),
            "dynamic_sampling": (self.dynamic_sampling >= 0, "0 (off) or positive"),
            "beta": (self.beta >= 0, "0 (no KL) or positive"),
            "dual_clip": (not self.dual_clip or self.dual_clip > 1, "0 (off) or above 1"),
            "advantage_clip": (not self.advantage_clip or self.advantage_clip > 0, "0 (off) or positive"),
            "baseline_momentum": (0 <= self.baseline_momentum < 1, "in [0, 1)"),
            "length_margin": (
                self.length_margin is None or 0 < self.length_margin <= self.max_completion_length,
                "between 1 and max_completion_length",
            ),
        }
        for name, (holds, what) in rules.items():
            if not holds:
                raise ConfigError(f"{name} must be {what}, not {getattr(self, name)}")

    def _check_without_effect(self) -> None:
        """An option that the others leave without effect is refused rather than ignored."""
        needs = {
            "epsilon": (self.choices.surrogate == "clip", 'surrogate="clip"'),
            "epsilon_high": (self.choices.surrogate == "clip", 'surrogate="clip"'),
            "dual_clip": (self.choices.surrogate == "clip", 'surrogate="clip"'),
            "baseline_momentum": (
                self.choices.advantage_estimator == "moving_average",
                'advantage_estimator="moving_average"',
            ),
            "length_coefficient": (self.length_regularization is not None, "length_regularization"),
            "length_margin": (self.length_regularization == "soft_overlong", 'length_regularization="soft_overlong"'),
        }
        defaults = {f.name: f.default for f in fields(self)}
        for name, (holds, what) in needs.items():
            if name in self._given and getattr(self, name) != defaults[name] and not holds:
                raise ConfigError(f"`{name}` has no effect without {what}: leave it out, or set that too")

    def _hint_unsound_kl(self) -> None:
        if not self.beta and self._given & {"kl_estimator", "kl_placement"}:
            logger.warning("beta is 0: `kl_estimator` and `kl_placement` have no effect")
        in_loss = self.choices.kl_placement == "loss"
        if self.beta and in_loss == (self.choices.kl_estimator == "k1"):
            where = "loss" if in_loss else "reward"
            sound = '"k2" or "full"' if in_loss else '"k1"'
            logger.warning(
                'kl_estimator="%s" in the %s does not give the gradient of the KL (docs/algorithms.md says what it '
                "gives); %s does",
                self.choices.kl_estimator,
                where,
                sound,
            )

    def to_dict(self) -> dict[str, Any]:
        """As TrainingArguments', which takes `stop_token` for a secret and masks it."""
        return {**super().to_dict(), "stop_token": self.stop_token}

    # -- refusals

    def _check_sampling(self) -> None:
        check_sampling({name: getattr(self, name) for name in RULES})
        if self.temperature <= 0:  # what can be sampled with need not teach anything
            raise ConfigError(
                f"temperature must be above 0, not {self.temperature}: at 0 all completions of a prompt are the same "
                "and there is nothing to compare"
            )

    @property
    def instead_of_error(self) -> str | float:
        """`on_reward_error` as a number where it is one (a command line gives text)."""
        if self.on_reward_error in ("raise", "none"):
            return self.on_reward_error
        try:
            value = float(self.on_reward_error)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            hint = did_you_mean(str(self.on_reward_error), ("raise", "none"), cutoff=0.5)
            raise ConfigError(
                f'on_reward_error must be "raise", "none" or a finite number, not {self.on_reward_error!r}{hint}'
            )
        return value

    def _check_rewards(self) -> None:
        _ = self.instead_of_error
        for name in ("reward_time_limit", "reward_workers", "reward_concurrency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")

    def _check_contest(self) -> None:
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
                raise ConfigError(f"`{name}` has no effect without eval_judge_model: leave it out, or set that too")

    def _check_unsupported(self) -> None:
        if str(self.optim).rsplit(".", 1)[-1].lower() in ("lomo", "adalomo"):
            raise ConfigError(
                "LOMO updates weights inside the backward pass, which an update of several micro-batches cannot do; "
                'set optim="adamw_torch"'
            )
        if self.engine is not None:
            check_choice("engine", self.engine, ENGINES)
        resolve_vllm(self, given=self._given)
        if self.merge_generation and self.engine not in (None, "native"):
            raise ConfigError(f"`merge_generation` has no effect with engine={self.engine!r}: leave one of them out")
        if self.use_transformers_continuous_batching or self.use_transformers_paged:
            raise ConfigError(
                "use_transformers_continuous_batching=True: rloom's own engine batches continuously; leave it False "
                "and set engine='native'"
            )
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ConfigError("context and sequence parallelism are not supported; set cp_size=1 and sp_size=1")


def _nearest(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, in words."""
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    return f"the nearest that is: {above}" if not below else f"the nearest that are: {below} and {above}"


def _bf16_is_fast(use_cpu: bool) -> bool:
    """Whether bfloat16 autocast pays on the device that training will run on.

    On a CPU without native bfloat16 it is several times slower than float32 (docs/architecture.md has the number),
    and on GPUs before Ampere it is emulated; TRL turns it on everywhere.
    """
    if use_cpu or not torch.accelerator.is_available():
        return False
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
