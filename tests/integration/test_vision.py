"""Vision-language models: images through generation, learner, reference and rewards, and what is refused."""

from __future__ import annotations

import logging

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rloom import FakeEngine, RLOOTrainer
from rloom.data.batching import Batcher
from rloom.data.model_inputs import placeholder_ids
from rloom.data.vision import VisionEncoder
from rloom.errors import ConfigError, DataError, EngineError
from rloom.generation import NativeEngine
from rloom.generation.base import Sampling
from rloom.generation.native.decode_loop import DecodeLoop
from rloom.generation.transformers import TransformersEngine
from rloom.models.attention import NAME, own_attention, packed_attention, running
from rloom.models.logprobs import Forward
from rloom.models.mask_probe import sees_ahead
from rloom.models.model_checks import why_not_packed
from rloom.models.positions import image_positions
from rloom.types import Rollout
from tests import vision_models
from tests.conftest import make_model, make_tokenizer
from tests.vision_models import FAMILIES, PLACE, picture

family = pytest.mark.parametrize("family", FAMILIES)


def chat(text):
    return [{"role": "user", "content": text}]


def image_rows(count=4):
    """Prompts and images of different sizes."""
    sizes = [(28, 28), (56, 28), (28, 56), (56, 56)]
    return [{"prompt": chat("what is it" + "?" * i), "image": picture(i, *sizes[i % 4])} for i in range(count)]


def mixed_rows():
    """Two images, one, none."""
    return [
        {"prompt": chat("which one"), "images": [picture(0), picture(1, 28, 56)]},
        {"prompt": chat("hm"), "images": [picture(2, 56, 56)]},
        {"prompt": chat("no image here."), "images": []},
        {"prompt": chat("again"), "images": [picture(3)]},
    ]


def length(completions, **kwargs):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trainer_of(args, rows, family="gemma3", reward=length, **options):
    model, processor = vision_models.make(family)
    options = {"processing_class": processor} | options
    return RLOOTrainer(model, reward, args, rows, **options)


def encoded(family, rows):
    model, processor = vision_models.make(family)
    encoder = VisionEncoder(processor, {})
    return model.eval(), processor, [encoder.encode(row, {}) for row in rows]


# -- the same numbers as a plain forward, one sample at a time


def plain_logits(model, prompt, completion):
    """(T, V) of the positions that predict the completion: no padding, no neighbours."""
    ids = torch.tensor([prompt.token_ids + completion])
    tail = torch.zeros(1, len(completion), dtype=torch.long)
    inputs = {n: torch.cat([v, tail], 1) if "token_type" in n else v for n, v in prompt.inputs.items()}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
    return logits[0, len(prompt.token_ids) - 1 : -1]


PACKED = ("qwen2.5-vl", "qwen3-vl", "smolvlm")


@pytest.mark.parametrize(("family", "native"), [*((f, False) for f in FAMILIES), *((f, True) for f in PACKED)])
def test_generation_is_that_of_each_prompt_alone(family, native):
    model, _, prompts = encoded(family, [mixed_rows()[i] for i in (0, 1, 3)])
    never = placeholder_ids(model.config)
    sampling = Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0, top_k=1)
    if native:
        engine = NativeEngine(lambda: model, sampling)
    else:
        engine = TransformersEngine(lambda: model, sampling, never=never)
    for group in engine.generate(prompts, 2, seed=0):
        expected = []
        while len(expected) < 4 and expected[-1:] != [2]:
            with torch.no_grad():
                logits = plain_logits(model, group.prompt, [*expected, 0])[-1]
            logits[list(never)] = -torch.inf
            expected.append(int(logits.argmax()))
        assert [c.token_ids for c in group.completions] == [expected, expected]


