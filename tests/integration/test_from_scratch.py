"""The example that teaches the method in one file does what it says: it computes RLOO, and it learns."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "rloo_from_scratch.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rloo_from_scratch", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_leave_one_out_by_hand(example: ModuleType) -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 1.0], [4.0, 4.0, 4.0]])
    # First row: 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2.
    expected = torch.tensor([[-3.0, -1.5, 4.5], [-0.5, -0.5, 1.0], [0.0, 0.0, 0.0]])
    advantages = example.leave_one_out(rewards)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(3))


def test_score_wants_every_token_and_the_eos(example: ModuleType) -> None:
    eos, pad = example.EOS, example.PAD
    completions = torch.tensor(
        [
            [0, 1, 3, 5, 7, eos, pad],  # right
            [0, 1, 3, 5, 7, 7, eos],  # one digit too many
            [0, 1, 3, 7, 5, eos, pad],  # wrong order
            [0, 1, 3, 5, 7, pad, pad],  # did not stop
        ]
    )
    answers = example.make_answers(torch.tensor([[7, 3, 1, 5, 0]])).expand(4, -1)
    assert example.score(completions, answers).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_it_learns(example: ModuleType) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = example.main(["--steps", "60", "--seed", "0", "--prompts", "16", "--lr", "5e-4"])
    finally:
        torch.set_num_threads(threads)
    assert 0.1 < result["before"] < 0.5
    assert result["after"] > result["before"] + 0.15
    assert result["curve"][-1]["kl"] > 0  # it has left the reference
