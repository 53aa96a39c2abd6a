"""vLLM in this process."""

from __future__ import annotations

import gc
import os
import random
import weakref

import numpy as np
import pytest
import torch
import transformers as tf

from rloom import RLOOTrainer
from rloom.errors import EngineError
from rloom.generation import choose_engine
from rloom.generation.vllm import VllmEngine, VllmOptions
from tests.conftest import make_tokenizer
from tests.vllm.conftest import DEVICE, assert_drawn_from, in_order, plain_logprobs, prompts, sampling, tiny


@pytest.fixture(scope="module")
def one():
    """An engine for most tests, and its model: starting vLLM takes seconds."""
    model = tiny()
    return VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer()), model


@pytest.fixture
def engine(one):
    """That engine, drawing as a test says."""
    made, _ = one
    before = made.request_format, made.sampling, made.options

    def as_told(regex=None, **changes):
        made.sampling = sampling(**changes)
        made.request_format = type(made.request_format)(made.sampling, regex)
        return made

    yield as_told
    made.request_format, made.sampling, made.options = before


def test_log_probabilities_are_the_models(engine, one):
    _, model = one
    some = prompts("ab", "hello there, you", "x")
    assert_drawn_from(model, some, in_order(engine(), some, 4))
    assert_drawn_from(model, some, in_order(engine(temperature=0.6), some, 4), temperature=0.6)


def test_greedy_is_generate(engine, one):
    _, model = one
    some = prompts("ab", "hello there, you", "1+1=")
    groups = in_order(engine(temperature=0.0, max_completion_length=16), some, 2)
    assert_drawn_from(model, some, groups)
    for prompt, group in zip(some, groups, strict=True):
        ids = torch.tensor([prompt.token_ids], device=DEVICE)
        expected = model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=2, pad_token_id=0)
        assert [c.token_ids for c in group] == [expected[0, ids.shape[1] :].tolist()] * 2


def test_the_same_seed_draws_the_same_and_samples_are_independent(engine, one):
    _, model = one
    some = prompts("ab", "ab")
    first, again, other = (in_order(engine(), some, 4, seed=seed) for seed in (1, 1, 2))
    tokens = [[c.token_ids for c in group] for group in first]
    assert tokens == [[c.token_ids for c in group] for group in again]
    assert tokens != [[c.token_ids for c in group] for group in other]
    assert tokens[0] != tokens[1]  # equal prompts have noise of their own
    # Siblings agree on their first token as often as chance has it, and draw from the model's distribution.
    [group] = in_order(engine(max_completion_length=1), prompts("hello"), 2000)
    drawn = torch.tensor([c.token_ids[0] for c in group])
    ids = torch.tensor([prompts("hello")[0].token_ids], device=DEVICE)
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, -1].softmax(-1).cpu()
    found = torch.bincount(drawn, minlength=len(expected)).float() / len(drawn)
    assert (found - expected).abs().sum() / 2 < 0.08
    agree = (drawn[:-1] == drawn[1:]).float().mean()
    assert agree == pytest.approx(expected.square().sum().item(), abs=0.03)


def test_ends(engine):
    some = prompts("ab", "hello there, you")
    several = (2, 10, 11, 12, 13, 14, 15)
    found = [c for group in in_order(engine(eos_token_ids=several), some, 8) for c in group]
    for completion in found:
        ended = completion.token_ids[-1] in several
        assert completion.stop_reason == ("eos" if ended else "length")
        assert not set(completion.token_ids[:-1]) & set(several)
    assert {c.stop_reason for c in found} == {"eos", "length"}
    assert len({c.token_ids[-1] for c in found if c.stop_reason == "eos"}) > 1


def test_stop_strings(engine, one):
    _, model = one
    some, tokenizer = prompts("ab", "hello there, you"), make_tokenizer()
    stops = ["h", "1", "t "]
    groups = in_order(engine(extra={"stop_strings": stops}, max_completion_length=16), some, 8)
    assert_drawn_from(model, some, groups)  # of all tokens, those of the text that ends it included
    reasons = set()
    for completion in (c for group in groups for c in group):
        text = tokenizer.decode(completion.token_ids)
        ends = any(text.endswith(stop) for stop in stops)
        reasons.add(completion.stop_reason)
        assert ends == (completion.stop_reason == "stop_string")
        assert not any(stop in text[:-1] for stop in stops if stop != "t ")
    assert "stop_string" in reasons