@pytest.mark.parametrize("family", PACKED)
def test_what_the_native_engine_draws_is_the_models(family):
    """Log-probabilities of a plain forward, for prompts with two images, one and none in one batch, two of them equal
    but for what is on the picture; fewer places than completions."""
    twins = [{"prompt": chat("look"), "images": [picture(seed)]} for seed in (7, 8)]
    model, _, prompts = encoded(family, [*mixed_rows(), *twins])
    assert prompts[4].token_ids == prompts[5].token_ids
    sampling = Sampling(max_completion_length=9, eos_token_ids=(2,), pad_token_id=0)
    engine = NativeEngine(lambda: model.train(), sampling, max_sequences=5)
    groups = {id(group.prompt): group for group in engine.generate(prompts, 3, seed=0)}
    assert model.training
    model.eval()
    for prompt in prompts:
        assert len(groups[id(prompt)].completions) == 3
        for completion in groups[id(prompt)].completions:
            assert not set(completion.token_ids) & set(placeholder_ids(model.config))
            with torch.no_grad():
                plain = plain_logits(model, prompt, completion.token_ids).log_softmax(-1)
            expected = plain[range(len(completion.token_ids)), completion.token_ids]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_a_model_whose_images_the_native_engine_does_not_take():
    """Gemma 3's image tokens see each other in both directions."""
    model, _, prompts = encoded("gemma3", mixed_rows())
    sampling = Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling)
    assert "see each other both ways" in engine.why_not_images(prompts)
    with pytest.raises(EngineError, match="prompts with images do not run here"):
        list(engine.generate(prompts, 2, seed=0))
    assert len(list(engine.generate([prompts[2]], 2, seed=0))) == 1  # text does


@family
def test_masks_are_looked_at_and_not_numbers(family):
    """In bfloat16, with much text after the image, Gemma 3 differs from a causal model by less than rounding."""
    model, _, prompts = encoded(family, [{"prompt": chat("what " * 20), "images": [picture(1)]}])
    model.to(torch.bfloat16)
    prompt = prompts[0]
    assert sees_ahead(model, prompt.token_ids, prompt.inputs) == (family == "gemma3")
    engine = NativeEngine(lambda: model, Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0))
    rollout = Rollout(
        prompt_ids=[prompt.token_ids] * 2,
        completion_ids=[[7, 9], [8, 2]],
        groups=torch.tensor([0, 0]),
        scores=torch.zeros(2, 1),
        score=torch.zeros(2),
        trained=[True] * 2,
        prompt_inputs=[prompt.inputs] * 2,
    )
    for reason in (engine.why_not_images(prompts), why_not_packed(model, rollout)):
        assert (reason is not None) == (family == "gemma3")
        assert reason is None or "see each other both ways" in reason


def test_a_prompt_that_is_an_image_and_nothing_before_it():
    model, processor = vision_models.make("qwen2.5-vl")
    encoder = VisionEncoder(processor, {})
    prompts = [
        encoder.encode({"prompt": text, "image": picture(1)}, {}) for text in ("<|image_pad|>ab", "a<|image_pad|>")
    ]
    engine = NativeEngine(lambda: model.eval(), Sampling(max_completion_length=3, eos_token_ids=(), pad_token_id=0))
    assert [len(group.completions) for group in engine.generate(prompts, 2, seed=0)] == [2, 2]


@pytest.mark.parametrize("token", [-200, -1, 99_999])
def test_placeholders_outside_of_the_vocabulary(token):
    model, _, prompts = encoded("qwen2.5-vl", mixed_rows())
    model.config.video_token_id = token
    engine = NativeEngine(lambda: model, Sampling(max_completion_length=9, eos_token_ids=(), pad_token_id=0))
    groups = list(engine.generate(prompts, 2, seed=0))
    assert engine.runner.sampler.never.tolist() == [model.config.image_token_id]
    completion = groups[0].completions[0]
    assert len(completion.drawn_logprobs) == 9  # of the vocabulary without it
    assert all(d >= p for d, p in zip(completion.drawn_logprobs, completion.logprobs, strict=True))


