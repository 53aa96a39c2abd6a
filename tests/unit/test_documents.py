"""docs/seeds.md keeps its word: every test and page that it names is there; and what needs no room of its own."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from rloom import RLOOConfig
from rloom.algo import group_mean, leave_one_out

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text()


def named_tests():
    return sorted(set(re.findall(r"\b((?:unit|integration|parity)/test_\w+)(?:::(\w+))?", PAGE)))


@pytest.mark.parametrize(("file", "test"), named_tests())
def test_every_test_that_the_page_names_is_there(file, test):
    path = ROOT / "tests" / f"{file}.py"
    assert path.exists()
    assert not test or f"def {test}(" in path.read_text()


def test_no_line_is_unanswered():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) > 60
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row


def test_the_vectorised_advantage_of_the_older_document():
    """Three prompts with four rewards each, there one prompt per column."""
    reward = torch.tensor([[1.0, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]])
    groups = torch.arange(3).expand(4, 3).flatten()
    found = leave_one_out(reward.flatten(), groups)
    assert found[0].item() == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert found[7].item() == pytest.approx(6 - (2 + 3 + 9) / 3)
    torch.testing.assert_close(found, (reward - (reward.sum(0) - reward) / 3).flatten())


def test_both_columns_of_the_table_of_rloo_and_grpo():
    """The overview's: group size, advantage, KL. RLOO's are the defaults, GRPO's are options."""
    rloo = RLOOConfig("out", use_cpu=True)
    grpo = RLOOConfig("out", use_cpu=True, num_generations=8, beta=0.0, advantage_estimator="group_mean_std")
    assert (rloo.num_generations, rloo.beta, rloo.choices.advantage_estimator) == (2, 0.05, "leave_one_out")
    assert (grpo.num_generations, grpo.beta, grpo.choices.advantage_estimator) == (8, 0.0, "group_mean_std")
    rewards, groups = torch.tensor([1.0, 2, 6]), torch.zeros(3, dtype=torch.long)
    assert leave_one_out(rewards, groups).tolist() == [-3.0, -1.5, 4.5]
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(group_mean(rewards, groups, divide_by_std=True), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_configs_for_deepspeed_ask_for_what_rloom_does(stage):
    """By what they say: accelerate reads them only where DeepSpeed is installed."""
    content = yaml.safe_load((ROOT / f"examples/accelerate_configs/deepspeed_zero{stage}.yaml").read_text())
    assert content["distributed_type"] == "DEEPSPEED"
    assert content["num_processes"] > 1
    assert content["deepspeed_config"]["zero_stage"] == stage
    assert content["deepspeed_config"]["zero3_init_flag"] is False  # models are loaded as a whole


def test_the_config_for_fsdp_asks_for_what_rloom_does(monkeypatch):
    """By the environment that the launcher sets: on a CPU it would start one process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    from rloom.training.sharding_options import asks_to_shard, check_sharding

    path = str(ROOT / "examples/accelerate_configs/fsdp2.yaml")
    asked = launch_command_parser().parse_args(["--config_file", path, "--num_processes", "4", "train.py"])
    asked, _, _ = _validate_launch_command(asked)
    for name, value in prepare_multi_gpu_env(asked).items():
        monkeypatch.setenv(name, value)
    args = SimpleNamespace(
        fsdp=None, fsdp_config=None, optim="adamw_torch_fused", split_weights=None, save_on_each_node=False
    )
    assert asked.num_processes == 4
    assert asks_to_shard(args)
    accelerator = SimpleNamespace(mixed_precision="bf16")
    check_sharding(
        SimpleNamespace(
            args=args, accelerator=accelerator, model=None, optimizer=None, train_dataset=[], eval_dataset=None
        )
    )


def test_the_config_for_several_gpus_is_accelerates_own():
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(ROOT / "examples/accelerate_configs/multi_gpu.yaml"))
    assert found.num_processes > 1
    assert str(found.distributed_type).endswith("MULTI_GPU")
