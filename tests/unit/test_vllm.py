"""The vLLM engine without vLLM: options, requests, weights, and both ways of running it against a stand-in."""

from __future__ import annotations

import gc
import random
import socket
import sys
import threading
import tomllib
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import nn

from rloom import RLOOConfig, RLOOTrainer
from rloom.errors import ConfigError, EngineError
from rloom.generation import Sampling, choose_engine
from rloom.generation.vllm import VllmEngine, VllmOptions, VllmServerEngine, client, watch
from rloom.generation.vllm.requests import RequestFormat
from rloom.generation.vllm.starting import OLDEST
from rloom.generation.vllm.surroundings import remember_classes, restore_classes
from rloom.generation.vllm.weights import check_sendable, checkpoint_weights, fingerprint
from rloom.models.checksums import CHUNK
from rloom.models.verify import Tolerance
from rloom.types import Prompt
from tests.conftest import make_model, make_tokenizer
from tests.vllm_standin import LLM, install, serving


def make(**options):
    return RLOOConfig("out", report_to="none", per_device_train_batch_size=4, use_cpu=True, **options)


def sampling(**changes):
    return Sampling(**{"max_completion_length": 6, "eos_token_ids": (2,), "pad_token_id": 0, **changes})


def prompts(*lengths):
    return [Prompt(content="", token_ids=[5 + i % 9 for i in range(n)]) for n in lengths]


def assert_drawn_from(model, groups):
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            start = len(group.prompt.token_ids) - 1
            with torch.no_grad():
                scores = model(input_ids=ids).logits[0, start:-1].log_softmax(-1)
            expected = scores.gather(1, ids[0, start + 1 :, None])[:, 0].tolist()
            assert completion.logprobs == pytest.approx(expected, abs=1e-5)


# -- options


def test_both_spellings_mean_the_same():
    for config in (make(use_vllm=True), make(engine="vllm"), make(engine="vllm", use_vllm=True)):
        assert (config.engine, config.use_vllm, config.vllm_mode) == ("vllm", True, "colocate")
    assert RLOOConfig(**make(use_vllm=True).to_dict()).engine == "vllm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "native", "use_vllm": True}, "contradict each other"),
        ({"engine": "vllm", "use_vllm": False}, "contradict each other"),
        ({"vllm_mode": "server"}, "`vllm_mode` has no effect without use_vllm=True"),
        ({"use_vllm": True, "vllm_mode": "servr"}, "did you mean 'server'"),
        ({"use_vllm": True, "vllm_model_impl": "torch"}, "vllm_model_impl"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "set it to 1, or vllm_mode='server'"),
        ({"use_vllm": True, "vllm_server_port": 8001}, "`vllm_server_port` has no effect .* it is for vllm_mode='serv"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 9}, "it is a flag of the server"),
        ({"use_vllm": True, "vllm_mode": "server", "compile_generation": True}, "it is a flag of the server"),
        ({"use_vllm": True, "cache_implementation": "static"}, "`cache_implementation` .* engine='transformers'"),
        ({"use_vllm": True, "vllm_group_port": 9}, "`vllm_group_port` has no effect .* it is for vllm_mode='server'"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_group_port": -1}, "vllm_group_port must be from 0 to 65535"),
        (
            {
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_group_port": 65535,
                "vllm_server_base_url": "http://a:1,http://b:1",
            },
            "vllm_group_port must be from 0 to 65534",
        ),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "a:1,a:1"}, "names a server twice"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1/,a:1"},
            "names a server twice",
        ),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": float("inf")}, "a week at most"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 1.5}, "vllm_gpu_memory_utilization must be in"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.0}, "vllm_server_timeout must be above 0"),
    ],
)
def test_what_is_not_honoured_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_several_processes_need_a_server(monkeypatch):
    monkeypatch.setattr(RLOOConfig, "world_size", 2)
    with pytest.raises(ConfigError, match=r"one process, and there are 2.* vllm_mode='server'"):
        make(engine="vllm")
    assert make(engine="vllm", vllm_mode="server").vllm_servers() == ("http://0.0.0.0:8000",)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"min_token": 3}, "did you mean 'min_tokens'"),
        ({"num_beams": 3}, "no option `num_beams`; there are allowed_token_ids, bad_words"),
        ({"max_tokens": 3}, r"set RLOOConfig\(max_completion_length=…\)"),
        ({"structured_outputs": {}}, "vllm_structured_outputs_regex"),
        ({"temperature": 0.5}, r"set RLOOConfig\(temperature=…\)"),
    ],
)
def test_options_of_generation_are_known_or_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        RequestFormat(sampling(extra=extra))