@pytest.mark.parametrize("family", PACKED)
def test_completions_that_begin_again_go_on_after_their_images(family, monkeypatch):
    model, _, prompts = encoded(family, mixed_rows())
    sampling = Sampling(max_completion_length=40, eos_token_ids=(), pad_token_id=0)
    tokens = lambda engine: sorted(c.token_ids for g in engine.generate(prompts, 4, seed=3) for c in g.completions)  # noqa: E731
    expected = tokens(NativeEngine(lambda: model, sampling))
    short = NativeEngine(lambda: model, sampling)
    plan = DecodeLoop._plan_pages
    monkeypatch.setattr(DecodeLoop, "_plan_pages", lambda *args: plan(*args) // 2)
    assert tokens(short) == expected
    assert short.requeued > 0


def test_text_after_images_is_that_of_text_alone():
    """Some models remember how far images moved the positions; a prompt without any must not feel it."""
    model, _, prompts = encoded("qwen2.5-vl", mixed_rows())
    sampling = Sampling(max_completion_length=6, eos_token_ids=(2,), pad_token_id=0, top_k=1)
    engine = TransformersEngine(lambda: model, sampling)
    text = [prompts[2]]
    before = [c.token_ids for group in engine.generate(text, 1, seed=0) for c in group.completions]
    list(engine.generate(prompts[:1], 1, seed=0))
    assert before == [c.token_ids for group in engine.generate(text, 1, seed=0) for c in group.completions]


@pytest.mark.parametrize(("family", "packs"), [*((f, False) for f in FAMILIES), *((f, True) for f in PACKED)])
def test_gradients_are_those_of_each_sample_alone(family, packs):
    model, _, prompts = encoded(family, mixed_rows())
    prompts = [prompts[0], prompts[0], prompts[1], prompts[3]]
    completions = [[7, 9, 12, 2], [5, 2], [20, 21, 22, 23, 24], [8]]
    rollout = Rollout(
        prompt_ids=[p.token_ids for p in prompts],
        completion_ids=completions,
        groups=torch.tensor([0, 0, 1, 2]),
        scores=torch.zeros(4, 1),
        score=torch.zeros(4),
        trained=[True] * 4,
        prompt_inputs=[p.inputs for p in prompts],
    )
    batcher = Batcher(packed=packs, pad_token_id=0, multiple=3)
    batcher.images_packed = packs
    batch = batcher.make(rollout, range(4), torch.device("cpu"))
    assert (batch.packed is not None) == packs
    with packed_attention([model]), running(batch.packed) if packs else own_attention():
        stats = Forward(model, temperature=0.7)(model, batch)
        weights = torch.arange(1.0, batch.num_tokens + 1)
        (stats.logprobs.flatten()[batch.flat] * weights).sum().backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected, start = [], 0
    for prompt, completion in zip(prompts, completions, strict=True):
        logprobs = (plain_logits(model, prompt, completion) / 0.7).log_softmax(-1)
        expected.append(logprobs[range(len(completion)), completion])
        (expected[-1] * weights[start : start + len(completion)]).sum().backward()
        start += len(completion)
    torch.testing.assert_close(stats.logprobs.flatten()[batch.flat], torch.cat(expected), rtol=1e-5, atol=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    assert any(("vis" in n) and g.abs().max() > 1e-3 for n, g in theirs.items())  # images have a say
    scale = max(float(g.abs().max()) for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name] / scale, gradient / scale, rtol=1e-5, atol=1e-5, msg=name)


# -- training


@family
def test_trains_all_of_the_model(family, config, caplog):
    caplog.set_level(logging.WARNING, logger="rloom")
    trainer = trainer_of(config(beta=0.05, max_steps=2, log_completions=True), image_rows(), family)
    before = weights(trainer.model)
    trainer.train()
    told = sum("prompts with images are generated by model.generate" in m for m in caplog.messages)
    assert told == (family == "gemma3")
    first, second = (entry for entry in trainer.state.log_history if "kl" in entry)
    assert abs(first["kl"]) < 1e-5  # the reference sees the images too
    assert abs(second["kl"]) > 1e-5
    moved = {name for name, value in weights(trainer.model).items() if not torch.equal(value, before[name])}
    assert any("vis" in name for name in moved)
    assert any("layers.1" in name for name in moved)
    assert len(trainer._logs["images"]) == len(trainer._logs["prompt"]) == 4


def one_update(family, config, **options):
    """A trainer after an update, and its micro-batches with images."""
    plain = {"optim": "sgd", "learning_rate": 0.1, "beta": 0.05}
    trainer = trainer_of(config(max_steps=1, per_device_train_batch_size=8, **plain, **options), mixed_rows(), family)
    seen, make = [], trainer.learner.batcher.make
    trainer.learner.batcher.make = lambda *a: seen.append(make(*a)) or seen[-1]
    trainer.train()
    return trainer, [batch for batch in seen if batch.prompt_inputs]


@pytest.mark.parametrize("family", PACKED)
def test_packed_where_the_model_allows_it(family, config, caplog):
    """Each prompt and its images once, found by a proof; the same update as with padded rows."""
    trainer, batches = one_update(family, config)
    assert trainer.learner.batcher.images_packed
    assert batches
    for batch in batches:
        assert batch.packed is not None
        marks = sum(batch.packed.input_ids[0].eq(t).sum() for t in placeholder_ids(trainer.model.config))
        once = {tuple(batch.rollout.prompt_ids[row]) for row in batch.rows}
        assert marks == sum(ids.count(t) for ids in once for t in placeholder_ids(trainer.model.config))
    assert "padded" not in caplog.text
    padded, others = one_update(family, config, packing=False)
    assert all(batch.packed is None for batch in others)
    start = weights(vision_models.make(family)[0])
    moved = max(float((value - start[name]).abs().max()) for name, value in weights(trainer.model).items())
    assert moved > 1e-3
    near = max(1e-5 * moved, 2.4e-7)  # two steps of a float32 near 1
    for name, value in weights(trainer.model).items():
        torch.testing.assert_close(value, padded.model.get_parameter(name), rtol=0, atol=near, msg=name)


def test_padded_where_the_model_does_not_allow_more(config, caplog):
    """Gemma 3's image tokens see each other in both directions, which a packed row does not have."""
    trainer, batches = one_update("gemma3", config)
    assert trainer.learner.batcher.packed  # text alone is
    assert not trainer.learner.batcher.images_packed
    assert batches
    assert all(batch.packed is None for batch in batches)
    told = [message for message in caplog.messages if "prompts with images are trained on in padded" in message]
    assert len(told) == 1
    assert "image tokens of Gemma3ForConditionalGeneration see each other both ways" in told[0]


def test_completions_go_on_after_the_images_positions():
    """As the model itself counts them for prompt and completion together."""
    model, _, prompts = encoded("qwen2.5-vl", mixed_rows())
    prompt, completion = prompts[1], [7, 8, 9]
    rollout = Rollout(
        prompt_ids=[prompt.token_ids] * 2,
        completion_ids=[completion, [7]],
        groups=torch.zeros(2, dtype=torch.long),
        scores=torch.zeros(2, 1),
        score=torch.zeros(2),
        trained=[True] * 2,
        prompt_inputs=[prompt.inputs] * 2,
    )
    batcher = Batcher(packed=True, pad_token_id=0)
    batcher.images_packed = True
    batch = batcher.make(rollout, range(2), torch.device("cpu"))
    found = image_positions(model.model.get_rope_index, batch, batch.packed)
    ids = torch.tensor([prompt.token_ids + completion])
    types = torch.cat([prompt.inputs["mm_token_type_ids"], torch.zeros(1, 3, dtype=torch.long)], 1)
    whole, _ = model.model.get_rope_index(ids, types, image_grid_thw=prompt.inputs["image_grid_thw"])
    assert torch.equal(found[..., : ids.shape[1]], whole)
    assert torch.equal(found[..., -1], whole[..., -3])
    assert whole.max() + 1 < ids.shape[1]  # images do move positions


def test_rows_with_and_without_images(config):
    """Rows of text keep packing, and the engine of text."""
    rows = mixed_rows()
    trainer = trainer_of(config(max_steps=1, per_device_train_batch_size=8, beta=0.05), rows, "qwen2.5-vl")
    seen = []
    make = trainer.learner.batcher.make
    trainer.learner.batcher.make = lambda *a: seen.append(make(*a)) or seen[-1]
    trainer.train()
    assert trainer.learner.batcher.packed
    assert type(trainer.collector.engine.text).__name__ == "NativeEngine"
    assert {(batch.packed is not None, bool(batch.prompt_inputs)) for batch in seen} == {(True, False), (True, True)}
    assert trainer.model.config._attn_implementation == "sdpa"


def test_text_alone_on_a_vision_model(config):
    rows = [{"prompt": chat("one")}, {"prompt": chat("two")}]
    trainer = trainer_of(config(max_steps=1), rows, "qwen3-vl")
    before = weights(trainer.model)
    trainer.train()
    moved = [name for name, value in weights(trainer.model).items() if not torch.equal(value, before[name])]
    assert moved
    assert not any("visual" in name for name in moved)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "gemma3"])
