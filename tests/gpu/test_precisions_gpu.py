"""On an NVIDIA GPU: float32, bfloat16, float16, and float32 weights under autocast. Engine, learner and whole runs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers as tf

from tests.gpu.test_engine_gpu import engine_for, groups, plain
from tests.gpu.test_learner_gpu import CONFIGS, gradient_error, make_rollout, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
PRECISIONS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "mixed": (torch.float32, torch.bfloat16),
    "mixed, float16": (torch.float32, torch.float16),
}
NAMES = ["qwen2", "gpt_neox", "mistral, window", "gemma2"]
CASES = [*(("qwen2", precision) for precision in PRECISIONS)]
CASES += [(name, precision) for name in NAMES[1:] for precision in ("float32", "mixed")]


def make(name, dtype, factor=2):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.to(dtype)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_engine_draws_from_what_a_plain_forward_has(name, precision):
    dtype, autocast = PRECISIONS[precision]
    exact, model = make(name, torch.float32), make(name, dtype)
    with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
        engine = engine_for(model)
        ours = theirs = count = 0.0
        for group in groups(engine):
            for completion in group.completions:
                own = plain(model, group.prompt.token_ids, completion.token_ids)
                with torch.autocast("cuda", enabled=False):
                    truth = plain(exact, group.prompt.token_ids, completion.token_ids)
                ours += float((torch.tensor(completion.logprobs) - truth).abs().sum())
                theirs += float((own - truth).abs().sum())
                count += len(truth)
    print(f"{name}, {precision}: off by {ours / count:.2e}, a plain forward by {theirs / count:.2e}")
    assert engine.runner.paged
    assert all(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values() if bucket.steps == 0)
    assert ours < 1.3 * theirs + (1e-4 if precision == "float32" else 1e-3) * count


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_gradients_are_as_close_to_float32_as_the_padded_paths(name, precision):
    """Under autocast, that is torch's own autocast, whose rounding ours is compared with."""
    dtype, autocast = PRECISIONS[precision]
    ratios = []
    for seed in range(2):
        rollout, model = make_rollout(seed), make(name, dtype, factor=3)
        exact = copy.deepcopy(model).float()  # what rounding the weights does is not the question
        _, truth = run(exact, rollout, packed=False)
        error = {}
        for packed in (True, False):
            _, grads = run(model, rollout, packed=packed, autocast=autocast)
            error[packed] = gradient_error([(grads[n], truth[n]) for n in truth])
        ratios.append(error[True] / max(error[False], 5e-5))
    print(f"{name}, {precision}: {ratios}")
    assert sum(ratios) / len(ratios) < 1.1


def test_split_weights_beside_autocast():
    """What the default costs in precision: the gradient's error against float32, and that of torch's autocast."""
    for name in NAMES:
        found = {}
        exact = make(name, torch.float32, factor=3)
        rollout = make_rollout(0)
        _, truth = run(exact, rollout, packed=False)
        for kind, model, autocast in (
            ("autocast", exact, torch.bfloat16),
            ("split", copy.deepcopy(exact).bfloat16(), None),
        ):
            _, grads = run(model, rollout, packed=True, autocast=autocast)
            found[kind] = gradient_error([(grads[n], truth[n]) for n in truth])
        print(f"{name}: autocast {found['autocast']:.4f}, split weights {found['split']:.4f}")
        assert found["split"] < 3 * found["autocast"]


def trained(model, folder, steps=200, **changes):
    from rloom import FakeEngine, RLOOConfig, RLOOTrainer
    from tests.conftest import make_tokenizer

    engine = FakeEngine(lambda prompt, k, seed: [5 + (k + seed + i) % 9 for i in range(6)], eos_token_ids=[2])
    rows = [{"prompt": text} for text in ("ab", "hello there", "1+1=", "x")]
    options = {"max_steps": steps, "learning_rate": 1e-6, "per_device_train_batch_size": 8, "num_generations": 4}
    options |= {
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_completion_length": 6,
        "beta": 0.0,
    }
    config = RLOOConfig(str(folder), **options, lr_scheduler_type="constant", **changes)
    trainer = RLOOTrainer(
        model, lambda completion_ids, **kwargs: [float(ids[0]) for ids in completion_ids], config, rows,
        processing_class=make_tokenizer(), engine=engine,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_200_small_steps_move_weights_as_float32_does(tmp_path):
    from tests.conftest import make_model

    start, moved = make_model(), {}
    for kind, changes in {"float32": {"bf16": False}, "split": {}, "bfloat16": {}}.items():
        model = copy.deepcopy(start).bfloat16() if kind == "bfloat16" else copy.deepcopy(start)
        trainer = trained(model, tmp_path / kind, **changes)
        assert (trainer.precision.split is not None) == (kind == "split")
        trainer.save_model(str(tmp_path / kind / "saved"))
        after = tf.AutoModelForCausalLM.from_pretrained(tmp_path / kind / "saved", dtype=torch.float32).state_dict()
        moved[kind] = torch.cat([(after[n] - start.state_dict()[n]).flatten() for n in after])
    cosine = float(torch.cosine_similarity(moved["split"], moved["float32"], dim=0))
    ratio = float(moved["split"].norm() / moved["float32"].norm())
    print(f"after 200 steps of 1e-6: cosine {cosine:.4f}, length {ratio:.4f}")
    assert cosine > 0.9
    assert 0.95 < ratio < 1.05


@pytest.mark.parametrize("changes", [{}, {"bf16": False}, {"split_weights": False}, {"fp16": True, "bf16": False}])
def test_two_runs_of_a_seed_are_equal_and_a_resumed_one_too(changes, tmp_path):
    from rloom import RLOOConfig, RLOOTrainer
    from tests.conftest import make_model, make_tokenizer

    def one(folder, resume=None):
        options = {"max_steps": 6, "learning_rate": 1e-4, "per_device_train_batch_size": 16, "num_generations": 4}
        options |= {"save_steps": 3, "report_to": "none", "disable_tqdm": True, "max_completion_length": 12}
        config = RLOOConfig(str(folder), logging_steps=1, **options, **changes)
        rows = [{"prompt": text} for text in ("ab", "hello there", "1+1=", "x", "sort 3 1 2>")] * 8
        reward = lambda completions, **kwargs: [float(len(text)) for text in completions]  # noqa: E731
        trainer = RLOOTrainer(make_model(), reward, config, rows, processing_class=make_tokenizer())
        trainer.train(resume_from_checkpoint=resume)
        return trainer, trainer.model.state_dict(), json.dumps([e.get("reward") for e in trainer.state.log_history])

    trainer, first, rewards = one(tmp_path / "a")
    assert "pages and CUDA graphs" in trainer.chosen()
    assert "kernels for attention and layers" in trainer.chosen()
    _, second, again = one(tmp_path / "b")
    _, third, _ = one(tmp_path / "a", resume=str(tmp_path / "a" / "checkpoint-3"))
    assert rewards == again
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(first[n], third[n]) for n in first)
