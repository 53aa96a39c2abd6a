"""What options of speed are where they are left unset, and that the kernels of the start are those that are used."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from rloom.training import tuning, warmup
from tests.conftest import make_model

GPU = torch.device("cuda")


@pytest.fixture
def h200(monkeypatch):
    def operations(device, in_float32):
        return 132 * (tuning.IN_FLOAT32 if in_float32 else 4096) * tuning.CLOCK * tuning.REACHED

    monkeypatch.setattr(tuning, "_operations_per_second", operations)


def model_of(parameters, layers, vocabulary=150_000):
    config = SimpleNamespace(num_hidden_layers=layers, vocab_size=vocabulary)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, num_parameters=lambda exclude_embeddings: parameters)


def test_small_layers_have_large_micro_batches(h200):
    tokens = lambda *size, group=1: tuning.micro_batch_tokens(  # noqa: E731
        model_of(*size), GPU, group=group, checkpointed=True
    )
    assert tokens(358_000_000, 24) == 32_768
    assert tokens(106_000_000, 30) == 32_768
    assert tokens(1_310_000_000, 28) == 16_384
    assert tokens(7_000_000_000, 32) == tuning.LEAST_TOKENS
    assert tokens(7_000_000_000, 32, group=8704) == 8704  # a whole group, where that is not much more
    assert tokens(1_310_000_000, 28, group=8320) == 2 * 8320  # whole groups
    assert tokens(1_310_000_000, 28, group=100_000) == 16_384


def test_activations_that_are_kept_take_the_room_of_tokens(h200):
    plain = tuning.micro_batch_tokens(model_of(106_000_000, 30), GPU, group=1, checkpointed=False)
    assert plain == 8192


def test_float32_keeps_a_gpu_busy_with_fewer_tokens(h200):
    size = model_of(358_000_000, 24)
    assert tuning.micro_batch_tokens(size, GPU, group=2304, checkpointed=True, in_float32=True) == 4 * 2304
    assert tuning.keeps_logits(size, GPU, tokens=4000, trained_share=1.0)
    assert not tuning.keeps_logits(size, GPU, tokens=4000, trained_share=1.0, in_float32=True)


def test_on_a_cpu_nothing_is_asked_of_a_gpu():
    model, cpu = make_model(), torch.device("cpu")
    assert tuning.micro_batch_tokens(model, cpu, group=10, checkpointed=True) == tuning.TOKENS_ON_CPU
    assert not tuning.keeps_logits(model, cpu, tokens=10, trained_share=1.0)


def test_logits_are_kept_where_they_are_few():
    model = model_of(1_000_000_000, 1)
    assert tuning.keeps_logits(model, GPU, tokens=8192, trained_share=1.0)
    assert not tuning.keeps_logits(model, GPU, tokens=32_768, trained_share=1.0)
    assert tuning.keeps_logits(model, GPU, tokens=32_768, trained_share=0.2)
    assert not tuning.keeps_logits(model_of(100_000_000, 1), GPU, tokens=8192, trained_share=1.0)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu")
def test_every_kernel_of_the_start_runs():
    pytest.importorskip("triton")
    args = SimpleNamespace(bf16=False, fp16=False, num_generations=4)
    sizes = warmup.Sizes.of(make_model(), args)
    assert (sizes.heads, sizes.shared, sizes.width, sizes.dtype) == (4, 2, 8, torch.float32)
    tasks = [*warmup._of_attention(sizes), *warmup._of_head(sizes), *warmup._of_layers(sizes)]
    tasks += [*warmup._of_decoding(sizes), lambda: warmup._optimizer(sizes)]
    for task in tasks:
        task()


def test_nothing_is_compiled_where_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(warmup.Sizes, "of", lambda *args: pytest.fail("there is no GPU"))
    warmup.compile_kernels(make_model(), SimpleNamespace(device=torch.device("cpu")))


def test_what_was_chosen_is_said_in_one_line(model, rows, config, tokenizer):
    from rloom import RLOOTrainer

    trainer = RLOOTrainer(model, lambda completions, **kwargs: [0.0] * len(completions), config(), rows,
                          processing_class=tokenizer)  # fmt: skip
    for words in ("in float32", "packed rows of up to 8,192 tokens", "native engine"):
        assert words in trainer.chosen()
    said = dict(trainer.report.start())
    assert said["dtype"] in trainer.chosen()
    assert said["training"] in trainer.chosen()


def test_an_architecture_with_other_sizes_is_no_error(monkeypatch):
    """Heads that are wider than the kernels' tiles, sizes that are lists: nothing is compiled, and nothing raised."""
    monkeypatch.setattr(warmup, "runs_kernels", lambda device: True)
    args = SimpleNamespace(bf16=False, fp16=False, num_generations=4, device=torch.device("cpu"))
    warmup.compile_kernels(make_model(head_dim=512), args)
    config = SimpleNamespace(num_attention_heads=4, hidden_size=32, intermediate_size=[48, 48])
    config.get_text_config = lambda: config
    model = make_model()
    monkeypatch.setattr(warmup, "base_of", lambda model: SimpleNamespace(
        config=config, get_output_embeddings=model.get_output_embeddings
    ))  # fmt: skip
    warmup.compile_kernels(model, args)
