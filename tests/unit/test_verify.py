"""What the self-checks share: evaluation mode, the plain forward, the difference, what a kernel may be off by."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from rloom.models.model_checks import why_not_packed
from rloom.models.verify import (
    Tolerance,
    accepted,
    accepted_by,
    agrees,
    difference,
    evaluating,
    largest_difference,
    plain_logits,
    probe_length,
    probe_tokens,
    raise_in_step,
)

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=11))


def test_evaluation_mode_ends_with_an_error_too():
    model = llama().train()
    with contextlib.suppress(ValueError), evaluating(model):
        assert not model.training
        raise ValueError
    assert model.training
    with evaluating(model.eval()):
        pass
    assert not model.training


class WithoutOptions(GPT2LMHeadModel):
    """A forward that knows tokens alone."""

    def forward(self, input_ids):
        return super().forward(input_ids)


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [llama, lambda: WithoutOptions(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=16))],
    ids=["llama", "without options"],
)
def test_plain_logits_are_those_that_predict_the_completion_and_one_more(make):
    model = make().eval()
    logits = plain_logits(model, [1, 2, 3], [4, 5])
    expected = model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 2:]
    assert logits.shape == (3, 11)
    torch.testing.assert_close(logits, expected)


def test_arguments_that_a_forward_does_not_take_are_left_out():
    assert accepted(llama(), use_cache=False, logits_to_keep=2, nonsense=1) == {"use_cache": False, "logits_to_keep": 2}
    assert accepted(nn.Linear(2, 2), use_cache=False) == {}


def test_a_difference_that_is_no_number_is_not_forgotten():
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert math.isnan(difference(bad, good))
    assert math.isnan(difference(good, bad))
    assert math.isnan(largest_difference([good, bad, good], [good, good, good]))
    assert largest_difference([good, 2 * good], [good, good]) == 1.0


def test_the_probe_prompt_crosses_the_window_within_the_positions():
    config = LlamaConfig(vocab_size=11, max_position_embeddings=64)
    assert probe_length(config, usual=24, window=0) == 24
    assert probe_length(config, usual=72, window=0) == 32
    assert probe_length(config, usual=24, window=40) == 48
    assert probe_tokens(config, 3, 5) == probe_tokens(config, 3, 5)
    assert all(0 <= token < 11 for tokens in probe_tokens(config, 100) for token in tokens)


def test_a_kernel_that_fails_or_is_wrong_is_told(caplog):
    def fails():
        raise RuntimeError("no such instruction")

    assert not agrees(fails, "done in torch")
    assert "done in torch: the kernel fails (no such instruction)" in caplog.text
    off = 1 + 2 * Tolerance.KERNEL
    assert not agrees(lambda: (off * torch.ones(3), torch.ones(3)), "done in torch")
    assert "done in torch: the kernel is off by 4.0e-02" in caplog.text
    assert not agrees(lambda: (torch.full((3,), math.nan), torch.ones(3)), None)


def test_a_forward_that_somebody_put_in_place_is_asked_what_it_takes():
    model = llama()
    assert "logits_to_keep" in accepted_by(model)
    own = model.forward
    model.forward = lambda input_ids, position_ids=None, **kwargs: own(input_ids=input_ids, **kwargs)
    assert "logits_to_keep" not in accepted_by(model)


def test_layers_that_are_checkpointed_in_evaluation_too_are_counted_once():
    """Their backward runs them again: attention calls are counted before it."""
    model = llama()
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    assert why_not_packed(model) is None


@pytest.mark.parametrize("in_parts", [False, True])
def test_memory_that_runs_out_while_others_wait_is_no_verdict(in_parts):
    """Each forward of weights in parts, here by DeepSpeed's ZeRO-3, gathers them from all processes."""
    model, error = nn.Linear(2, 2), torch.OutOfMemoryError("none left")
    if in_parts:
        model.weight.ds_id = 0
    raise_in_step(model, ValueError("what no process likes"), "do without")
    with pytest.raises(torch.OutOfMemoryError) if in_parts else contextlib.nullcontext():
        raise_in_step(model, error, "do without")
    assert getattr(error, "__notes__", []) == (
        ["memory ran out while it was tried out how this model can be run; do without"] if in_parts else []
    )
