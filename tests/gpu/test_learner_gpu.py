"""On an NVIDIA GPU: packed flash attention in bfloat16 is no further from float32 than the padded path is."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BASE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
CONFIGS = {
    "qwen2": lambda: tf.Qwen2Config(**BASE, num_attention_heads=8, num_key_value_heads=2),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**BASE, num_attention_heads=1, rotary_pct=0.25),  # head dimension 256
    "mistral, window": lambda: tf.MistralConfig(
        **BASE, num_attention_heads=8, num_key_value_heads=2, sliding_window=64
    ),
    "gemma2": lambda: tf.Gemma2Config(
        **BASE, num_attention_heads=8, num_key_value_heads=2, head_dim=32, sliding_window=64
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **BASE, num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_local_experts=4, sliding_window=4096
    ),
}


def make_rollout():
    from rloom.types import Rollout

    draw = random.Random(0)
    prompts, completions, groups = [], [], []
    for group in range(4):
        tokens = [draw.randrange(512) for _ in range(draw.randint(5, 300))]
        for _ in range(draw.randint(1, 6)):
            prompts.append(tokens)
            completions.append([draw.randrange(512) for _ in range(draw.randint(1, 200))])
            groups.append(group)
    count = len(groups)
    return Rollout(
        prompt_ids=prompts, completion_ids=completions, groups=torch.tensor(groups),
        scores=torch.zeros(count, 1), score=torch.zeros(count), trained=[True] * count,
    )  # fmt: skip


def run(model, rollout, packed):
    from rloom.data.batching import Batcher
    from rloom.models.attention import packed_attention, running
    from rloom.models.logprobs import Forward

    model.zero_grad()
    batch = Batcher(packed=packed, pad_token_id=0).make(rollout, range(len(rollout)), torch.device("cuda"))
    forward = Forward(model, 1.0)

    def step():
        flat = forward(model, batch).logprobs.flatten()[batch.flat]
        weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(0)).cuda()
        (flat * weights).sum().backward()
        return flat.detach().float(), {
            n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None
        }

    if not packed:
        return step()
    with packed_attention([model]), running(batch.packed):
        return step()


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_is_as_close_to_float32_as_padded(name):
    torch.manual_seed(0)
    exact = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        for p in exact.parameters():
            if p.dim() > 1:
                p.mul_(3)
            p.copy_(p.bfloat16().float())
    import copy

    half = copy.deepcopy(exact).bfloat16()
    rollout = make_rollout()
    truth, true_grads = run(exact, rollout, packed=False)
    padded, padded_grads = run(half, rollout, packed=False)
    packed, packed_grads = run(half, rollout, packed=True)
    error = lambda x: float((x - truth).abs().mean())  # noqa: E731
    print(f"{name}: log-probabilities off by {error(packed):.2e} packed, {error(padded):.2e} padded")
    assert error(packed) < 1.1 * error(padded) + 1e-4
    for parameter, gradient in true_grads.items():
        scale = gradient.abs().max() + 1e-6
        ours = float((packed_grads[parameter] - gradient).abs().mean() / scale)
        theirs = float((padded_grads[parameter] - gradient).abs().mean() / scale)
        assert ours < 1.5 * theirs + 1e-4, (parameter, ours, theirs)


def test_float32_on_the_gpu_takes_the_two_part_form():
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), dtype=torch.float32).cuda().eval()
    rollout = make_rollout()
    (a, _), (b, _) = run(model, rollout, packed=True), run(model, rollout, packed=False)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_bfloat16_gradients_accumulate_in_float32():
    from rloom.models.precision import SplitAdamW, accumulate_in_float32

    weight = torch.nn.Parameter(torch.ones(1000, 1000, device="cuda", dtype=torch.bfloat16))
    accumulate_in_float32([weight])
    for _ in range(3):
        (weight * 1e-3).sum().backward()
    assert weight.grad.dtype == torch.float32
    optimizer = SplitAdamW([weight], lr=1e-5, weight_decay=0.0)
    for _ in range(500):
        weight.grad = torch.ones(1000, 1000, device="cuda")
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(0.995, abs=0.002)
