"""What rounding does to a model is measured before another way to compute it is called wrong."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from rloom.errors import EngineError
from rloom.generation import NativeEngine, Sampling
from rloom.generation.native import proof as native
from rloom.models.model_checks import why_not_packed
from rloom.models.verify import Tolerance, difference, rounded_otherwise

IDS = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(3))


def loud(dtype=torch.bfloat16, layers=24):
    """Gains as large as those of random weights of an 8B model's width: rounding grows from layer to layer."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=448, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=97, initializer_range=0.11,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).to(dtype).eval()


def adapted():
    return get_peft_model(loud(), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def engine_of(model):
    sampling = Sampling(max_completion_length=8, eos_token_ids=(2,), pad_token_id=0)
    return NativeEngine(lambda: model, sampling, merged=True)


@torch.no_grad()
def test_rounding_otherwise_moves_a_model_as_far_as_it_is_from_float32():
    model, exact = loud(), loud(torch.float32)(input_ids=IDS).logits
    plain = model(input_ids=IDS).logits
    with rounded_otherwise(model):
        shaken = [model(input_ids=IDS).logits, model(input_ids=IDS).logits]
    from_float32, own = difference(plain, exact), difference(shaken[0], plain)
    assert from_float32 / 2 < own < 3 * from_float32
    assert not torch.equal(*shaken)  # each forward rounds its own way
    assert torch.equal(model(input_ids=IDS).logits, plain)  # and nothing is left of it


def test_the_native_engine_takes_a_model_whose_own_rounding_is_above_the_usual():
    engine = engine_of(adapted())
    assert Tolerance.DECODED < engine.noise <= 0.3
    assert engine.merged  # merged weights round otherwise, no worse


def test_packed_rows_too(monkeypatch):
    monkeypatch.setattr(Tolerance, "PACKED", 1e-4)  # their usual noise is above it, as that of an 8B model may be
    assert why_not_packed(adapted()) is None


def test_what_is_wrong_is_still_refused(monkeypatch):
    plain = native.plain_logits

    def one_token_is_another(model, prompt, completion, images):
        return plain(model, [*prompt[:-2], prompt[-2] + 1, prompt[-1]], completion, images)

    monkeypatch.setattr(native, "plain_logits", one_token_is_another)
    with pytest.raises(EngineError, match="differs from its plain forward"):
        engine_of(adapted())


def test_float32_has_no_such_measure(monkeypatch):
    monkeypatch.setattr(native, "allowed_difference", lambda *_: pytest.fail("asked"))
    model = loud(torch.float32, layers=2)
    assert engine_of(model).noise == 1e-3
