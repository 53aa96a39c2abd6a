"""On an NVIDIA GPU: packed flash attention in bfloat16 is no further from float32 than the padded path is."""

from __future__ import annotations

import copy
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


def make_rollout(seed=0):
    from rloom.types import Rollout

    draw = random.Random(seed)
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


def run(model, rollout, packed, autocast=None):
    from rloom.data.batching import Batcher
    from rloom.models.attention import packed_attention, running
    from rloom.models.fused import FusedLayers
    from rloom.models.logprobs import Forward

    model.zero_grad()
    batch = Batcher(packed=packed, pad_token_id=0).make(rollout, range(len(rollout)), torch.device("cuda"))
    forward = Forward(model, 1.0)

    def step():
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            flat = forward(model, batch).logprobs.flatten()[batch.flat]
        weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(0)).cuda()
        (flat * weights).sum().backward()
        return flat.detach().float(), {
            n: p.grad.detach().float() for n, p in model.named_parameters() if p.grad is not None
        }

    if not packed:
        return step()
    with packed_attention([model], FusedLayers([model])), running(batch.packed):
        return step()


def errors_in_bfloat16(name, seed):
    """How far log-probabilities and gradients are from float32's, packed and padded."""
    torch.manual_seed(seed)
    exact = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        for p in exact.parameters():
            if p.dim() > 1:
                p.mul_(3)
            p.copy_(p.bfloat16().float())
    half = copy.deepcopy(exact).bfloat16()
    rollout = make_rollout(seed)
    truth, true_grads = run(exact, rollout, packed=False)
    found = {}
    for packed in (True, False):
        logprobs, grads = run(half, rollout, packed=packed)
        names = [n for n in true_grads if "router" not in n]  # bfloat16 flips a token's experts, in either path
        found[packed] = {n: gradient_error([(grads[n], true_grads[n])]) for n in names}
        found[packed]["all gradients"] = gradient_error([(grads[n], true_grads[n]) for n in names])
        found[packed]["log-probabilities"] = float((logprobs - truth).abs().mean())
    return found[True], found[False]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_is_as_close_to_float32_as_padded(name):
    runs = [errors_in_bfloat16(name, seed) for seed in range(4)]
    ratios = {what: sum(ours[what] / theirs[what] for ours, theirs in runs) / len(runs) for what in runs[0][0]}
    print({what: round(ratio, 3) for what, ratio in ratios.items() if "." not in what}, name)
    assert ratios["log-probabilities"] < 1.03
    assert ratios["all gradients"] < 1.03
    # A single tensor may be of few numbers, and lucky in either path: a sink is eight of them a layer.
    assert {what: ratio for what, ratio in ratios.items() if ratio > 1.3} == {}


def gradient_error(pairs):
    """Of gradients (found, true): the length of the difference, over that of the truth."""
    off = sum(float((found - true).double().square().sum()) for found, true in pairs)
    return (off / sum(float(true.double().square().sum()) for _, true in pairs)) ** 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_on_the_gpu_has_the_padded_paths_gradient(name):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).cuda().eval()
    rollout = make_rollout()
    (a, grads), (b, plain) = run(model, rollout, packed=True), run(model, rollout, packed=False)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert gradient_error([(grads[n], plain[n]) for n in plain]) < 1e-4


def test_bfloat16_gradients_accumulate_in_float32():
    from rloom.models.low_bits import accumulate_in_float32
    from rloom.models.optimizers import SplitAdamW

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


def test_a_step_that_shall_be_skipped_changes_nothing():
    from rloom.models.optimizers import SplitAdamW

    half = torch.nn.Parameter(torch.randn(1000, device="cuda").bfloat16())
    wide = torch.nn.Parameter(torch.randn(1000, device="cuda"))
    optimizer = SplitAdamW([half, wide], lr=0.1)
    for _ in range(2):
        half.grad, wide.grad = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
        optimizer.step()
    look = lambda: [x for p in (half, wide) for x in (p.detach(), *optimizer.state[p].values())]  # noqa: E731
    before = [x.clone() for x in look()]
    half.grad, wide.grad = (torch.full((1000,), float("nan"), device="cuda") for _ in range(2))
    optimizer.skip = torch.ones(1, device="cuda")
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, look(), strict=True) if a.numel() > 1)
    half.grad, wide.grad = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    optimizer.step()
    assert not torch.equal(half.detach(), before[0])


def test_a_gradient_that_is_not_finite_is_not_applied(tmp_path):
    from rloom import RLOOConfig, RLOOTrainer
    from tests.conftest import make_model, make_tokenizer

    calls = []

    def huge_once(completions, **kwargs):
        calls.append(1)
        return [3e38 * (-1) ** i if len(calls) == 2 else float(len(text)) for i, text in enumerate(completions)]

    config = RLOOConfig(str(tmp_path), max_steps=4, per_device_train_batch_size=8, num_generations=4, logging_steps=1,
                        max_completion_length=6, report_to="none", save_strategy="no", learning_rate=1e-3)  # fmt: skip
    rows = [{"prompt": text} for text in ("ab", "hello there", "1+1=", "x")] * 4
    trainer = RLOOTrainer(make_model(), huge_once, config, rows, processing_class=make_tokenizer())
    trainer.train()
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    assert [entry["updates/skipped"] for entry in trainer.state.log_history if "updates/skipped" in entry] == [1.0]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_head_kernels_against_float64(softcap, keep):
    from rloom.models.head import LogitTransform, run_head

    torch.manual_seed(0)
    head = torch.nn.Linear(64, 9001, bias=False).cuda()
    hidden, targets = torch.randn(37, 64, device="cuda", requires_grad=True), torch.randint(9001, (37,), device="cuda")
    t = LogitTransform(scale=0.5, softcap=softcap, temperature=0.8)
    out = run_head(head, head.forward, hidden, targets, t, keep=keep)
    weights = torch.randn(37, device="cuda")
    (out.logprobs * weights).sum().backward()
    h, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    z = h @ w.T * 0.5
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = (z / 0.8).log_softmax(-1)
    (logp.gather(-1, targets[:, None]).squeeze(-1) * weights).sum().backward()
    torch.testing.assert_close(out.logprobs.double(), logp.gather(-1, targets[:, None]).squeeze(-1), rtol=0, atol=2e-3)
    torch.testing.assert_close(out.entropy.double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=2e-3)
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=0, atol=2e-3)
    torch.testing.assert_close(head.weight.grad.double(), w.grad, rtol=0, atol=2e-3)