def test_lora(family, config):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    args = config(beta=0.05, max_steps=2, gradient_checkpointing=True)
    trainer = trainer_of(args, image_rows(), family, peft_config=adapter)
    before = weights(trainer.model)
    trainer.train()
    assert abs(next(entry["kl"] for entry in trainer.state.log_history if "kl" in entry)) < 1e-5
    for name, value in weights(trainer.model).items():
        assert torch.equal(value, before[name]) != ("lora_B" in name) or "lora_A" in name, name


@family
def test_prompts_that_are_text(family, config):
    mark = PLACE[family]
    rows = [
        {"prompt": f"{mark}what is it", "image": picture(0)},
        {"prompt": f"is {mark} one", "image": picture(1, 28, 28)},
    ]
    seen = []

    def reward(prompts, completions, image, **kwargs):
        seen.extend(zip(prompts, image, strict=True))
        return length(completions)

    trainer = trainer_of(config(max_steps=1), rows, family, reward)
    trainer.train()
    assert len(seen) == 4
    assert {(prompt, id(image)) for prompt, image in seen} == {(row["prompt"], id(row["image"])) for row in rows}
    with pytest.raises(DataError, match=r"has 1 image\(s\), and its text names 0: write '"):
        trainer_of(config(), [{"prompt": "a", "image": picture(0)}] * 2, family)


