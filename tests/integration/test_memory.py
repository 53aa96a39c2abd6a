"""Running out of memory is survived, with the gradient unchanged."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from rloom import FakeEngine, RLOOTrainer
from rloom.training import callbacks
from rloom.training.budget import SMALLEST, TokenBudget
from rloom.training.callbacks import FitBudget
from rloom.training.processes import ALONE
from tests.conftest import make_model, make_tokenizer
from tests.integration.test_invariance import FirstGradient, first_gradient, reward, script


class RunsOut:
    """Fails like a GPU that is out of memory: in a middle layer's backward, when later layers have their gradients."""

    def __init__(self, model, times: int) -> None:
        self.left = times
        self.failures = 0
        model.model.layers[0].register_full_backward_hook(self)

    def __call__(self, module, grad_input, grad_output):
        if self.left:
            self.left -= 1
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("options", [{}, {"beta": 0.0}, {"objective": "verl"}, {"gradient_checkpointing": True}])
def test_an_update_that_fails_in_its_backward_is_redone(config, rows, times, options, caplog):
    split = {"per_device_train_batch_size": 24, "max_tokens_per_micro_batch": 200, **options}
    expected, loss = first_gradient(config, rows, **split)
    model = make_model()
    fault = RunsOut(model, times)
    grads, other = first_gradient(config, rows, model=model, **split)
    assert fault.failures == times
    assert caplog.text.count("it is done again") == times
    assert other == pytest.approx(loss, abs=1e-5)
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (grads[name] - gradient).abs().max() / scale < 1e-6, name


def test_the_worst_case_is_run_and_leaves_no_trace(config, rows, monkeypatch):
    """On a GPU it is run after the first update; here it is called by hand."""
    trainer = RLOOTrainer(
        make_model(), lambda completions: [float(len(c)) for c in completions], config(max_steps=1), rows,
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.learner.budget.tokens = 300
    before = [p.detach().clone() for p in trainer.model.parameters()]
    tokens = trainer.learner.try_worst_case(trainer.model, prompt=43, completion=6, k=2)
    assert 200 < tokens <= 300
    # An update has no more: here three completions, of which two share their prompt.
    (fit,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, FitBudget)]
    assert fit.most == trainer.args.per_device_train_batch_size
    few = trainer.learner.try_worst_case(trainer.model, prompt=43, completion=6, k=2, most=3)
    assert few == (43 + 2 * 6) + (43 + 6)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    RunsOut(trainer.model, 2)
    assert trainer.learner.try_worst_case(trainer.model, prompt=43, completion=6, k=2) <= 75
    assert trainer.learner.budget.tokens == 75


def test_the_trial_is_made_once_and_is_no_larger_than_an_update(monkeypatch):
    """It is made on a GPU alone: model and learner are stand-ins here."""
    tried = []

    class Stub:
        budget = TokenBudget(300)
        processes = ALONE

        def try_worst_case(self, model, prompt, completion, k, **options):
            tried.append((prompt, completion, k, options))
            return 120

    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    model = SimpleNamespace(parameters=lambda: iter([on_gpu]), zero_grad=lambda set_to_none: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(callbacks, "random_state", lambda: "before")
    restored = []
    monkeypatch.setattr(callbacks, "restore_random_state", restored.append)
    args = SimpleNamespace(max_completion_length=6, num_generations=2)
    fit = FitBudget(Stub(), SimpleNamespace(longest=43, pictured=None), 4)
    for _ in range(2):
        fit.on_step_end(args, None, None, model=model)
    assert tried == [(43, 6, 2, {"most": 4, "pictured": None})]
    assert restored == ["before"]


@pytest.mark.parametrize("times", [1, 3, 4])
def test_running_out_in_a_pass_without_gradient_leaves_the_training_budget(config, rows, times):
    """It had eight times as many tokens: where as many as in training are too many at last, training has fewer too."""
    args = config(max_steps=1, beta=0.1, max_tokens_per_micro_batch=64)
    trainer = RLOOTrainer(
        make_model(), lambda completions: [float(len(c)) for c in completions], args, rows,
        processing_class=make_tokenizer(),
    )  # fmt: skip
    left = [times]

    def fails(module, inputs, output):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("injected")

    trainer.reference.model.model.layers[0].register_forward_hook(fails)
    trainer.train()
    assert left == [0]
    budget = trainer.learner.budget
    assert (budget.tokens, budget.without_gradient) == {1: (64, 256), 3: (64, 64), 4: (32, 32)}[times]
    again = TokenBudget(64)
    again.load_state_dict(budget.state_dict())
    assert (again.tokens, again.without_gradient) == (budget.tokens, budget.without_gradient)


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"beta": 0.0}, {"objective": "verl"}, {"log_older_metrics": True}])
def test_an_evaluation_that_runs_out_is_done_again(config, rows, options, caplog):
    def evaluated(times):
        args = config(num_generations=4, max_completion_length=7, max_tokens_per_micro_batch=200, **options)
        engine = FakeEngine(script, eos_token_ids=[2])
        trainer = RLOOTrainer(
            make_model(), reward, args, rows, eval_dataset=rows, processing_class=make_tokenizer(), engine=engine
        )
        left, seen = [times], []

        def fails(module, inputs, output):
            seen.append(1)
            if left[0] and len(seen) > 2:  # in the middle: some of the rollout has been seen
                left[0] -= 1
                raise torch.OutOfMemoryError("injected")

        trainer.model.model.layers[0].register_forward_hook(fails)
        found = trainer.evaluate()
        assert left == [0]
        return {key: value for key, value in found.items() if not key.endswith(("time", "per_second"))}

    expected = evaluated(0)
    assert len(expected) > 10
    assert evaluated(2) == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    assert caplog.text.count("it is done again") == 2