def test_what_is_asked():
    extra = {"stop_strings": "x", "stop": ["y"], "min_tokens": 2, "bos_token_id": 1}
    options = RequestFormat(sampling(top_k=5, extra=extra)).seeded(4, seed=1, number=0)
    expected = {"n": 4, "top_k": 5, "stop": ["x", "y"], "min_tokens": 2, "stop_token_ids": [2], "ignore_eos": True}
    assert {name: options[name] for name in expected} == expected
    assert "bos_token_id" not in options
    as_json = RequestFormat(sampling(extra={"logit_bias": {"5": 2.0}}))
    assert as_json.seeded(4, seed=1, number=0)["logit_bias"] == {5: 2.0}
    with pytest.raises(ConfigError, match=r"temperature=0.005: vLLM draws at 0.01 instead"):
        RequestFormat(sampling(temperature=0.005))
    seeds = {RequestFormat(sampling()).seeded(4, seed=s, number=n)["seed"] for s in (1, 2) for n in (0, 1)}
    assert len(seeds) == 4
    assert RequestFormat(sampling(temperature=0.0)).seeded(4, seed=1, number=0)["n"] == 1
    off = RequestFormat(sampling(top_k=None, min_p=None))
    assert not off.filtered
    assert [off.seeded(4, seed=1, number=0)[name] for name in ("top_k", "min_p")] == [0, 0.0]


def test_how_answers_are_read():
    asking = RequestFormat(sampling())
    assert asking.completion([5, 2], [-1.0, -2.0], "stop").stop_reason == "eos"
    assert asking.completion([5, 6], [-1.0, -2.0], "stop").stop_reason == "stop_string"
    assert asking.completion([5, 6], [-1.0, -2.0], "length").truncated
    assert asking.completion([], [], "abort").stop_reason == "aborted"
    filtered = RequestFormat(sampling(top_p=0.9)).completion([5], [-1.0], "length")
    assert (filtered.logprobs, filtered.drawn_logprobs) == (None, [-1.0])
    for tokens, logprobs, reason, message in (
        ([5], [], "length", "0 log-probabilities for 1 tokens"),
        ([5], [float("nan")], "length", "not finite"),
        ([5], [-1.0], "error", "ended a completion with 'error'"),
    ):
        with pytest.raises(EngineError, match=message):
            asking.completion(tokens, logprobs, reason)
    with pytest.raises(EngineError, match="1 completions, 2 were asked for"):
        asking.group([filtered], 2)


# -- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_change_of_a_bit_changes_the_fingerprint(dtype):
    torch.manual_seed(0)
    module = nn.Module()
    module.register_buffer("x", (torch.rand(7, 11) * 200).to(dtype)[:, 2:])  # neither contiguous nor whole words
    module.register_buffer("y", torch.ones(6, dtype=dtype))

    def swap():
        module.x[[0, 1]] = module.x[[1, 0]].clone()

    seen = [fingerprint(module)]
    for change in (lambda: module.x[3, 1].add_(1), lambda: module.y.add_(1), lambda: module.y[5].add_(1), swap):
        change()
        seen.append(fingerprint(module))
    assert len(set(seen)) == 5
    assert fingerprint(module) == seen[-1]