def test_filters(engine):
    some = prompts("ab")
    for changes in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        [group] = in_order(engine(**changes), some, 3)
        [greedy] = in_order(engine(temperature=0.0), some, 1)
        assert [c.token_ids for c in group] == [greedy[0].token_ids] * 3
        assert group[0].logprobs is None  # of the plain distribution nothing is known
        assert group[0].drawn_logprobs == pytest.approx([0.0] * len(greedy[0].token_ids), abs=1e-5)
    [plain], [penalised] = (in_order(engine(repetition_penalty=p, temperature=0.0), some, 1) for p in (1.0, 5.0))
    assert len(set(penalised[0].token_ids)) == len(penalised[0].token_ids)
    assert plain[0].token_ids != penalised[0].token_ids


def test_options_of_vllm_go_through(engine):
    [group] = in_order(engine(extra={"allowed_token_ids": [5, 6, 2]}), prompts("ab"), 4)
    assert {token for c in group for token in c.token_ids} <= {5, 6, 2}
    [group] = in_order(engine(extra={"min_tokens": 9}), prompts("ab"), 8)
    assert all(len(c.token_ids) >= 9 for c in group)


def test_structured_outputs(engine):
    [group] = in_order(engine(regex="[ab]{2,4}"), prompts("x"), 6)
    texts = {make_tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in group}
    assert all(set(text) <= {"a", "b"} and 2 <= len(text) <= 4 for text in texts)
    assert all(c.stop_reason == "eos" for c in group)


def test_an_expression_that_vllm_does_not_understand_is_told_at_the_start():
    model, options = tiny(), VllmOptions(regex="(a")
    with pytest.raises(EngineError, match=r"vllm_structured_outputs_regex='\(a'"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)


@pytest.mark.parametrize("how", ["in place", "through .data", "another tensor"])
def test_weights_that_changed_are_the_ones_drawn_from(engine, one, how):
    made, model = one
    some = prompts("ab", "hello there, you")
    in_order(engine(), some)
    before = made.syncs
    in_order(engine(), some)
    assert made.syncs == before  # nothing changed, nothing was sent
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.5)
        elif how == "through .data":
            weight.data[3, 4] += 3.0
        else:
            model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(weight * 0.5)
    assert_drawn_from(model, some, in_order(engine(), some))
    assert made.syncs == before + 1


def test_the_smallest_change_is_sent(engine, one):
    made, model = one
    in_order(engine(), prompts("ab"))
    before, weight = made.syncs, model.model.norm.weight
    weight.data[0] = torch.nextafter(weight.data[0], torch.tensor(9.0, device=DEVICE))
    in_order(engine(), prompts("ab"))
    assert made.syncs == before + 1


def test_the_process_is_left_as_it_was(engine):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    in_order(engine(), prompts("ab"))
    assert first == (random.random(), np.random.rand(), torch.rand(()).item())
    assert "LD_PRELOAD" not in os.environ
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    assert gc.get_freeze_count() == 0


def test_what_it_switches_off_is_switched_on_again_and_nothing_is_left():
    models = [tiny()]
    torch.set_float32_matmul_precision("high")
    try:
        engine = VllmEngine(lambda: models[0], sampling(), tokenizer=make_tokenizer())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    gone = weakref.ref(models.pop())
    del engine
    gc.collect()
    assert gone() is None
    assert not torch.distributed.is_initialized()


def test_a_process_group_that_was_there_stays(one):
    one[0].close()
    group = {"store": torch.distributed.HashStore(), "world_size": 1, "rank": 0}
    model, some = tiny(), prompts("ab", "x")
    torch.distributed.init_process_group("gloo", **group)
    try:
        engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
        engine.close()
        assert torch.distributed.is_initialized()
        assert_drawn_from(model, some, in_order(engine, some))
        engine.close()
    finally:
        torch.distributed.destroy_process_group()


def test_a_rollout_that_nobody_finished_does_not_reach_into_the_next(engine, one):
    _, model = one
    some = prompts("ab", "hello there, you", "x", "1+1=")
    left = engine(max_completion_length=40, eos_token_ids=(2, *range(10, 30))).generate(some, 2, seed=0)
    next(left)
    model.model.norm.weight.data[0] += 0.1
    assert_drawn_from(model, some[:2], in_order(engine(), some[:2]))
    with pytest.raises(EngineError, match="another rollout began"):
        list(left)


def test_groups_come_as_they_finish_and_may_be_left(engine):
    some = prompts("ab", "hello there, you", "x", "1+1=")
    groups = engine(max_completion_length=40, eos_token_ids=(2, *range(10, 30))).generate(some, 2, seed=0)
    next(groups)
    groups.close()  # what was not asked for any more must not come up in the next rollout
    assert len(in_order(engine(), some)) == 4


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(EngineError, match=r"context length of 128: .* raise vllm_max_model_length"):
        list(engine(max_completion_length=120).generate(prompts("a" * 20), 2, seed=0))


