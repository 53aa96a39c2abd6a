"""Options: TRL's defaults, near misses, batch arithmetic, presets."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser

import rloom.config
from rloom import RLOOConfig
from rloom.config.topic import parsed
from rloom.errors import ConfigError, MissingExtraError, UnknownOptionError


def make(**options) -> RLOOConfig:
    return RLOOConfig(**({"output_dir": "out", "report_to": "none", "use_cpu": True} | options))


def test_every_option_of_trl_is_there_with_its_default():
    trl = pytest.importorskip("trl")
    theirs = trl.RLOOConfig("out", report_to="none", use_cpu=True)
    ours = make()
    differing = {
        f.name: (getattr(theirs, f.name), getattr(ours, f.name))
        for f in dataclasses.fields(theirs)
        if getattr(theirs, f.name) != getattr(ours, f.name)
    }
    # On a CPU bfloat16 autocast is several times slower than float32; TRL turns it on everywhere.
    # Where None is "as the objective says", which is TRL's choice by default.
    assert differing == {"bf16": (True, False), "normalize_advantages": (False, None)}
    assert ours.choices.normalize_advantages is False


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("betta", "beta"), ("num_generation", "num_generations"), ("learning_rat", "learning_rate")]
)
def test_unknown_option_names_the_nearest(wrong, nearest):
    with pytest.raises(UnknownOptionError, match=f"'{wrong}'; did you mean '{nearest}'"):
        make(**{wrong: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "at least 2 generations"),
        ({"num_generations": 3}, r"divisible by num_generations \(3\).*the nearest that are: 6 and 9"),
        ({"num_generations": 16}, "the nearest that is: 16"),
        ({"generation_batch_size": 12}, "divisible by the global batch size .8.: the nearest that are: 8 and 16"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "can not be both configured"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be .* not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"objective": "tlr"}, "did you mean 'trl'"),
        ({"advantage_estimator": "leave_one"}, "did you mean 'leave_one_out'"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"kl_placement": "los"}, "did you mean 'loss'"),
        ({"normalize_rewards": "yes"}, "normalize_rewards"),
        ({"length_regularization": "quadratic"}, "length_regularization"),
        ({"truncated_completions": "drop"}, "truncated_completions"),
        ({"kl_placement": "reward_tokens"}, 'ratio_level="token"'),
        ({"dual_clip": 0.5}, "dual_clip must be 0 .off. or above 1"),
        ({"advantage_clip": -1.0}, "advantage_clip"),
        ({"baseline_momentum": 3.0, "advantage_estimator": "moving_average"}, "baseline_momentum"),
        ({"length_margin": -1, "length_regularization": "soft_overlong"}, "length_margin"),
        ({"beta": -1.0}, "beta"),
        ({"objective": "paper", "epsilon": 0.1}, "`epsilon` has no effect without surrogate"),
        ({"baseline_momentum": 0.5}, "no effect without advantage_estimator"),
        ({"length_coefficient": 0.5}, "no effect without length_regularization"),
        ({"normalize_reward": True, "whiten_rewards": False}, "not both"),
        ({"reward_clip_range": (1.0, -1.0)}, "reward_clip_range"),
        ({"sync_ref_model": True, "beta": 0.0}, "sync_ref_model"),
        ({"mask_truncated_completions": True, "truncated_completions": "keep"}, "contradict"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        (
            {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 3},
            "divisible by the number of generations",
        ),
        ({"stop_token": "."}, "stop_token"),
    ],
)
def test_bad_options_are_refused_with_what_to_change(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", "learning_rate"),
        ("max_new_tokens", "max_completion_length"),
        ("batch_size", "per_device_train_batch_size"),
        ("group_size", "num_generations"),
        ("max_prompt_length", "prompts are not cut"),
    ],
)
def test_names_of_other_trainers_are_understood(name, meant):
    with pytest.raises(UnknownOptionError, match=meant):
        make(**{name: 1})


def test_one_completion_per_prompt_without_a_group_baseline():
    assert make(objective="reinforce++", num_generations=1).num_generations == 1


def test_auto_find_batch_size_is_the_token_budgets_business(caplog):
    assert make(auto_find_batch_size=True).auto_find_batch_size is False
    assert "micro-batches shrink by themselves" in caplog.text


def test_batch_arithmetic():
    config = make(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_generations=4)
    assert (config.steps_per_generation, config.generation_batch_size) == (3, 12)
    config = make(per_device_train_batch_size=4, generation_batch_size=16, num_generations=4)
    assert config.steps_per_generation == 4
    again = make(**{k: getattr(config, k) for k in ("per_device_train_batch_size", "generation_batch_size",
                                                    "steps_per_generation", "num_generations")})  # fmt: skip
    assert again.generation_batch_size == 16


def test_presets_and_overrides():
    choices = make(objective="reinforce++").choices
    assert choices.advantage_estimator == "none"
    assert choices.normalize_advantages is True
    assert choices.reward_clip_range == (-10.0, 10.0)
    choices = make(objective="reinforce++", normalize_advantages=False, normalize_rewards="off").choices
    assert choices.normalize_advantages is False
    assert choices.normalize_rewards is None
    assert make(objective="verl").choices.dual_clip == 3.0
    assert make(objective="verl", dual_clip=0).choices.dual_clip is None
    assert make(objective="openrlhf").choices.advantage_clip == 10.0
    assert make(objective="paper").choices.surrogate == "reinforce"
    assert make(mask_truncated_completions=True).truncation.name == "mask"


def test_a_config_can_be_changed_subclassed_and_written_out():
    assert dataclasses.replace(make(), objective="verl").choices == make(objective="verl").choices
    assert RLOOConfig(**make(beta=0.2).to_dict()).beta == 0.2

    @dataclasses.dataclass
    class Mine(RLOOConfig):
        extra: int = 3

    mine = Mine("out", report_to="none", use_cpu=True, kl_coef=0.1, extra=4)
    assert (mine.beta, mine.extra) == (0.1, 4)
    with pytest.raises(UnknownOptionError, match="did you mean 'extra'"):
        Mine("out", exrta=4)


@pytest.mark.parametrize(
    ("estimator", "placement", "sound"),
    [
        ("k1", "reward", True),
        ("full", "reward", False),
        ("k3", "reward", False),
        ("k1", "loss", False),
        ("k2", "loss", True),
    ],
)
def test_an_unsound_kl_is_told(estimator, placement, sound, caplog):
    make(kl_estimator=estimator, kl_placement=placement)
    assert ("does not give the gradient of the KL" in caplog.text) != sound


# -- the names of older documents


@pytest.mark.parametrize(
    ("older", "value", "name", "became"),
    [
        ("rloo_k", 4, "num_generations", 4),
        ("kl_coef", 0.1, "beta", 0.1),
        ("kl_coeff", 0.1, "beta", 0.1),
        ("cliprange", 0.3, "epsilon", 0.3),
        ("num_ppo_epochs", 2, "num_iterations", 2),
        ("num_mini_batches", 2, "steps_per_generation", 2),
        ("response_length", 53, "max_completion_length", 53),
        ("train_batch_size", 32, "gradient_accumulation_steps", 4),
        ("normalize_reward", True, "normalize_rewards", "batch"),
        ("whiten_rewards", True, "normalize_rewards", "batch"),
        ("normalize_advantage", True, "normalize_advantages", True),
        ("token_level_kl", True, "kl_placement", "reward_tokens"),
        ("token_level_kl", False, "kl_placement", "reward"),
        ("total_episodes", 100, "max_steps", 13),
        ("missing_eos_penalty", 1.0, "missing_eos_penalty", 1.0),
    ],
)
def test_older_name(older, value, name, became):
    assert getattr(make(**{older: value}), name) == became


@pytest.mark.parametrize(
    ("older", "present"),
    [
        ({"rloo_k": 4}, {"num_generations": 4}),
        ({"kl_coef": 0.1}, {"beta": 0.05}),  # even where the present name is given its default
        ({"kl_coef": 0.1}, {"kl_coeff": 0.1}),
        ({"cliprange": 0.1}, {"epsilon": 0.2}),
        ({"total_episodes": 100}, {"max_steps": 5}),
        ({"num_mini_batches": 2}, {"steps_per_generation": 2}),
        ({"train_batch_size": 16}, {"gradient_accumulation_steps": 2}),
        ({"normalize_reward": True}, {"normalize_rewards": "running"}),
        ({"token_level_kl": True}, {"kl_placement": "reward"}),
    ],
)
def test_both_names_are_an_error(older, present):
    with pytest.raises(ConfigError, match="not both"):
        make(**older, **present)


def test_total_episodes_counts_completions_over_passes_and_mini_batches():
    # 64 completions a rollout, 1000 in all: 16 rollouts of 2 passes × 4 mini-batches
    config = make(per_device_train_batch_size=16, num_mini_batches=4, num_ppo_epochs=2, total_episodes=1000)
    assert config.generation_batch_size == 64
    assert config.max_steps == 16 * 8


def test_an_older_name_is_noted_once(caplog):
    from rloom.config import older_names

    older_names._noted.discard("rloo_k")
    make(rloo_k=4)
    make(rloo_k=4)
    assert caplog.text.count("`rloo_k` is an older name") == 1


def test_command_line_accepts_present_and_older_names():
    parser = HfArgumentParser(RLOOConfig)
    arguments = "--output_dir out --report_to none --use_cpu --kl_coef 0.03 --total_episodes 80 --num_generations 4"
    (config,) = parser.parse_args_into_dataclasses(arguments.split())
    assert (config.beta, config.max_steps, config.num_generations) == (0.03, 10, 4)
    with pytest.raises(ConfigError, match="not both"):
        parser.parse_args_into_dataclasses([*arguments.split(), "--beta", "0.1"])


def test_fsdp_may_be_a_text_as_flags_give_it(caplog):
    assert [make(fsdp=text).fsdp for text in ("true", "True", "1")] == [True] * 3
    assert not any(make(fsdp=text).fsdp for text in ("false", "no", "", None, False))
    with pytest.raises(ConfigError, match="fsdp must be true or false, not treu; fsdp_config has"):
        make(fsdp="treu")
    config = make(fsdp="shard_grad_op")
    assert config.fsdp is True
    assert config.fsdp_config["reshard_after_forward"] is False


def test_checkpointing_beside_fsdp_is_no_reason_to_warn(monkeypatch):
    warned = []
    monkeypatch.setattr("transformers.training_args.logger.warning", lambda text, *args: warned.append(text))
    config = make(fsdp=True, gradient_checkpointing=True)
    assert config.gradient_checkpointing
    assert config.fsdp_plugin_args["fsdp_version"] == 2
    assert not [text for text in warned if "activation_checkpointing" in text]


def test_deepspeed_that_cannot_be_had_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"not installed: pip install .deepspeed>=0\.19\.8"):
        make(deepspeed="zero3.json")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(MissingExtraError, match=r"not installed: pip install .deepspeed>=0\.19\.8"):
        make()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=r"there is no file .*nope\.json"):
        make(deepspeed=str(tmp_path / "nope.json"))
    with pytest.raises(ConfigError, match="leave one of them out"):
        make(deepspeed="zero3.json", fsdp=True)


@pytest.mark.parametrize("flag", ["true", "1"])
def test_deepspeed_is_not_left_out_in_silence(flag, monkeypatch, tmp_path):
    """As accelerate does where the environment tells it to use the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", flag)
    assert make(use_cpu=True).deepspeed is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    left_out = r"accelerate leaves it out .* ACCELERATE_USE_CPU: unset that, and set RLOOConfig\(use_cpu=True\)"
    with pytest.raises(ConfigError, match=left_out):
        make(deepspeed=str(tmp_path / "zero3.json"))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=left_out):
        make(use_cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    with pytest.raises(ConfigError, match=r"there is no file .*zero3\.json"):
        make(deepspeed=str(tmp_path / "zero3.json"))


def test_saved_arguments_are_loaded_by_the_name_they_were_saved_under(tmp_path):
    """Checkpoints hold them as a pickle, which names module and class."""
    assert (RLOOConfig.__module__, RLOOConfig.__qualname__) == ("rloom.config", "RLOOConfig")
    torch.save(make(objective="verl", truncated_completions="mask"), tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.choices.dual_clip == 3.0
    assert loaded.truncation.name == "mask"


def test_the_config_imports_nothing_that_imports_it():
    """All parts may import the config. It knows the tables of the formulas, and what a CPU can do."""
    below = ("config", "algo", "errors", "printable", "sampling_rules", "cpu_bfloat16")
    allowed = tuple(f"rloom.{name}" for name in below)
    for file in Path(rloom.config.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rloom"):
                assert node.module.startswith(allowed), f"{file.name}: {node.module}"


def test_an_older_name_beside_a_present_one_that_is_explicitly_unset():
    config = RLOOConfig("out", use_cpu=True, token_level_kl=True, ratio_level=None)
    assert (config.kl_placement, config.ratio_level) == ("reward_tokens", "token")


def test_further_options_that_are_no_json_object_are_refused():
    with pytest.raises(ConfigError, match="no JSON object"):
        parsed("abc")


@pytest.mark.parametrize(
    ("launched", "options", "expected"),
    [
        ("no", {}, "no"),
        ("no", {"bf16": True}, "bf16"),
        ("bf16", {}, "bf16"),
        ("fp16", {}, "fp16"),
        ("fp16", {"bf16": True}, "bf16"),
    ],
)
def test_the_launchers_precision_holds_where_none_is_set(launched, options, expected, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    config = make(**options)
    assert (config.bf16, config.fp16) == (expected == "bf16", expected == "fp16")
    assert config.mixed_precision == expected


@pytest.mark.parametrize(
    ("launched", "message"),
    [("bf16", 'bf16=False.*mixed_precision: bf16.*"no" there'), ("fp8", "fp8 is not supported")],
)
def test_a_precision_that_the_launcher_would_force_is_refused(launched, message, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    with pytest.raises(ConfigError, match=message):
        make(bf16=False)
