"""A vLLM server that is really started, on the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from rloom import RLOOTrainer
from rloom.errors import EngineError
from rloom.generation.vllm import VllmOptions, VllmServerEngine
from rloom.generation.vllm.client import Client, ServerError
from tests.conftest import make_tokenizer
from tests.services import free_port
from tests.vllm.conftest import DEVICE, assert_drawn_from, in_order, prompts, sampling, tiny

FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.2"]
MODE = ["--logprobs-mode", "processed_logprobs"]


class Server:
    """A process of ours, ended by us."""

    def __init__(self, folder, log, *flags, **environment):
        port = free_port()
        self.address, self.log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
        self._run(command, {"VLLM_SERVER_DEV_MODE": "1", **environment})

    def _run(self, command, variables):
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **variables}, start_new_session=True
            )

    def stop(self):
        """End it, and what it has started: vLLM's engine outlives a server that is killed."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with other weights than those that are trained."""
    path = tmp_path_factory.mktemp("model")
    tiny(7).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    made = Server(folder, tmp_path_factory.mktemp("log") / "server.log", *MODE)
    yield made
    made.stop()


def engine(server, model, **changes):
    options = VllmOptions(mode="server", servers=(server.address,), timeout=300)
    return VllmServerEngine(lambda: model, sampling(**changes), options=options)


def test_it_draws_from_the_policy_and_follows_it(server, caplog):
    model, some = tiny(), prompts("ab", "hello there, you", "x")
    made = engine(server, model)  # waits for the server to start
    assert all(record.message.startswith("waiting for") for record in caplog.records)
    first = in_order(made, some, 4, seed=3)
    assert_drawn_from(model, some, first)
    syncs = made.syncs
    assert in_order(made, some, 4, seed=3) == first
    assert made.syncs == syncs  # nothing changed, nothing was sent
    model.model.layers[0].mlp.up_proj.weight.data[2, 3] += 2.0
    assert_drawn_from(model, some, in_order(made, some, 4))
    assert made.syncs == syncs + 1
    assert not list(made.folder.iterdir())  # what was read is removed


def test_weights_that_somebody_else_has_sent_are_replaced(server):
    one, other, some = tiny(1), tiny(2), prompts("ab")
    first, second = engine(server, one), engine(server, other)
    assert_drawn_from(one, some, in_order(first, some))
    in_order(second, some)
    # What is asked of the server after each answer.
    with pytest.raises(EngineError, match=r"given weights by somebody else: use one server for one run"):
        first.servers[0].confirm()
    assert_drawn_from(one, some, in_order(first, some))


def test_a_rollout_that_nobody_finished_is_called_off(server):
    model, some = tiny(), prompts("ab", "hello there, you", "x")
    made = engine(server, model, max_completion_length=100, eos_token_ids=tuple(range(5, 12)))
    left = made.generate(some * 20, 4, seed=0)
    next(left)  # and held on to, as by a traceback
    model.model.norm.weight.data[0] += 0.1
    assert_drawn_from(model, some, in_order(made, some))
    with pytest.raises(EngineError, match="another rollout began"):
        list(left)


def test_how_it_draws_and_ends(server):
    model, some, tokenizer = tiny(), prompts("ab", "hello there, you"), make_tokenizer()
    greedy = in_order(engine(server, model, temperature=0.0), some)
    ids = torch.tensor([some[0].token_ids], device=DEVICE)
    expected = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=2, pad_token_id=0)
    assert [c.token_ids for c in greedy[0]] == [expected[0, ids.shape[1] :].tolist()] * 2
    changes = {"temperature": 0.7, "eos_token_ids": (2, 10, 11, 12, 13), "extra": {"stop_strings": ["h", "1", "t "]}}
    groups = in_order(engine(server, model, **changes), some, 8)
    assert_drawn_from(model, some, groups, temperature=0.7)
    for completion in (c for group in groups for c in group):
        text = tokenizer.decode(completion.token_ids)
        ended = completion.token_ids[-1] in changes["eos_token_ids"]
        stopped = text.endswith(("h", "1", "t "))
        assert completion.stop_reason == ("eos" if ended else "stop_string" if stopped else "length")
    [group] = in_order(engine(server, model, top_k=1), some[:1], 2)
    assert [c.token_ids for c in group] == [c.token_ids for c in greedy[0]]
    assert group[0].logprobs is None


def test_structured_outputs(server):
    model = tiny()
    options = VllmOptions(mode="server", servers=(server.address,), regex="[ab]{2,4}")
    [group] = in_order(VllmServerEngine(lambda: model, sampling(), options=options), prompts("x"), 4)
    texts = [make_tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in group]
    assert all(set(text) <= {"a", "b"} and 2 <= len(text) <= 4 for text in texts)


def test_what_does_not_fit_is_refused(server):
    made = engine(server, tiny(), max_completion_length=120)
    with pytest.raises(EngineError, match=r"context length of 128: .* --max-model-len"):
        list(made.generate(prompts("a" * 20), 2, seed=0))


@pytest.mark.parametrize("lora", [False, True])
def test_training(server, config, rows, lora):
    from peft import LoraConfig

    trainer = RLOOTrainer(
        tiny(),
        lambda completions, **_: [text.count("a") - len(text) / 4 for text in completions],
        config(max_steps=3, learning_rate=1e-2, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.address),
        rows,
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_alpha=64) if lora else None,
    )
    syncs = trainer.collector.engine.syncs
    trainer.train()
    assert trainer.collector.engine.syncs == syncs + 2
    found = [log["mismatch/max"] for log in trainer.state.log_history if "mismatch/max" in log]
    assert len(found) == 3
    assert max(found) < 1e-4