def test_rewards_see_the_images(config):
    rows, seen = mixed_rows(), []

    def reward(prompts, completions, images, **kwargs):
        seen.extend(zip(prompts, images, strict=True))
        return length(completions)

    args = config(max_steps=1, per_device_train_batch_size=8, remove_unused_columns=True)
    trainer_of(args, rows, reward=reward).train()
    assert len(seen) == 8
    by_text = {row["prompt"][0]["content"]: row["images"] for row in rows}
    for prompt, images in seen:
        *parts, text = prompt[0]["content"]
        assert images == by_text[text["text"]]
        assert [part["image"] for part in parts] == images


def test_evaluation_and_no_images_in_the_log(config):
    args = config(max_steps=1, log_multimodal=False, log_completions=True, dynamic_sampling=1)
    trainer = trainer_of(args, image_rows(), eval_dataset=image_rows(2))
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_reward"] == second["eval_reward"]
    assert len(trainer._logs["images"]) == 0


def test_resumes_in_the_middle_of_a_rollout(config, tmp_path):
    """The second update uses the first one's rollout, which a checkpoint holds with its images."""
    options = {"num_iterations": 2, "beta": 0.05, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    whole = trainer_of(config(output_dir=str(tmp_path / "whole"), max_steps=4, **options), image_rows())
    whole.train()
    resumed = trainer_of(config(output_dir=str(tmp_path / "resumed"), max_steps=4, **options), image_rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, value in weights(whole.model).items():
        assert torch.equal(value, resumed.model.get_parameter(name)), name
    state = torch.load(tmp_path / "whole" / "checkpoint-1" / "rloom_state.pt", weights_only=True)
    assert "pixel_values" in str(state)
    assert "PIL" not in state["components"]["table"]


@pytest.mark.parametrize("streamed", [False, True])
def test_images_of_a_data_set_and_bfloat16_weights(streamed, config):
    rows = [{"prompt": row["prompt"], "images": row["images"]} for row in mixed_rows()]
    data = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    model, processor = vision_models.make("qwen2.5-vl")
    args = config(max_steps=1, per_device_train_batch_size=8, gradient_checkpointing=True)
    train = data.to_iterable_dataset() if streamed else data
    trainer = RLOOTrainer(model.bfloat16(), length, args, train, processing_class=processor)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_reward_model_reads_the_words(config, tmp_path, caplog):
    torch.manual_seed(1)
    scorer = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_labels=1, pad_token_id=0,
        )
    )  # fmt: skip
    seen, tokenizer = [], make_tokenizer()
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **k: seen.append(messages) or render(messages, **k)
    args = config(max_steps=1)
    trainer_of(args, image_rows(), reward=scorer, reward_processing_classes=tokenizer).train()
    assert {message["content"] for message, _ in seen} <= {row["prompt"][0]["content"] for row in image_rows()}
    assert sum("does not see the prompts' images" in message for message in caplog.messages) == 1


