"""The engines: stops, independence, repeatability, and that the model is left as it was."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rloom import FakeEngine, Prompt
from rloom.errors import ConfigError, EngineError
from rloom.generation import Engine, ForkedEngine, NativeEngine, Sampling, TransformersEngine
from rloom.generation.base import cut_at_end
from tests.conftest import make_tokenizer

PROMPTS = [Prompt(content=t, token_ids=ids) for t, ids in (("a", [4]), ("b", [5, 6, 7, 8, 9, 10, 11]), ("c", [6, 6]))]


def engine(model, **changes) -> TransformersEngine:
    options = {"max_completion_length": 8, "eos_token_ids": (2,), "pad_token_id": 0}
    return TransformersEngine(lambda: model, Sampling(**(options | changes)))


def tokens(groups):
    return [[c.token_ids for c in group.completions] for group in groups]


def test_first_end_token_decides_even_where_padding_is_the_same_token():
    assert cut_at_end([5, 2, 2, 2], [2]).token_ids == [5, 2]
    assert cut_at_end([2, 2, 2], [2]).token_ids == [2]  # stops at once
    assert cut_at_end([5, 9, 6], [2, 9]).token_ids == [5, 9]  # any of several end tokens
    assert cut_at_end([5, 6], [2]).stop_reason == "length"
    assert cut_at_end([5, 2], [2]).stop_reason == "eos"
    assert cut_at_end([], [2]).truncated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 2}, r"min_p must be in \[0, 1\].* not 2"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0.* not 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"temperature": -1}, "temperature must be 0 .* not -1"),
        ({"temperature": float("nan")}, "temperature must be 0 .* not nan"),
        ({"temperature": "1"}, "temperature must be 0 .* not '1'"),
        ({"top_k": -3}, "top_k must be 0 .* not -3"),
        ({"top_k": 2.5}, "top_k must be 0 .* not 2.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\].* not 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_completion_length": 0}, "max_completion_length must be at least 1.* not 0"),
        ({"extra": {"stop_strings": ["a", ""]}}, "stop_strings must be texts of at least one character, not ''"),
        ({"extra": {"stop": [""]}}, "stop must be texts"),
    ],
)
def test_what_cannot_be_drawn_with_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**({"max_completion_length": 8, "eos_token_ids": (2,), "pad_token_id": 0} | options))


OFF = ({"temperature": 0}, {"top_k": 0}, {"top_k": None}, {"top_p": 1}, {"min_p": None}, {"min_p": 0}, {"extra": {}})


@pytest.mark.parametrize("make", [NativeEngine, ForkedEngine, TransformersEngine])
def test_what_means_off_is_off(model, make):
    plain = {"max_completion_length": 4, "eos_token_ids": (2,), "pad_token_id": 0}
    expected = tokens(make(lambda: model, Sampling(**plain)).generate(PROMPTS, 2, seed=0))
    for options in OFF:
        drawn = tokens(make(lambda: model, Sampling(**plain, **options)).generate(PROMPTS, 2, seed=0))
        if "temperature" in options:
            assert all(first == second for first, second in drawn)
        else:
            assert drawn == expected


@pytest.mark.parametrize("make", [NativeEngine, ForkedEngine, TransformersEngine])
def test_no_completions_are_none_and_fewer_are_refused(model, make):
    engine = make(lambda: model, Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0))
    assert list(engine.generate(PROMPTS, 0, seed=0)) == []
    assert list(engine.generate([], 2, seed=0)) == []
    with pytest.raises(EngineError, match="num_generations must be 0 or positive, not -2"):
        list(engine.generate(PROMPTS, -2, seed=0))


def test_groups_are_whole_independent_and_repeatable(model):
    first = tokens(engine(model).generate(PROMPTS, 4, seed=1))
    assert [len(group) for group in first] == [4, 4, 4]
    assert any(a != b for group in first for a, b in pairwise(group))
    assert tokens(engine(model).generate(PROMPTS, 4, seed=1)) == first
    assert tokens(engine(model).generate(PROMPTS, 4, seed=2)) != first


def test_completions_belong_to_their_prompt(model):
    """Greedy, all in one batch with padding: what each prompt has alone."""
    greedy = engine(model, extra={"do_sample": False})
    together = tokens(greedy.generate(PROMPTS, 2, seed=1))
    assert together == [tokens(greedy.generate([prompt], 2, seed=1))[0] for prompt in PROMPTS]
    assert len({tuple(first) for first, _ in together}) > 1


def test_generation_leaves_model_and_random_state_alone(model):
    model.train()
    config = model.generation_config
    state = torch.get_rng_state()
    list(engine(model).generate(PROMPTS, 2, seed=1))
    assert model.training
    assert model.generation_config is config
    assert torch.equal(torch.get_rng_state(), state)


def test_sampling_options_of_the_checkpoint_do_not_leak_in(model):
    """A checkpoint's own top_k=1 would make all completions greedy; what we leave open would be filled from it."""
    plain = tokens(engine(model).generate(PROMPTS, 8, seed=1))
    model.generation_config.top_k = 1
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    assert tokens(engine(model).generate(PROMPTS, 8, seed=1)) == plain
    assert len({tuple(c) for c in plain[0]}) > 1


