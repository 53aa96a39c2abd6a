"""Tests with the real vLLM, on a CPU or a GPU. Models are random and tiny, made on the spot."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; its default takes a share of the machine

import pytest
import torch

from rloom.generation import Sampling
from rloom.types import Prompt
from tests.conftest import make_model, make_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32: smaller ones vLLM's attention on a CPU does not know."""


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed: make test-vllm has an environment with it"
        for item in items:
            if "tests/vllm/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


def tiny(seed: int = 0, **changes):
    """A llama whose heads vLLM knows."""
    return make_model(seed, **(SIZES | changes)).to(DEVICE)


def sampling(**changes):
    options = {"max_completion_length": 10, "eos_token_ids": (2,), "pad_token_id": 0}
    return Sampling(**(options | changes))


def prompts(*texts):
    tokenizer = make_tokenizer()
    return [
        Prompt(content=text, token_ids=tokenizer(text)["input_ids"]) for text in texts or ("ab", "hello there, you")
    ]


def in_order(engine, some, count=2, seed=0):
    """Groups in the order of the prompts."""
    groups = {id(group.prompt): group.completions for group in engine.generate(some, count, seed=seed)}
    return [groups[id(prompt)] for prompt in some]


@torch.no_grad()
def plain_logprobs(model, prompt, completion, temperature=1.0):
    """Of a completion's tokens, by a forward over prompt and completion."""
    model.eval()
    ids = torch.tensor([prompt.token_ids + completion.token_ids], device=DEVICE)
    start = len(prompt.token_ids) - 1
    logits = model(input_ids=ids).logits[0, start:-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, start + 1 :, None])[:, 0].tolist()


def assert_drawn_from(model, some, groups, temperature=1.0, tolerance=1e-4):
    """What the engine says of its tokens is what the model says of them."""
    for prompt, group in zip(some, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt, completion, temperature)
            assert completion.logprobs == pytest.approx(expected, abs=tolerance)