def test_the_worst_case_has_images(config):
    trainer = trainer_of(config(max_tokens_per_micro_batch=80), image_rows(), "qwen2.5-vl")
    pictured = trainer.collector.encoder.pictured
    assert pictured.images
    assert len(pictured.token_ids) == trainer.collector.encoder.longest
    tokens = trainer.learner.try_worst_case(trainer.model, prompt=1, completion=6, k=2, pictured=pictured)
    assert tokens == 80 // (len(pictured.token_ids) + 6) * (len(pictured.token_ids) + 6)  # padded


def test_a_tower_keeps_its_own_attention():
    model, _ = vision_models.make("smolvlm")
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    with packed_attention([model]):
        assert model.config.text_config._attn_implementation == NAME
        with own_attention():
            assert model.config.vision_config._attn_implementation == "eager"
            assert model.config.text_config._attn_implementation == "sdpa"
        assert model.config.text_config._attn_implementation == NAME
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "sdpa"


# -- what is refused


def test_engines_that_take_no_images(config):
    with pytest.raises(ConfigError, match="engine='forked' does not take images"):
        trainer_of(config(engine="forked"), image_rows())
    with pytest.raises(EngineError, match="prompts with images do not run here: image tokens of Gemma3"):
        trainer_of(config(engine="native"), image_rows()).train()
    engine = FakeEngine(lambda prompt, sample, seed: [7, 8 + sample, 2], eos_token_ids=[2])
    trainer = trainer_of(config(max_steps=1), image_rows(), engine=engine)
    trainer.train()
    assert all(prompt.images for prompts, _, _ in engine.calls for prompt in prompts)
    engine.takes_images = False
    with pytest.raises(EngineError, match="FakeEngine does not take images"):
        trainer_of(config(max_steps=1), image_rows(), engine=engine).train()


def test_a_model_without_eyes(config):
    with pytest.raises(ConfigError, match=r"a column 'image', and .* is a tokenizer"):
        RLOOTrainer(make_model(), length, config(), image_rows(), processing_class=make_tokenizer())


def test_images_that_no_column_announces(config):
    inline = [{"prompt": [{"role": "user", "content": [{"type": "image", "image": picture(0)}]}]}] * 2
    stream = iter(image_rows())
    for rows in (inline, stream):
        with pytest.raises(DataError, match=r"a prompt has images, and .* is a tokenizer"):
            RLOOTrainer(make_model(), length, config(max_steps=1), rows, processing_class=make_tokenizer()).train()


def test_a_template_without_a_place_for_images(config):
    model, processor = vision_models.make("gemma3")
    processor.chat_template = "{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"Gemma3Processor"):
        RLOOTrainer(model, length, config(), image_rows(), processing_class=processor)
    model, processor = vision_models.make("qwen2.5-vl")
    processor.chat_template = "{% for m in messages %}{{ m['content'][-1]['text'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"leaves no place for images"):
        RLOOTrainer(model, length, config(), image_rows(), processing_class=processor)


def test_what_a_processor_refuses_is_the_datas_matter(monkeypatch):
    """As a processor of a model that takes one image alone does."""
    _, processor = vision_models.make("gemma3")

    def refuse(*args, **kwargs):
        raise ValueError("only one image per sample is supported")

    monkeypatch.setattr(type(processor), "apply_chat_template", refuse)
    with pytest.raises(DataError, match=r"does not take a prompt with 2 image\(s\): only one image per sample"):
        VisionEncoder(processor, {}).encode(mixed_rows()[0], {})