def test_a_swap_of_distant_weights_changes_the_fingerprint():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.zeros(CHUNK + 4, 4))  # two words a row
    module.weight.data[0, :2], module.weight.data[CHUNK // 2, :2] = 1.0, 2.0  # at the same place of two chunks
    before = fingerprint(module)
    module.weight.data[0, :2], module.weight.data[CHUNK // 2, :2] = 2.0, 1.0
    assert fingerprint(module) != before


def tiny_moe():
    sizes = {"vocab_size": 46, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes, **heads))


@pytest.mark.parametrize("build", [make_model, lambda: make_model(tie_word_embeddings=True), tiny_moe])
def test_weights_bear_the_names_of_a_checkpoint(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), dict(checkpoint_weights(model, ["lm_head.weight"]))
    assert set(sent) - set(saved) <= {"lm_head.weight"}  # which is sent where it is tied, too
    assert all(torch.equal(saved[name], sent[name]) for name in saved)


def test_the_second_name_of_tied_weights_is_for_those_who_know_it():
    model = make_model(tie_word_embeddings=True)
    assert "lm_head.weight" in dict(checkpoint_weights(model, ["dp0:lm_head.weight"]))
    assert "lm_head.weight" not in dict(checkpoint_weights(model, ["model.norm.weight"]))


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_are_folded_in_and_stay_as_they_are(changes):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], **changes))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = make_model(1)
    plain.load_state_dict(dict(checkpoint_weights(model, ["lm_head.weight"])))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_which_adapters_are_used_and_how_much_is_seen():
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(make_model(), options).eval()
    model.add_adapter("other", options)
    for name, parameter in model.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    ids, seen = torch.tensor([[5, 6, 7, 8]]), []

    def is_sent():
        seen.append(fingerprint(model))
        plain = make_model(1)
        plain.load_state_dict(dict(checkpoint_weights(model, ["lm_head.weight"])))
        with torch.no_grad():
            assert torch.allclose(plain(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)

    is_sent()
    with model.disable_adapter():
        is_sent()
    model.set_adapter("other")
    is_sent()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("other", 0.3)
    is_sent()
    model.merge_adapter()
    with model.disable_adapter():
        is_sent()
    assert len(set(seen)) == 5


def test_weights_that_cannot_be_sent_are_refused():
    from peft import PromptTuningConfig, get_peft_model

    model = make_model()
    model.is_quantized = True
    with pytest.raises(EngineError, match="quantized"):
        check_sendable(model)
    prefix = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(EngineError, match="virtual tokens"):
        check_sendable(get_peft_model(make_model(), prefix))


def test_four_bit_bases_and_images_are_refused_at_the_start(monkeypatch, tmp_path, config, rows):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("PIL")
    from rloom.models.adapters import lora, quantization_config
    from tests import vision_models
    from tests.standins import save_llama

    install(monkeypatch)
    reward = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    # 4-bit weights come in blocks of 64.
    save_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)
    four_bits = {"quantization_config": quantization_config(load_in_4bit=True), "peft_config": lora(r=2)}
    with pytest.raises(EngineError, match=r"quantized ones cannot be handed over yet\. Leave `use_vllm` \(or"):
        RLOOTrainer(str(tmp_path / "model"), reward, config(use_vllm=True), rows, **four_bits)
    model, processor = vision_models.make("gemma3")
    seen = [{"prompt": [{"role": "user", "content": "what"}], "image": vision_models.picture(0)}] * 4
    with pytest.raises(ConfigError, match="engine='vllm' does not take images"):
        RLOOTrainer(model, reward, config(use_vllm=True), seen, processing_class=processor)
    assert not LLM.made