def test_two_in_a_process_take_turns(one):
    first, model = one
    other = tiny(1, tie_word_embeddings=True)
    second = choose_engine(lambda: other, sampling(), wanted="vllm", tokenizer=make_tokenizer())
    some = prompts("ab", "x")
    assert_drawn_from(other, some, in_order(second, some))
    assert_drawn_from(model, some, in_order(first, some))
    assert_drawn_from(other, some, in_order(second, some))


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "down_proj", "lm_head"], "modules_to_save": ["norm"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": "all-linear", "bias": "lora_only"},
        {"target_modules": "all-linear", "lora_alpha": 7},
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"v_proj": 3}, "use_rslora": True},
    ],
    ids=["with the head", "dora", "biases", "all", "some"],
)
def test_adapters(adapter, request):
    from peft import LoraConfig, get_peft_model

    some = prompts("ab", "hello there, you")
    base = tiny(2, tie_word_embeddings=True, attention_bias=True)
    model = get_peft_model(base, LoraConfig(r=4, **adapter))
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_drawn_from(model, some, in_order(engine, some))
    with model.disable_adapter():
        bare = plain_logprobs(model, some[0], in_order(engine, some)[0][0])
    assert in_order(engine, some)[0][0].logprobs != pytest.approx(bare, abs=1e-2)
    with model.disable_adapter():
        assert_drawn_from(model, some, in_order(engine, some))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine._adapter_only == (request.node.callspec.id in ("all", "some"))
    if engine._adapter_only:  # what is under the adapter is noticed too
        base.get_input_embeddings().weight.data += 0.1
        assert_drawn_from(model, some, in_order(engine, some))


SMALL = {
    "vocab_size": 46, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)), {"max_model_length": 64}),
        (lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**GROUPED, head_dim=32)), {}),  # always tied, to vLLM too
        (lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SMALL)), {}),  # which vLLM runs with transformers' classes
        (lambda: tiny(4), {"model_impl": "transformers"}),
        (lambda: tiny(5).to(torch.bfloat16), {}),
    ],
    ids=["qwen2", "gemma2", "gpt_neox", "transformers", "bfloat16"],
)
def test_models(make, options):
    torch.manual_seed(0)
    model = make().to(DEVICE)
    classes = {type(module): (type(module).__bases__, type(module).__init__) for module in model.modules()}
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=VllmOptions(**options))
    some = prompts("ab", "hello there, you")
    for parameter in model.parameters():  # biases begin with zeros
        parameter.data += 0.02 * torch.randn_like(parameter)
    exact = model.dtype == torch.float32
    assert_drawn_from(model, some, in_order(engine, some), tolerance=1e-3 if exact else 0.3)
    assert engine.syncs == 2
    # The classes are as they were: the model can be trained, and another one made.
    assert classes == {cls: (cls.__bases__, cls.__init__) for cls in classes}
    model.train()(input_ids=torch.tensor([[5, 6, 7]], device=DEVICE)).logits.sum().backward()
    make()


@pytest.mark.parametrize("lora", [False, True])
def test_training(config, rows, lora):
    from peft import LoraConfig

    peft_config = LoraConfig(r=4, target_modules="all-linear", lora_alpha=64) if lora else None
    options = {"engine": "vllm"} if lora else {"use_vllm": True, "vllm_max_model_length": 96}
    trainer = RLOOTrainer(
        tiny(),
        lambda completions, **_: [text.count("a") - len(text) / 4 for text in completions],
        config(max_steps=4, learning_rate=1e-2, logging_steps=1, **options),
        rows,
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )
    engine = trainer.collector.engine
    assert type(engine) is VllmEngine
    syncs = engine.syncs
    trainer.train()
    assert engine.syncs == syncs + 3  # the first rollout has the weights that the start has sent
    logs = [log for log in trainer.state.log_history if "mismatch/max" in log]
    assert len(logs) == 4
    assert max(log["mismatch/max"] for log in logs) < 1e-4


def test_sleep_is_for_gpus():
    model = tiny()
    if DEVICE == "cuda":
        options = VllmOptions(sleeps=True)
        engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
        for _ in range(2):
            assert_drawn_from(model, prompts("ab"), in_order(engine, prompts("ab")), tolerance=1e-2)
        return
    with pytest.raises(EngineError, match=r"vllm_enable_sleep_mode=True .* the model is on the cpu"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=VllmOptions(sleeps=True))