def test_the_budget_learns_and_gives_up_at_last():
    budget = TokenBudget(64)
    tried = []

    def work():
        tried.append(budget.tokens)
        if budget.tokens > 20:
            raise torch.OutOfMemoryError("no room")
        return "done"

    assert budget.retrying(work) == "done"
    assert tried == [64, 32, SMALLEST]
    assert budget.retrying(work) == "done"
    assert tried[-1] == SMALLEST  # remembered

    def hopeless():
        raise torch.OutOfMemoryError("no room at all")

    with pytest.raises(torch.OutOfMemoryError, match="no room at all"):
        budget.retrying(hopeless)


def test_dropout_is_drawn_again_as_it_was():
    budget = TokenBudget(64)
    draws = []

    def work():
        draws.append(torch.rand(3))
        if len(draws) == 1:
            raise torch.OutOfMemoryError("once")

    torch.manual_seed(0)
    budget.retrying(work)
    assert torch.equal(draws[0], draws[1])


@pytest.mark.parametrize(
    ("length", "budget", "checkpointing"),
    [
        pytest.param(8192, 20_000, True, id="8k"),
        pytest.param(16_384, 10_000, False, id="16k", marks=pytest.mark.slow),
    ],
)
def test_long_completions_have_the_gradient_of_a_plain_forward(config, length, budget, checkpointing):
    """A group that fits the budget, with checkpoints; and completions that are longer than all of it."""
    rng = random.Random(0)
    completions = [[rng.randrange(4, 30) for _ in range(length - 5 * sample)] for sample in range(2)]
    model = make_model(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=20_000
    )
    prompt = make_tokenizer()("abc")["input_ids"]
    scores = [float(3 - 4 * sample) for sample in range(2)]
    loss = 0.0  # the advantage of one of two is what its score has more than the other's
    for tokens, advantage in zip(completions, (scores[0] - scores[1], scores[1] - scores[0]), strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        drawn = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
        loss = loss - advantage * drawn.sum() / 2
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    keep = FirstGradient()
    options = {"beta": 0.0, "max_completion_length": length, "max_tokens_per_micro_batch": budget, "max_grad_norm": 0.0}
    options |= {"per_device_train_batch_size": 2, "gradient_checkpointing": checkpointing}
    RLOOTrainer(
        model, lambda completions, **kwargs: scores, config(**options), [{"prompt": "abc"}] * 2,
        processing_class=make_tokenizer(), callbacks=[keep],
        engine=FakeEngine(lambda prompt, sample, seed: completions[sample], eos_token_ids=[2]),
    ).train()  # fmt: skip
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (keep.grads[name] - gradient).abs().max() / scale < 1e-5, name