def test_end_tokens_and_length(model):
    every = tuple(range(4, 46))
    stopped = [c for g in engine(model, eos_token_ids=every).generate(PROMPTS, 4, seed=1) for c in g.completions]
    assert all(len(c.token_ids) <= 8 for c in stopped)
    assert sum(c.stop_reason == "eos" and len(c.token_ids) == 1 for c in stopped) > 6
    cut = [c for g in engine(model, eos_token_ids=(45,)).generate(PROMPTS, 4, seed=1) for c in g.completions]
    assert all(c.stop_reason == "length" and len(c.token_ids) == 8 for c in cut if 45 not in c.token_ids)


def test_engine_options_pass_through(model):
    greedy = tokens(engine(model, extra={"do_sample": False}).generate(PROMPTS, 2, seed=1))
    assert all(a == b for a, b in greedy)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_return_sequences": 2}, "num_generations=…. instead"),
        ({"temperature": 0.3}, "temperature=…. instead"),
        ({"max_new_tokens": 3}, "max_completion_length=…. instead"),
        ({"eos_token_id": 5}, "stop_token_id=…. instead"),
        ({"return_dict_in_generate": True}, "changes what `generate` returns"),
        ({"tpo_k": 3}, "did you mean 'top_k'"),
    ],
)
def test_engine_options_that_would_make_sampling_and_training_disagree(model, extra, message):
    with pytest.raises(ConfigError, match=message):
        engine(model, extra=extra)


def test_stop_strings(model):
    tokenizer = make_tokenizer(pad_token="<eos>")  # padding after a stop string looks like an end token
    sampling = Sampling(
        max_completion_length=30, eos_token_ids=(2,), pad_token_id=2, extra={"stop_strings": list("0123456789")}
    )
    stopping = TransformersEngine(lambda: model, sampling, tokenizer=tokenizer)
    completions = [c for group in stopping.generate(PROMPTS, 8, seed=1) for c in group.completions]
    stopped = [c for c in completions if c.stop_reason == "stop_string"]
    assert len(stopped) > 5
    assert all(2 not in c.token_ids for c in stopped)
    assert all(tokenizer.decode(c.token_ids)[-1] in "0123456789" for c in stopped)


def test_fake_engine_is_an_engine_and_may_lose_a_completion():
    fake = FakeEngine(lambda prompt, k, seed: None if k == 1 else [4 + k, 2], eos_token_ids=[2])
    assert isinstance(fake, Engine)
    assert tokens(fake.generate(PROMPTS[:1], 3, seed=0)) == [[[4, 2], [6, 2]]]
    assert fake.calls == [(PROMPTS[:1], 3, 0)]


def test_numbers_of_numpys_become_plain_ones():
    import numpy as np

    sampling = Sampling(
        max_completion_length=np.int64(4),
        eos_token_ids=(2,),
        pad_token_id=0,
        temperature=np.float32(0.5),
        top_k=np.int64(3),
    )
    values = (sampling.max_completion_length, sampling.temperature, sampling.top_k)
    assert values == (4, 0.5, 3)
    assert [type(value) for value in values] == [int, float, int]


@pytest.mark.parametrize(
    "wrong", [{"top_k": True}, {"temperature": True}, {"extra": {"stop_strings": 5}}, {"temperature": "0.7"}]
)
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**{"max_completion_length": 4, "eos_token_ids": (2,), "pad_token_id": 0, **wrong})


def test_engines_declare_their_abilities_and_others_have_defaults(model):
    from rloom.generation.base import abilities_of
    from rloom.generation.choose import choose_engine
    from rloom.generation.images import ImageRouter

    sampling = Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0)
    names = ("native", "forked", "transformers")
    engines = {name: choose_engine(lambda: model, sampling, wanted=name) for name in names}
    engines["fake"] = FakeEngine(lambda *_: [2], eos_token_ids=[2])
    engines["images"] = ImageRouter(lambda: engines["native"], engines["transformers"])
    assert all(isinstance(engine, Engine) for engine in engines.values())
    assert all(isinstance(engine.words(), str) for engine in engines.values())
    declared = {name: (engine.keyed_by_prompt, engine.takes_images) for name, engine in engines.items()}
    assert declared == {
        "native": (True, True), "forked": (True, False), "transformers": (False, True), "fake": (False, True),
        "images": (True, True),
    }  # fmt: skip

    class Own:
        generate = engines["fake"].generate

    class Inherits(Engine):
        takes_images = True

    assert abilities_of(Own()).words == "generation by Own"
    assert not abilities_of(Own()).keyed_by_prompt
    assert not abilities_of(Own()).takes_images
    assert abilities_of(Inherits()).takes_images
    assert abilities_of(Inherits()).words == "generation by Inherits"
    engine = Inherits()
    engine.keyed_by_prompt = True
    assert abilities_of(engine).keyed_by_prompt