def test_the_extra_asks_for_the_oldest_that_is_known():
    """And nothing else installs vLLM: neither the other extras nor what development installs."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.pop("vllm") == [f"vllm>={'.'.join(map(str, OLDEST))}"]
    assert not any("vllm" in requirement for extra in extras.values() for requirement in extra)
    assert "vllm" not in (root / "constraints.txt").read_text()


# -- in this process


def test_classes_that_vllm_changes_are_given_back():
    class Decoder(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

    class Compiled:
        pass

    ours, theirs = nn.Sequential(Decoder()), nn.Sequential(Decoder())
    own, before = Decoder.__init__, remember_classes(ours)
    Decoder.__bases__, Decoder.__init__ = (nn.Linear, Compiled), lambda self: None
    Decoder.__call__ = lambda self, x: "compiled"
    restore_classes(before, theirs)
    assert (Decoder.__bases__, Decoder.__init__) == ((nn.Linear,), own)
    assert ours(torch.zeros(1, 2)).shape == (1, 2)
    assert theirs(torch.zeros(1, 2)) == "compiled"
    assert isinstance(theirs[0], Decoder)


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    model = make_model()
    with pytest.raises(EngineError, match=r"engine='vllm': .* pip install \"rloom\[vllm\]\", .* Leave `use_vllm` \("):
        choose_engine(lambda: model, sampling(), wanted="vllm", tokenizer=make_tokenizer())
    install(monkeypatch, version=(0, 21, 2))
    with pytest.raises(EngineError, match=r"vLLM 0.21.2 is too old: 0.22 is the oldest"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())


def test_a_rollout_and_its_weights(monkeypatch):
    install(monkeypatch)
    model = make_model(tie_word_embeddings=True)
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    options = VllmOptions(max_model_length=40, gpu_memory_utilization=0.2, model_impl="transformers")
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
    assert torch.rand(()) == expected
    [llm] = LLM.made
    wanted = {"load_format": "dummy", "dtype": "float32", "max_model_len": 40, "gpu_memory_utilization": 0.2,
              "model_impl": "transformers", "enforce_eager": True, "logprobs_mode": "processed_logprobs"}  # fmt: skip
    assert wanted.items() <= llm.options.items()
    for change in (None, lambda w: w.data.mul_(2), lambda w: w.data[0].add_(1)):
        if change is not None:
            change(model.model.layers[0].mlp.up_proj.weight)
        groups = list(engine.generate(prompts(3, 5), 2, seed=0))
        assert [len(group.prompt.token_ids) for group in groups] == [5, 3]  # as they finish
        assert_drawn_from(model, groups)
        again = list(engine.generate(prompts(3, 5), 2, seed=0))
        assert [g.completions for g in again] == [g.completions for g in groups]
    assert (engine.syncs, llm.resets) == (3, 3)
    assert list(engine.generate([], 2, seed=0)) == list(engine.generate(prompts(3), 0, seed=0)) == []
    with pytest.raises(EngineError, match=r"prompt of 38 tokens and a completion of 6 .* vllm_max_model_length"):
        list(engine.generate(prompts(38), 2, seed=0))
    left = engine.generate(prompts(3, 5), 2, seed=0)
    next(left)
    left.close()
    assert not llm.waiting
    llm.llm_engine.has_unfinished_requests = lambda: False
    with pytest.raises(EngineError, match="vLLM has lost 2 of 2 prompts"):
        list(engine.generate(prompts(3, 5), 2, seed=0))
    with pytest.raises(EngineError, match="num_generations must be 0 or positive, not -1"):
        list(engine.generate(prompts(4), -1, seed=0))
    second = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    assert engine._llm is None  # one at a time
    assert_drawn_from(model, engine.generate(prompts(4), 1, seed=0))
    assert second._llm is None


def test_a_rollout_that_nobody_finished_does_not_reach_into_the_next(monkeypatch):
    install(monkeypatch)
    model = make_model()
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    for change in (0.0, 0.5):
        left = engine.generate(prompts(3, 5, 4), 2, seed=0)
        next(left)  # and is held on to, as a traceback does after an error in a reward
        model.model.norm.weight.data[0] += change
        groups = list(engine.generate(prompts(4, 6), 2, seed=0))
        assert sorted(len(group.prompt.token_ids) for group in groups) == [4, 6]
        assert_drawn_from(model, groups)
        with pytest.raises(EngineError, match=r"another rollout began while 2 of 3 prompts .* one at a time"):
            next(left)
    left = engine.generate(prompts(3, 5, 4), 2, seed=0)
    next(left)
    later = engine.generate(prompts(3, 5, 4), 2, seed=0)
    next(later)
    left.close()  # takes nothing from the one that is under way
    assert len(list(later)) == 2


def test_the_process_is_left_as_it_was(monkeypatch):
    install(monkeypatch)
    model, precision = make_model(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which torch replaces too
    group = {"store": torch.distributed.HashStore(), "world_size": 1, "rank": 0}
    torch.distributed.init_process_group("gloo", **group)  # as DeepSpeed's
    hook = sys.excepthook
    try:
        torch.set_float32_matmul_precision("high")
        engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")  # as tf32=True does
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        second = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert sys.excepthook is hook
        assert gc.get_freeze_count() == 0
        engine.close(), second.close()
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
        torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(precision)


def test_what_others_draw_while_it_generates_is_not_drawn_again(monkeypatch):
    install(monkeypatch)
    model, drawn, step = make_model(), [], LLM._step

    def stepping(self):
        drawn.append((random.random(), np.random.rand()))  # as a reward does in its thread
        return step(self)

    monkeypatch.setattr(LLM, "_step", stepping)
    random.seed(1), np.random.seed(1)
    expected = [(random.random(), np.random.rand()) for _ in range(5)]
    random.seed(1), np.random.seed(1)
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())  # starts, and draws for its proof
    list(engine.generate(prompts(3, 5, 4), 2, seed=0))
    assert drawn == expected


def test_vllm_ends_with_its_engine(monkeypatch):
    install(monkeypatch)
    model = make_model()
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    gone, ended = weakref.ref(engine), LLM.ended
    del engine
    gc.collect()
    assert gone() is None
    assert LLM.ended == ended + 1
    with pytest.raises(EngineError, match=r"prompt of 24 tokens .* context length of 20: .* vllm_max_model_length"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=VllmOptions(max_model_length=20))
    assert LLM.ended == ended + 2  # what a start has failed on is let go of too
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", lambda **_: 1 / 0)
    with pytest.raises(EngineError, match="vLLM refuses what it is asked: division by zero"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())


def test_what_vllm_says_at_its_start_is_told_with_our_names(monkeypatch):
    def refuse(**_):
        group = {"store": torch.distributed.HashStore(), "world_size": 1, "rank": 0}
        torch.distributed.init_process_group("gloo", **group)
        raise ValueError("try increasing `gpu_memory_utilization` or decreasing `max_model_len`")

    install(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuse)
    model = make_model()
    with pytest.raises(EngineError, match=r"The options here: vllm_gpu_memory_utilization, vllm_max_model_length\."):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    assert not torch.distributed.is_initialized()  # what vLLM has made before it failed


def test_filters_are_hinted_at_once(monkeypatch, caplog):
    install(monkeypatch)
    model = make_model()
    options = VllmOptions(regex="a+")  # which is tried with a request of its own
    VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
    assert caplog.text.count("`mismatch` is not measured") == 1


def test_weights_that_do_not_arrive_are_an_error(monkeypatch):
    model = make_model()
    install(monkeypatch, deaf_to=("model.norm.weight",))
    with pytest.raises(EngineError, match=r"did not find 1 of its weights in the policy's, such as model.norm.weight"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    install(monkeypatch, can_reset=False)
    with pytest.raises(EngineError, match="kept keys and values of the old weights"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())
    install(monkeypatch)
    monkeypatch.setattr("tests.vllm_standin.Model.load_weights", lambda self, weights: {n for n, _ in weights})
    with pytest.raises(EngineError, match=r"log-probabilities are .* per token off .* another model"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer())


def test_sleep(monkeypatch):
    install(monkeypatch)
    model, options = make_model(), VllmOptions(sleeps=True)
    with pytest.raises(EngineError, match="the model is on the cpu"):
        VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
    monkeypatch.setattr("rloom.generation.vllm.colocated._check_sleep", lambda *_: None)
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
    for _ in range(2):  # what sleep forgets is sent again
        assert LLM.made[-1].asleep
        assert_drawn_from(model, engine.generate(prompts(4), 2, seed=0))
    left = engine.generate(prompts(3, 5), 2, seed=0)
    next(left)
    left.close()
    assert LLM.made[-1].asleep  # also when nobody asked on, and when something was refused
    with pytest.raises(EngineError, match="context length"):
        list(engine.generate(prompts(500), 2, seed=0))
    assert LLM.made[-1].asleep


def test_training_and_images(monkeypatch, config, rows):
    install(monkeypatch)
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    trainer = RLOOTrainer(
        make_model(), reward, config(max_steps=2, engine="vllm", vllm_max_model_length=99, beta=0.1), rows,
        processing_class=make_tokenizer(),
    )  # fmt: skip
    assert LLM.made[0].options["max_model_len"] == 99
    trainer.train()
    found = [log["mismatch/max"] for log in trainer.state.log_history if "mismatch/max" in log]
    assert len(found) == 2
    assert max(found) < 1e-4
    assert not trainer.collector.engine.takes_images


# -- over HTTP


def server_engine(service, model, timeout=20.0, **changes):
    options = VllmOptions(mode="server", servers=(service.address,), timeout=timeout, **changes)
    return VllmServerEngine(lambda: model, sampling(), options=options)


def test_a_rollout_over_http(tmp_path):
    model = make_model()
    (tmp_path / "plain").touch()
    umask = 0o666 & ~(tmp_path / "plain").stat().st_mode
    with serving(model.config) as service:
        engine = server_engine(service, model, weights_dir=tmp_path / "weights")
        assert_drawn_from(model, engine.generate(prompts(3, 5, 4), 3, seed=0))
        syncs = engine.syncs
        model.model.norm.weight.data[0] += 0.5
        assert_drawn_from(model, engine.generate(prompts(3, 5, 4), 3, seed=0))
        assert engine.syncs == syncs + 1
        list(engine.generate(prompts(3), 3, seed=0))
        assert engine.syncs == syncs + 1
        service.version = "another"  # it was started again
        list(engine.generate(prompts(3), 3, seed=0))
        assert engine.syncs == syncs + 2
        assert not list((tmp_path / "weights").iterdir())
        assert service.modes == {0o666 & ~umask}  # the server may be another user's
        request = next(content for path, content in service.calls if path == "/v1/completions")
        assert {"model": "served", "return_token_ids": True, "logprobs": 0}.items() <= request.items()
        draw, given = service.v1_completions, threading.Event()
        service.v1_completions = lambda content: (len(content["prompt"]) == 3 or given.wait(30), draw(content))[1]
        groups = engine.generate(prompts(3, 4), 2, seed=0)
        next(groups)
        service.version = "another"
        given.set()
        with pytest.raises(EngineError, match="given weights by somebody else"):
            list(groups)


def test_a_rollout_over_http_that_nobody_finished_is_called_off():
    model, running = make_model(), []
    with serving(model.config) as service:
        engine, draw = server_engine(service, model), service.v1_completions

        def slow(content):
            if len(content["prompt"]) == 5:
                running.append("one")
                service.here.connection.recv(1, socket.MSG_PEEK)  # returns when the client has gone
                running.pop()
            return draw(content)

        service.v1_completions, service.reset_prefix_cache = slow, lambda _: {"success": not running}
        left = engine.generate(prompts(3, 5), 2, seed=0)
        next(left)
        model.model.norm.weight.data[0] += 0.5
        assert_drawn_from(model, engine.generate(prompts(3, 4), 2, seed=0))
        with pytest.raises(EngineError, match=r"another rollout began while 1 of 2 prompts .* one at a time"):
            list(left)
        left = engine.generate(prompts(3, 5), 2, seed=0)
        next(left)
        left.close()
        model.model.norm.weight.data[0] += 0.5
        assert_drawn_from(model, engine.generate(prompts(3, 4), 2, seed=0))


@pytest.mark.parametrize("address", ["http://", "http://127.0.0.1:port"])
def test_what_is_no_address(address):
    with pytest.raises(EngineError, match="is no address of a vLLM server"):
        client.Client(address)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missing": ("server_info",)}, "does not know /server_info.* developer mode.* VLLM_SERVER_DEV_MODE=1"),
        ({"missing": ("weight_checker",)}, "does not know /weight_checker.* older than 0.22"),
        ({"missing": ("health",)}, "Is a vLLM server at http://127.0.0.1:.*"),
        ({"logprobs_mode": "raw_logprobs"}, "as raw_logprobs, before temperature: .*--logprobs-mode processed"),
        ({"deaf": True}, "does not take 21 of its weights from ours"),
        ({"reset_prefix_cache": lambda _: {"success": False}}, "kept keys and values"),
    ],
)
def test_a_server_that_is_not_as_it_should_be(changes, message):
    model = make_model()
    with serving(model.config, **changes) as service, pytest.raises(EngineError, match=message):
        # So long it is waited for requests to end.
        server_engine(service, model, timeout=1.0)


OLDER = ("weight_info", "weight_checker", "update_weight_version")


def test_a_server_without_versions_is_proved_by_what_it_answers():
    """As those before 0.32 are: no version, no checksums, no word on its cache."""
    model = make_model()
    older = {"missing": OLDER, "reset_prefix_cache": lambda _: None}
    with serving(model.config, **older) as service:
        engine = server_engine(service, model)
        list(engine.generate(prompts(3), 2, seed=0))
        syncs = engine.syncs
        model.model.norm.weight.data += 1e-3
        list(engine.generate(prompts(3), 2, seed=0))
        assert engine.syncs == syncs + 1
        service.model.inner.model.norm.weight.data += 1.0  # somebody else's weights
        list(engine.generate(prompts(3), 2, seed=0))
        assert engine.syncs == syncs + 2
        rollout = engine.generate(prompts(3), 2, seed=0)
        next(rollout)
        service.model.inner.model.norm.weight.data += 1.0
        with pytest.raises(EngineError, match="given other weights while it generated"):
            list(rollout)
    with serving(model.config, deaf=True, **older) as service:
        service.model.inner.load_state_dict(model.state_dict())
        with pytest.raises(EngineError, match="answers alike with two models that differ"):
            server_engine(service, model)


def test_a_server_that_stops_taking_weights():
    model = make_model()
    with serving(model.config) as service:
        engine = server_engine(service, model)
        service.deaf = True
        model.model.norm.weight.data += 1e-3
        for _ in range(2):  # asking again does not help
            with pytest.raises(EngineError, match=r"as it did before the last weights were sent"):
                list(engine.generate(prompts(3), 2, seed=0))
        model.model.norm.weight.data += 1.0
        with pytest.raises(EngineError, match=r"does not draw from the policy: .* Does it serve this model"):
            list(engine.generate(prompts(3), 2, seed=0))


def test_a_server_that_is_not_there_or_dies(monkeypatch, caplog):
    model = make_model()
    options = VllmOptions(mode="server", servers=("127.0.0.1:9",), timeout=0.2)
    with pytest.raises(EngineError, match=r"cannot be reached.* waited 0.2 s .vllm_server_timeout.* Is it running"):
        VllmServerEngine(lambda: model, sampling(), options=options)
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    with serving(model.config) as service:
        engine = server_engine(service, model)
        engine.options, engine.servers[0].client.timeout = replace(engine.options, timeout=0.5), 0.5
        hangs = threading.Event()
        service.v1_completions, service.sick = lambda _: hangs.wait(30), ("health",)
        with pytest.raises(EngineError, match=r"answered /health with 503.* waited 0.5 s"):
            list(engine.generate(prompts(3), 2, seed=0))
        hangs.set()
        hangs, service.sick = threading.Event(), ()
        service.collective_rpc = lambda _: hangs.wait(30)
        model.model.norm.weight.data += 1.0
        with pytest.raises(
            EngineError, match=r"did not answer /collective_rpc within 0.5 s.* raise vllm_server_timeout"
        ):
            list(engine.generate(prompts(3), 2, seed=0))
        hangs.set()
        del service.collective_rpc, service.v1_completions
        service.sick, service.sick_with = ("health",), 502  # by a proxy before it
        with pytest.raises(EngineError, match=r"answered /health with 502.* waited 0.1 s"):
            client.Client(service.address).wait(0.1)
        assert "waiting for" not in caplog.text
        monkeypatch.setattr(client, "PATIENT_SECONDS", 0.0)
        with pytest.raises(EngineError, match=r"waited 1.2 s"):
            client.Client(service.address).wait(1.2)
        assert caplog.text.count(f"waiting for the vLLM server at {service.address}, up to 1.2 s") == 1
        service.sick, service.sick_with, service.cut = (), 503, ("v1_completions",)
        with pytest.raises(EngineError, match=r"cannot be reached: IncompleteRead.* when it is well again, go on"):
            list(engine.generate(prompts(3), 2, seed=0))
        service.cut = ()
        service.v1_completions, service.sick = lambda _: {"error": "no"}, ("v1_completions",)
        with pytest.raises(EngineError, match=r"answered /v1/completions with 503"):
            list(engine.generate(prompts(3), 2, seed=0))


def test_dtypes_that_differ_are_told(caplog, monkeypatch):
    model = make_model()
    with serving(model.config) as service, torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(Tolerance, "VLLM_FLOAT32", 0.0)
        server_engine(service, model, dtype=torch.bfloat16)
        assert "computes in torch.float32 and the trainer in torch.bfloat16" in caplog.text
    with serving(model.config, dtype="torch.bfloat16") as service:
        engine = server_engine(service, model)
        assert "computes in torch.bfloat16 and the trainer in torch.float32" in caplog.text
        assert engine.servers[0].served.dtype == torch.bfloat16