def test_adamw_kernel_follows_torchs_float32_adamw():
    from rloom.models.low_bits import accumulate_in_float32, join_float32
    from rloom.models.optimizers import SplitAdamW

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1000, 33, device="cuda").bfloat16())
    master = torch.nn.Parameter(weight.detach().float())
    accumulate_in_float32([weight])
    ours = SplitAdamW([weight], lr=1e-4, weight_decay=0.1)
    theirs = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.1)
    for _ in range(50):
        gradient = torch.randn(1000, 33, device="cuda")
        weight.grad, master.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(
        join_float32(weight.detach(), ours.state[weight]["rest"]), master.detach(), rtol=1e-5, atol=1e-6
    )


def test_compiled_layers_agree():
    from rloom.data.batching import Batcher
    from rloom.models.attention import CompiledLayers, packed_attention, running
    from rloom.models.logprobs import Forward

    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), dtype=torch.bfloat16).cuda().eval()
    rollout = make_rollout()
    expected, grads = run(model, rollout, packed=True)
    compiled = CompiledLayers([model])
    batch = Batcher(packed=True, pad_token_id=0).make(rollout, range(len(rollout)), torch.device("cuda"))
    model.zero_grad()
    with packed_attention([model], compiled), running(batch.packed):
        flat = Forward(model, 1.0)(model, batch).logprobs.flatten()[batch.flat]
        weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(0)).cuda()
        (flat * weights).sum().backward()
    assert float((flat.detach().float() - expected).abs().mean()) < 0.02
    for name, gradient in grads.items():
        mine = model.get_parameter(name).grad.float()
        assert float((mine - gradient).abs().mean() / (gradient.abs().mean() + 1e-6)) < 0.2, name


def test_nothing_waits_inside_an_update(tmp_path, tokenizer):
    """Reference pass, micro-batches, advantages: no synchronisation, and no copy from memory that is not pinned."""
    from torch.profiler import ProfilerActivity, profile

    from rloom import FakeEngine, RLOOConfig, RLOOTrainer

    config = RLOOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=16, num_generations=4, max_completion_length=20,
        beta=0.1, max_steps=4, report_to="none", save_strategy="no", disable_tqdm=True, bf16=True,
        max_tokens_per_micro_batch=120,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"](), dtype=torch.bfloat16)
    trainer = RLOOTrainer(
        model, lambda completions, **kwargs: [float(len(c)) for c in completions], config,
        [{"prompt": f"prompt {i}"} for i in range(16)], processing_class=tokenizer,
        engine=FakeEngine(lambda prompt, k, seed: [5 + k, 6, 7 + k] * (k + 1), eos_token_ids=[0]),
    )  # fmt: skip
    copies = []
    for owner, name in ((trainer.assigner, "begin"), (trainer.learner, "accumulate")):
        plain = getattr(owner, name)

        def strict(*args, plain=plain, **kwargs):
            if trainer.state.global_step < 2:  # kernels are compiled, the budget is found
                return plain(*args, **kwargs)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    result = plain(*args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
            copies.extend(event.key for event in seen.key_averages() if "Memcpy" in event.key)
            return result

        setattr(owner, name, strict)
    trainer.train()
    assert any("HtoD" in key for key in copies)
    assert not any("Pageable" in key or "DtoH" in key for key in copies), copies


def test_a_reference_that_follows_loses_nothing_wherever_it_is_kept():
    """bfloat16, a hundredth at a time: on the GPU, in the host's memory, and in float32."""
    from rloom.models.reference import make_reference

    torch.manual_seed(0)
    policy = tf.AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).cuda().bfloat16()
    copies = [make_reference(policy, follows=True, new_adapter=False, other=None, offload=x) for x in (False, True)]
    plain = [p.detach().float() for p in policy.parameters()]
    for _ in range(4):
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.01 * torch.randn_like(p))
        for reference in copies:
            reference.sync(policy, 0.01)
        plain = [0.99 * mine + 0.01 * p.detach().float() for mine, p in zip(plain, policy.parameters(), strict=True)]
    here, there = ([x.weights.value(name) for name in x.weights.weights] for x in copies)
    for a, b, expected in zip(here, there, plain, strict=True):
        assert a.is_cuda
        assert not b.is_cuda
        assert torch.equal(a.cpu(), b)
        torch.testing.assert_close(a, expected, atol=1e-6, rtol=1e-6)
    inputs = torch.arange(4, 40, device="cuda")[None]
    with copies[0].use(policy) as left, copies[1].use(policy) as right, torch.no_grad():
        assert torch.equal(left(inputs).logits, right(inputs).logits)
