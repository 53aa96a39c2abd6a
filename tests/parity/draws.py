"""Runs drawn at random for the oracle: options, a model, prompts, a script of completions and rewards.

Draws that the config refuses are avoided here by the rules that docs/algorithms.md gives.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.conftest import LETTERS

EOS, FIRST = 2, 4
LIMIT = 6  # tokens of a completion
PLACEMENTS = ["reward", "reward_tokens", "reward_tokens_after_baseline", "loss"]
ESTIMATORS = ["leave_one_out", "group_mean", "group_mean_std", "batch_mean", "moving_average", "none"]
IN_GROUPS = ESTIMATORS[:3]
CI = [
    11, 14, 21, 26, 29, 30, 46, 74, 80, 91, 101, 102, 110, 131, 139,
    156, 176, 184, 222, 228, 253, 311, 332, 335, 341, 345, 368, 374, 1114, 1162,
    7, 17, 47, 127, 167, 397, 467,
]  # fmt: skip
"""The runs that are always tried: of the first 400, those with the most pairs of choices between them; two that
evaluate between rollouts with a moving average as baseline; one with groups of which nothing is trained on; and some
with tokens that the policy did not draw."""
TINY = {
    "vocab_size": len(LETTERS) + FIRST,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class HashDropout(nn.Dropout):
    """Dropout whose mask is a hash of token and position: the same in every layout, pass and process."""

    def masked(self, hidden, tokens, positions):
        """hidden (B, T, H), tokens and positions (B, T)."""
        if not self.training or self.p == 0:
            return hidden
        units = torch.arange(hidden.shape[-1])
        noise = (tokens[..., None] * 7919 + positions[..., None] * 104729 + units * 1299709 + 17) * 48271 % 2147483647
        return hidden * (noise % 1000 >= 1000 * self.p) / (1 - self.p)


class DroppingLlama(LlamaForCausalLM):
    """A llama with such a dropout behind its embeddings."""

    def __init__(self, config):
        super().__init__(config)
        self.dropped = HashDropout(0.3)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, logits_to_keep=0, **kwargs
    ):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden = self.dropped.masked(self.model.embed_tokens(input_ids), input_ids, position_ids)
        return super().forward(
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


@dataclass
class Draw:
    """One run."""

    number: int
    options: dict[str, Any]
    kind: str  # of the model
    prompts: list[str]
    eval_prompts: list[str]
    rewards: list[Any]
    loses: bool  # whether some completions cannot be had, and some are empty
    stream: bool

    def model(self) -> Any:
        """The same weights at each call."""
        torch.manual_seed(self.number)
        options = {**TINY, "tie_word_embeddings": self.number % 3 == 0}
        if self.kind == "experts":
            config = MixtralConfig(**options, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.02)
            config._experts_implementation = "eager"
            return MixtralForCausalLM(config).double()
        kind = DroppingLlama if self.kind == "dropout" else LlamaForCausalLM
        return kind(LlamaConfig(**options)).double()

    @torch.no_grad()
    def moved(self, model: Any) -> Any:
        """The same model a little further on: a policy that differs from its reference from the start."""
        for parameter in model.parameters():
            parameter += 0.05 * torch.sin(3.0 * torch.arange(parameter.numel(), dtype=parameter.dtype)).view_as(
                parameter
            )
        return model

    def script(self, prompt: str, sample: int, seed: int) -> list[int] | None:
        """The completion of a prompt: some end, some are cut off at the limit, some groups are alike."""
        draw = random.Random(f"{self.number} {prompt} {sample} {seed}")
        if self.loses and sample and draw.random() < 0.2:
            return None
        if random.Random(f"{self.number} {prompt} {seed}").random() < 0.15:
            return [FIRST, FIRST + 4, EOS]
        length = draw.randint(0 if self.loses else 1, LIMIT)
        words = [FIRST + draw.randrange(8) for _ in range(length)]
        return [*words, EOS] if length < LIMIT and length else words

    def sampled(self, tokens: list[int], sample: int) -> list[float]:
        """Log-probabilities that an engine might have given."""
        return [-((token * 31 + sample * 17 + place * 7) % 50) / 16 for place, token in enumerate(tokens)]

    def mask(self, tokens: list[int]) -> list[bool] | None:
        """Which tokens the policy drew: in a tenth of the runs some were put there by others, as a tool's answers are.
        A completion may have none that the policy drew."""
        if self.number % 10 != 7:
            return None
        return [(token * 13 + place * 5 + len(tokens)) % 3 > 0 for place, token in enumerate(tokens)]


def length(completions, **kwargs):
    """A quarter for each character, and more for some of them."""
    return [len(text) / 4 + text.count("c") for text in completions]


def vowels(completions, prompts, **kwargs):
    """Applies to prompts of an even number of characters."""
    pairs = zip(prompts, completions, strict=True)
    return [None if len(p) % 2 else float(sum(c in "aeiou" for c in text)) for p, text in pairs]


def sometimes(completions, **kwargs):
    """No score for completions that begin with a b."""
    return [None if text.startswith("b") else text.count("a") - text.count("d") / 2 for text in completions]


def draw_run(number: int) -> Draw:
    """The run of a number."""
    draw = random.Random(f"oracle {number}")
    kind = draw.choice(["plain", "plain", "plain", "dropout", "experts"])
    options = _objective(draw) | _shaping(draw) | _optimizer(draw)
    options |= _sizes(draw, options, kind)
    stream = draw.random() < 0.2
    prompts = [_prompt(draw, i) for i in range(options.pop("num_prompts"))]
    eval_prompts: list[str] = []
    if draw.random() < 0.3:
        count = draw.choice([1, 2])
        options |= {
            "eval_strategy": "steps",
            "eval_steps": draw.choice([1, 2]),
            "per_device_eval_batch_size": 2 * count,
        }
        options |= {"num_generations_eval": count}
        eval_prompts = [_prompt(draw, i + 100) for i in range(4)]
    options |= _duration(draw, options, len(prompts), stream)
    if draw.random() < 0.5:
        options["shuffle_dataset"] = False
    rewards = draw.choice([[length], [sometimes], [length, vowels], [vowels, sometimes], [length, vowels, sometimes]])
    if len(rewards) > 1 and draw.random() < 0.6:
        options["reward_weights"] = [1.0, *(draw.choice([0.0, 0.5, 1.0, -1.0]) for _ in rewards[1:])]
        draw.shuffle(options["reward_weights"])
    loses = draw.random() < 0.3
    if options["beta"] and number % 3 == 2:
        options |= {"kl_target": 0.04, "kl_target_gain": 1.0}
    return Draw(number, options, kind, prompts, eval_prompts, rewards, loses, stream)


def _duration(draw: random.Random, options: dict[str, Any], num_prompts: int, stream: bool) -> dict[str, Any]:
    """Whole epochs, or a number of updates; few, since rounding grows with each."""
    parts, passes = options["steps_per_generation"], options["num_iterations"]
    rollouts = num_prompts * options["num_generations"] // (options["per_device_train_batch_size"] * parts)
    epochs = draw.choice([1, 2])
    in_epochs = epochs * -(-rollouts * parts * passes // options["gradient_accumulation_steps"])
    if stream or in_epochs > 5 or draw.random() < 0.4:
        return {"max_steps": draw.randint(2, 5)}
    return {"num_train_epochs": epochs}


def _prompt(draw: random.Random, number: int) -> str:
    """Prompts of a data set differ from each other."""
    return f"{number}" + "".join(draw.choice(LETTERS) for _ in range(draw.randint(0, 7)))


def _objective(draw: random.Random) -> dict[str, Any]:
    """Some choices of the objective, consistent with each other."""
    options: dict[str, Any] = {"beta": draw.choice([0.0, 0.05, 0.2, 0.5])}
    ratio = draw.choice(["sequence", "token"])
    surrogate = draw.choice(["clip", "clip", "clip", "reinforce"])
    objective = draw.choice(["trl", "trl", "trl", "paper", "openrlhf", "verl", "reinforce++"])
    options["objective"] = objective
    if objective == "trl":
        options |= {
            "advantage_estimator": draw.choice(ESTIMATORS),
            "kl_estimator": draw.choice(["k1", "k1", "k2", "k3", "full"]),
            "kl_placement": draw.choice(PLACEMENTS if ratio == "token" else ["reward", "loss"]),
            "ratio_level": ratio,
            "surrogate": surrogate,
            "loss_aggregation": draw.choice(["sequence_mean", "sequence_token_mean", "token_mean"]),
            "normalize_advantages": draw.random() < 0.25,
        }
        charged = options["beta"] and options["kl_placement"] != "loss"
        if not charged and options["advantage_estimator"] in IN_GROUPS:
            # The advantages of equal scores are then 0 but for rounding, whose sign a clip would go by.
            options["normalize_advantages"] = False
    else:
        surrogate = "reinforce" if objective == "paper" else "clip"
        if draw.random() < 0.4:
            options["kl_estimator"] = draw.choice(["k1", "k2", "k3", "full"])
    if surrogate == "clip":
        if draw.random() < 0.6:
            options["epsilon"] = draw.choice([0.02, 0.1, 0.3])
        if draw.random() < 0.4:
            options["epsilon_high"] = draw.choice([0.01, 0.05, 0.4])
        if draw.random() < 0.3:
            options["dual_clip"] = draw.choice([0, 1.05, 1.5])
    if draw.random() < 0.25:
        options["advantage_clip"] = draw.choice([0, 0.3, 1.0])
    if options.get("advantage_estimator") == "moving_average":
        options["baseline_momentum"] = draw.choice([0.0, 0.5, 0.9])
    if options["beta"] and draw.random() < 0.25:
        options |= {"sync_ref_model": True, "ref_model_sync_steps": draw.choice([1, 2]), "ref_model_mixup_alpha": 0.4}
    return options


def _shaping(draw: random.Random) -> dict[str, Any]:
    """Penalties, normalisers, clips; what happens to truncated completions.

    Charges for length come out as quarters, as scores do, so that scores that are equal are so in float32 too.
    """
    options: dict[str, Any] = {
        "truncated_completions": draw.choice(["keep", "keep", "mask", "exclude"]),
        "max_completion_length": LIMIT,
        "temperature": draw.choice([1.0, 1.0, 0.7, 1.3]),
    }
    if draw.random() < 0.3:
        options["missing_eos_penalty"] = draw.choice([0.5, 1.0])
    if draw.random() < 0.3:
        options["length_regularization"] = draw.choice(["linear", "soft_overlong"])
        options["length_coefficient"] = draw.choice([1.5, 3.0])
        if options["length_regularization"] == "soft_overlong":
            options["length_margin"] = draw.choice([1, 2, 4])
    if draw.random() < 0.3:
        options["normalize_rewards"] = draw.choice(["batch", "running", "off"])
    if draw.random() < 0.25:
        options["reward_clip_range"] = draw.choice([(-0.5, 0.75), (0.25, 1.0)])
    return options


def _optimizer(draw: random.Random) -> dict[str, Any]:
    """Rules with an epsilon above rounding: where a gradient is next to 0, its sign is noise."""
    options = draw.choice(
        [
            {"optim": "sgd", "learning_rate": 0.1},
            {"optim": "sgd", "learning_rate": 0.05, "optim_args": "momentum=0.9"},
            {"optim": "adamw_torch", "learning_rate": 0.02, "adam_epsilon": 0.01},
            {"optim": "rmsprop", "learning_rate": 0.01, "optim_args": "eps=0.1"},
        ]
    )
    return options | {
        "weight_decay": draw.choice([0.0, 0.1]),
        "max_grad_norm": draw.choice([0.0, 0.5, 1.0]),
        "lr_scheduler_type": draw.choice(["constant", "linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": draw.choice([0, 1]),
        "seed": draw.choice([42, 7]),
        "logging_steps": draw.choice([1, 1, 2]),
        "log_older_metrics": draw.random() < 0.4,
    }


def _sizes(draw: random.Random, options: dict[str, Any], kind: str) -> dict[str, Any]:
    """How rollouts are cut into parts, updates and micro-batches."""
    estimator = options.get("advantage_estimator", "none" if options["objective"] == "reinforce++" else "leave_one_out")
    count = draw.choice([2, 3, 4] if estimator in IN_GROUPS else [1, 2, 3])
    parts, prompts = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4])
    while prompts * count % parts:
        prompts += 1
    rollouts = draw.choice([1, 2])
    sizes: dict[str, Any] = {
        "num_generations": count,
        "steps_per_generation": parts,
        "per_device_train_batch_size": prompts * count // parts,
        "gradient_accumulation_steps": draw.choice([1, parts, parts, parts + 1]),
        "num_iterations": draw.choice([1, 1, 2, 3]),
        "num_prompts": prompts * rollouts + draw.randrange(prompts),
        "gradient_checkpointing": draw.random() < 0.3,
    }
    if draw.random() < 0.4:
        sizes["packing"] = draw.choice([False, True])
    if kind != "experts" and draw.random() < 0.5:  # a router's loss is taken per micro-batch
        sizes["max_tokens_per_micro_batch"] = draw.choice([1, 20, 60])
    if draw.random() < 0.3:
        sizes["keep_logits"] = True
    if draw.random() < 0.2:
        sizes["pad_to_multiple_of"] = 4
    if options["beta"] and draw.random() < 0.2:
        sizes["offload_reference"] = True
    if kind == "experts" and draw.random() < 0.7:
        sizes["router_aux_loss_coef"] = draw.choice([0.0, 0.5])
    if kind == "dropout" and draw.random() < 0.2:
        sizes["disable_dropout"] = True
    return sizes