class Served(Server):
    """One that `rloom vllm-serve` starts."""

    def __init__(self, folder, log, *flags):
        port = free_port()
        self.address, self.log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "rloom", "vllm-serve", str(folder), "--port", str(port), *flags]
        self._run([*command, "--dtype", "float32", "--vllm-flags", "--enforce-eager", *FLAGS[3:]], {})


def test_two_servers_by_broadcast_of_which_one_is_killed(folder, tmp_path, caplog):
    """Weights go into the servers' memory, over gloo; nothing is written."""
    servers = [Served(folder, tmp_path / f"{n}.log", "--transfer", "gloo") for n in range(2)]
    try:
        model, some = tiny(), prompts("ab", "hello there, you", "x", "yes", "a b c", "well")
        addresses = tuple(server.address for server in servers)
        options = VllmOptions(
            mode="server", servers=addresses, timeout=300, group_port=0, weights_dir=tmp_path / "weights"
        )
        made = VllmServerEngine(lambda: model, sampling(max_completion_length=60), options=options)
        assert_drawn_from(model, some, in_order(made, some, 4))
        model.model.layers[0].mlp.up_proj.weight.data[2, 3] += 2.0
        assert_drawn_from(model, some, in_order(made, some, 4))
        assert not (tmp_path / "weights").exists()
        groups = made.generate(some * 20, 4, seed=1)
        first = next(groups)
        servers[1].process.kill()
        found = [first, *groups]
        assert len(found) == 120  # none twice, none missing
        assert len({id(group.prompt) for group in found}) == 6
        model.model.layers[0].mlp.up_proj.weight.data[2, 3] -= 1.0
        assert_drawn_from(model, some, in_order(made, some, 4))
        assert "left out" in caplog.text
        assert made.usable == made.servers[:1]
    finally:
        [server.stop() for server in servers]


def test_adapters_alone(folder, tmp_path, config, rows):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules="all-linear", lora_alpha=64)
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"]
    server = Server(folder, tmp_path / "lora.log", *MODE, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    try:
        trainer = RLOOTrainer(
            tiny(7),  # what the server serves
            lambda completions, **_: [text.count("a") - len(text) / 4 for text in completions],
            config(
                max_steps=3, learning_rate=1e-2, use_vllm=True, vllm_mode="server",
                vllm_server_base_url=server.address, vllm_server_timeout=300,
            ),
            rows, processing_class=make_tokenizer(), peft_config=lora,
        )  # fmt: skip
        made = trainer.collector.engine
        assert made.servers[0].served.adapter_only
        syncs = made.syncs
        trainer.train()
        assert made.syncs > syncs
        found = [log["mismatch/max"] for log in trainer.state.log_history if "mismatch/max" in log]
        assert len(found) == 3
        assert max(found) < 1e-4
        with trainer.model.disable_adapter():
            assert_drawn_from(trainer.model, prompts("ab"), in_order(made, prompts("ab"), 4))
        again = engine(server, trainer.model)  # as a run that was started again: the same adapter, by the same name
        assert_drawn_from(trainer.model, prompts("ab"), in_order(again, prompts("ab"), 4))
        with pytest.raises(EngineError, match="does not draw from the policy"):  # another base than is served
            engine(server, get_peft_model(tiny(8), lora))
        with pytest.raises(EngineError, match="takes adapters alone"):
            engine(server, tiny(7))
    finally:
        server.stop()


def test_a_server_without_versions_is_proved_by_what_it_answers(server, monkeypatch):
    """As those before 0.32 are: no version, no checksums, no word on its cache."""
    own = Client._raw

    def older(self, connection, method, path, content=None):
        if path.startswith(("/weight_info", "/weight_checker", "/update_weight_version")):
            raise ServerError(404, path, "Not Found")
        return own(self, connection, method, path, content)

    monkeypatch.setattr(Client, "_raw", older)
    model, some = tiny(), prompts("ab", "x")
    made = engine(server, model)
    assert_drawn_from(model, some, in_order(made, some))
    model.lm_head.weight.data += torch.randn_like(model.lm_head.weight)
    assert_drawn_from(model, some, in_order(made, some))
    syncs, other = made.syncs, tiny(9)
    engine(server, other)  # somebody else's
    assert_drawn_from(model, some, in_order(made, some))
    assert made.syncs == syncs + 1


@pytest.mark.slow
def test_a_server_that_was_started_otherwise_is_refused(folder, tmp_path):
    plain = Server(folder, tmp_path / "plain.log", VLLM_SERVER_DEV_MODE="0")
    raw = Server(folder, tmp_path / "raw.log")
    untied = ["--load-format", "dummy", "--hf-overrides", '{"tie_word_embeddings": false}']
    good = Server(folder, tmp_path / "good.log", *MODE, *untied)
    try:
        model = tiny(tie_word_embeddings=True)
        made = engine(good, model)
        model.model.embed_tokens.weight.data[5] += 1.0
        assert_drawn_from(model, prompts("ab"), in_order(made, prompts("ab"), 4))
        with pytest.raises(EngineError, match=r"not in\s+developer mode, .* VLLM_SERVER_DEV_MODE=1 vllm serve"):
            engine(plain, tiny())
        with pytest.raises(EngineError, match=r"raw_logprobs, before temperature: .* --logprobs-mode"):
            engine(raw, tiny())
        with pytest.raises(EngineError, match=r"hidden_size is 64, .* is 128: start the server with the model that"):
            engine(good, tiny(hidden_size=128))
    finally:
        plain.stop(), raw.stop(), good.stop()
    with pytest.raises(EngineError, match=r"cannot be reached: .*; waited 1 s \(vllm_server_timeout\)"):
        Client(raw.address).wait(1)
