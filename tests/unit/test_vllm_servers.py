"""Several vLLM servers, several processes, and weights by vLLM's own protocol; with stand-ins over HTTP."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rloom.cli.main import main
from rloom.errors import EngineError
from rloom.generation.vllm import (
    VllmOptions,
    VllmServerEngine,
    following,
    proof,
    remote,
    server,
    shared,
    transfer,
    watch,
)
from rloom.generation.vllm.client import SilentError
from rloom.generation.vllm.outgoing import version_of
from rloom.generation.vllm.weights import fingerprint
from rloom.training.collector import Collector
from rloom.training.processes import ALONE
from rloom.types import Completion
from tests.conftest import make_model
from tests.services import free_port
from tests.unit.test_vllm import OLDER, assert_drawn_from, prompts, sampling
from tests.vllm_standin import serving


def engine_of(services, model, timeout=30.0, **changes):
    addresses = tuple(service.address for service in services)
    options = VllmOptions(mode="server", servers=addresses, timeout=timeout, **changes)
    return VllmServerEngine(lambda: model, sampling(), options=options)


@pytest.fixture
def two():
    model = make_model()
    with serving(model.config) as first, serving(model.config) as second:
        yield model, first, second


def asked(service):
    """The prompts that a server was asked for, those of proofs (of eight tokens) left out."""
    found = [content for path, content in service.calls if path == "/v1/completions"]
    return sum(content["max_tokens"] != 8 for content in found)


def tokens_of(groups):
    return {tuple(g.prompt.token_ids): [c.token_ids for c in g.completions] for g in groups}


LENGTHS = (3, 4, 5, 6, 7, 8)


def test_requests_are_spread_and_noise_does_not_depend_on_the_server(two):
    model, first, second = two
    both, one = engine_of(two[1:], model), engine_of([first], model)
    found = list(both.generate(prompts(*LENGTHS), 2, seed=5))
    assert_drawn_from(model, found)
    assert {len(g.prompt.token_ids) for g in found} == set(LENGTHS)
    assert asked(first) == asked(second) == 3
    assert tokens_of(one.generate(prompts(*LENGTHS), 2, seed=5)) == tokens_of(found)
    syncs = both.syncs
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, both.generate(prompts(*LENGTHS), 2, seed=5))
    assert both.syncs == syncs + 1


def test_weights_are_written_once_for_all_servers(two, tmp_path, monkeypatch):
    from rloom.generation.vllm import outgoing

    model, *services = two
    engine, written = engine_of(services, model, weights_dir=tmp_path), []
    write = outgoing._write
    monkeypatch.setattr(outgoing, "_write", lambda path, *rest: (written.append(path), write(path, *rest)))
    model.model.norm.weight.data[0] += 0.5
    list(engine.generate(prompts(3), 2, seed=0))
    assert len(written) == 1
    assert not list(tmp_path.iterdir())


def test_a_server_that_dies_is_left_out_and_comes_back(two, caplog):
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions

    def dies(content):
        second.die()
        return draw(content)

    second.v1_completions = dies
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert sorted(len(g.prompt.token_ids) for g in found) == list(LENGTHS)  # none twice, none missing
    assert_drawn_from(model, found)
    assert "left out for the rest of this rollout, its requests go to 1 others" in caplog.text
    assert second.address in caplog.text
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert f"the vLLM server at {second.address} does not answer: left out until it does" in caplog.text
    assert engine.usable == engine.servers[:1]
    with serving(model.config, port=second.port) as back:  # as it was started: with other weights
        assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
        assert asked(back) == 3
        assert f"{second.address} is back and has the policy's weights" in caplog.text
    first.die()
    engine.options = replace(engine.options, timeout=0.2)
    with pytest.raises(EngineError, match=r"none of 2 vLLM servers has answered for 0.2 s"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_server_that_was_silent_for_a_moment_is_not_proved_again(two, monkeypatch, caplog):
    """It has its weights still, and another process may be drawing from them: a proof would send other numbers."""
    model, first, second = two
    engine = engine_of([first, second], model)
    list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    calls, drawn = len(second.calls), asked(second)
    with monkeypatch.context() as silent:
        silent.setattr(engine.servers[1].client, "is_up", lambda: False)
        assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
        assert engine.usable == engine.servers[:1]
    assert asked(second) == drawn
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert engine.usable == engine.servers
    assert asked(second) == drawn + 3
    assert {path for path, _ in second.calls[calls:]} <= {"/health", "/weight_info", "/v1/completions"}
    assert f"{second.address} is back and has the policy's weights" in caplog.text
    with monkeypatch.context() as silent:
        silent.setattr(engine.servers[1].client, "is_up", lambda: False)
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_server_that_did_not_answer_a_question_is_not_proved_again(two, monkeypatch):
    """It was silent while it was asked which weights it has, and nothing was sent."""
    model, first, second = two
    engine = engine_of([first, second], model)
    list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    calls, server = len(second.calls), engine.servers[1]
    with monkeypatch.context() as silent:

        def confirm(seconds):
            raise SilentError("no answer")

        silent.setattr(server, "confirm", confirm)
        assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
        assert engine.usable == engine.servers[:1]
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert engine.usable == engine.servers
    assert {path for path, _ in second.calls[calls:]} <= {"/health", "/weight_info", "/v1/completions"}


def test_one_that_is_back_takes_the_place_of_one_that_dies(two, monkeypatch):
    """The first dies as it is sent weights; the second, silent before, answers again, and comes later."""
    model, first, second = two
    engine = engine_of([first, second], model)
    with monkeypatch.context() as silent:
        silent.setattr(engine.servers[1].client, "is_up", lambda: False)
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    first.collective_rpc = lambda _: first.die()
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert engine.usable == engine.servers[1:]
    second.collective_rpc = lambda _: second.die()
    engine.options = replace(engine.options, timeout=0.2)
    model.model.norm.weight.data[0] += 0.5
    with pytest.raises(EngineError, match=second.address):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_server_of_another_shape_is_sent_nothing(two, tmp_path):
    """Weights that do not fit would leave it unusable for the right model too."""
    model, service, _ = two
    make_model(hidden_size=64).config.save_pretrained(tmp_path / "other")
    service.folder = str(tmp_path / "other")
    with pytest.raises(EngineError, match=r"serves .*other, whose hidden_size is 64, and that of"):
        engine_of([service], model)
    assert not [path for path, _ in service.calls if "rpc" in path or "update" in path]
    model.config.save_pretrained(tmp_path / "same")
    service.folder = str(tmp_path / "same")
    assert_drawn_from(model, engine_of([service], model).generate(prompts(3), 2, seed=0))
    service.weight_checker, service.sick, service.sick_with = lambda _: {"error": "meta"}, ("weight_checker",), 500
    with pytest.raises(EngineError, match=r"/weight_checker with 500.* start it again"):
        engine_of([service], model)


def test_adapters_that_are_merged_are_told(two, caplog):
    model, service, _ = two
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    engine_of([service], adapted)
    assert "the adapter merged in, at every update (the server was not started for adapters" in caplog.text


def test_the_main_process_sends_weights_where_it_has_nothing_to_ask_for(two):
    """In a round of `dynamic_sampling`, say, in which the other process alone replaces groups."""
    model, service, _ = two
    first, other = engine_of([service], model, timeout=1.0), engine_of([service], model, timeout=1.0, sends=False)
    list(first.generate(prompts(*LENGTHS), 2, seed=0))
    assert_drawn_from(model, other.generate(prompts(*LENGTHS), 2, seed=1))
    service.version = "default"  # it was started again
    Collector.idle_along(SimpleNamespace(engine=first, processes=ALONE, meanwhile=None), nothing=None)
    assert_drawn_from(model, other.generate(prompts(*LENGTHS), 2, seed=1))


def test_a_server_that_hangs_is_left_out(two, monkeypatch, caplog):
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    model, first, second = two
    engine, hangs = engine_of([first, second], model, timeout=0.5), threading.Event()

    def hang(content):
        second.sick = ("health",)
        hangs.wait(30)

    second.v1_completions = hang
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    hangs.set()
    assert sorted(len(g.prompt.token_ids) for g in found) == list(LENGTHS)
    assert "answered /health with 503" in caplog.text


def test_a_server_whose_engine_has_died_is_left_out(two, caplog):
    """It answers still: with 500, and that it is not well."""
    model, first, second = two
    engine = engine_of([first, second], model)
    second.v1_completions, second.sick, second.sick_with = (lambda _: {}), ("v1_completions",), 500
    answer = second.answer
    second.answer = lambda path, content: (503, None) if path == "/health" and asked(second) else answer(path, content)
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert sorted(len(g.prompt.token_ids) for g in found) == list(LENGTHS)
    assert "answered /v1/completions with 500" in caplog.text


def test_a_server_that_dies_after_its_last_answer_costs_nothing(two):
    model, first, second = two
    engine = engine_of([first, second], model)
    groups = engine.generate(prompts(*LENGTHS), 2, seed=0)
    found = [next(groups) for _ in LENGTHS]
    second.die()
    assert not list(groups)
    assert_drawn_from(model, found)


def test_a_server_that_dies_while_it_is_sent_weights(two, caplog):
    model, first, second = two
    engine = engine_of([first, second], model)
    second.collective_rpc = lambda _: second.die()
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert "left out until it does" in caplog.text


@pytest.mark.parametrize("where", ["weight_info", "collective_rpc", "update_weight_version"])
def test_a_connection_that_breaks_between_rollouts_costs_nothing(two, where):
    model, first, second = two
    engine = engine_of([first, second], model)
    ask, left = getattr(second, where), [1]

    def breaks(content):
        if left:
            left.pop()
            return second.here.connection.shutdown(socket.SHUT_RDWR)
        return ask(content)

    setattr(second, where, breaks)
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert not left
    assert engine.usable == engine.servers


def test_a_server_that_says_nothing_to_weights_is_left_out(two):
    model, first, second = two
    engine, hangs = engine_of([first, second], model), threading.Event()
    engine.servers[1].client.timeout = 1.0
    second.collective_rpc = lambda _: hangs.wait(30)
    model.model.norm.weight.data[0] += 0.5
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    hangs.set()
    assert engine.usable == engine.servers[:1]


def test_servers_that_are_waited_for_are_told_with_what_they_say(two, monkeypatch, caplog):
    monkeypatch.setattr(server, "PATIENT_SECONDS", 0.2)
    model, first, second = two
    engine = engine_of([first, second], model)
    engine.options = replace(engine.options, timeout=1.0)
    for service in (first, second):
        service.sick, service.sick_with = ("health",), 500
        service.health = lambda _: {"error": "CUDA out of memory"}
    with pytest.raises(EngineError, match=r"none of 2 vLLM servers has answered for 1 s .*CUDA out of memory") as error:
        list(engine.generate(prompts(3), 2, seed=0))
    for service in (first, second):
        assert service.address in str(error.value)
        assert service.address in caplog.text
    assert caplog.text.count("waiting, up to 1 s (vllm_server_timeout): ") == 1


def of_two_processes(two):
    """The engines of a main process and another one, after an update."""
    model, *services = two
    main, copy = engine_of(services, model), make_model()
    other = engine_of(services, copy, sends=False)
    list(other.generate(prompts(3), 2, seed=0))
    with torch.no_grad():
        [one.model.norm.weight[0].add_(0.5) for one in (model, copy)]
    return main, other


def test_a_server_that_others_have_not_been_sent_to_is_told(two, monkeypatch, caplog):
    """Sending goes on for longer than this process waits."""
    monkeypatch.setattr(following, "GRACE_SECONDS", 0.3)
    _, _, second = two
    main, other = of_two_processes(two)
    # The main process has been kept from the second.
    main.servers = main.servers[:1]
    list(main.generate([], 2, seed=0))
    assert_drawn_from(other.get_model(), other.generate(prompts(*LENGTHS), 2, seed=0))
    assert other.usable == other.servers[:1]
    assert f"{second.address} has not the weights of this process: asked for nothing in this rollout" in caplog.text


def test_a_server_that_is_being_sent_weights_is_waited_for(two, monkeypatch):
    """The main process sends them to one server after the other."""
    monkeypatch.setattr(following, "GRACE_SECONDS", 0.3)
    _, _, second = two
    main, other = of_two_processes(two)
    load = second.collective_rpc
    second.collective_rpc = lambda content: (time.sleep(1.5), load(content))[1]
    sending = threading.Thread(target=lambda: list(main.generate([], 2, seed=0)))
    sending.start()
    assert_drawn_from(other.get_model(), other.generate(prompts(*LENGTHS), 2, seed=0))
    sending.join(30)
    assert other.usable == other.servers


def test_a_server_that_was_left_in_the_middle_is_not_waited_for_twice(two, monkeypatch, caplog):
    """The main process goes on without it, and would wait for this process elsewhere."""
    monkeypatch.setattr(following, "GRACE_SECONDS", 0.3)
    _, _, second = two
    main, other = of_two_processes(two)
    main.servers[1].client.timeout = 0.5
    other._following._timeout, hangs = 1.0, threading.Event()
    load = second.collective_rpc
    second.collective_rpc = lambda content: hangs.wait(60) and load(content)
    took = []
    for _ in range(2):
        list(main.generate([], 2, seed=0))
        began = time.monotonic()
        assert_drawn_from(other.get_model(), other.generate(prompts(3, 4), 2, seed=0))
        took.append(time.monotonic() - began)
    hangs.set()
    assert second.version.startswith("sending-")
    assert other.usable == other.servers[:1]
    assert max(took) < 15
    assert f"{second.address} has not the weights of this process" in caplog.text


def test_a_server_that_is_down_keeps_nobody_waiting(two):
    """For as long as servers wait for the next one that is sent weights."""
    _, _, second = two
    main, other = of_two_processes(two)
    second.die()
    for _ in range(2):
        list(main.generate([], 2, seed=0))
        began = time.monotonic()
        assert_drawn_from(other.get_model(), other.generate(prompts(3, 4), 2, seed=0))
        assert time.monotonic() - began < following.GRACE_SECONDS / 2


def test_a_proxy_before_a_server_that_is_down_ends_no_run(two):
    _, _, second = two
    main, other = of_two_processes(two)
    list(main.generate([], 2, seed=0))
    second.sick, second.sick_with = ("weight_info",), 502
    assert_drawn_from(other.get_model(), other.generate(prompts(3, 4), 2, seed=0))
    assert other.usable == other.servers[:1]


def test_a_server_that_was_silent_is_not_waited_for_as_long_again(two, monkeypatch):
    """It says that it is well, and not which weights it has."""
    monkeypatch.setattr(remote, "HEALTH_SECONDS", 0.3)
    model, _, second = two
    engine, hangs = engine_of(two[1:], model), threading.Event()
    engine.servers[1].client.timeout = 4.0
    second.weight_info = lambda _: hangs.wait(60)
    took = []
    for _ in range(2):
        began = time.monotonic()
        list(engine.generate([], 2, seed=0))
        took.append(time.monotonic() - began)
    hangs.set()
    assert took[0] > 3.5
    assert took[1] < 3.0
    assert engine.usable == engine.servers[:1]


def test_what_is_no_vllm_server_is_shown(two):
    model, first, _ = two
    first.server_info = lambda _: {"model_path": "m"}
    with pytest.raises(EngineError, match=rf"{first.address} has answered /server_info with .*is it a vLLM server"):
        engine_of([first], model)


def test_a_server_that_is_refused_leaves_the_ports_of_others_free(two):
    model, first, second = two
    first.backend = second.backend = "gloo"
    port = free_port()
    second.logprobs_mode = "raw_logprobs"
    with pytest.raises(EngineError, match="logprobs-mode") as held:
        engine_of([first, second], model, group_port=port)
    assert held.value
    engine_of([first], model, group_port=port)


def test_an_error_of_one_is_not_asked_of_another(two):
    model, first, second = two
    engine = engine_of([first, second], model)
    second.v1_completions, second.sick, second.sick_with = (lambda _: {"error": "no"}), ("v1_completions",), 400
    with pytest.raises(EngineError, match=rf"{second.address} answered /v1/completions with 400"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_server_with_other_weights_is_noticed(two, caplog):
    model, first, second = two
    engine = engine_of([first, second], model)
    second.version = "somebody else's"
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
    told = "given weights by somebody else: use one server for one run. It is sent all weights, and proved"
    assert told in caplog.text
    draw, given = second.v1_completions, threading.Event()
    second.v1_completions = lambda content: (given.wait(30), draw(content))[1]
    groups = engine.generate(prompts(*LENGTHS), 2, seed=0)
    next(groups)
    second.version = "somebody else's"
    given.set()
    with pytest.raises(EngineError, match=rf"{second.address} was given weights by somebody else"):
        list(groups)


def test_a_policy_that_rounds_a_lot_may_differ_by_more(caplog):
    """In half precision alone, and by no more than what cannot be other weights."""

    def probe(off, rounding):
        drawn = Completion(token_ids=[5, 6], stop_reason="length", logprobs=[-1.0, -2.0])
        own = [-1.0 - off, -2.0 - off]
        return proof.Probe(prompts=prompts(3), completions=[[drawn]], own=own, rounding=lambda: rounding)

    assert probe(0.13, 0.08).why_not(torch.bfloat16) is None
    assert "0.13 per token off" in probe(0.13, 0.05).why_not(torch.bfloat16)
    assert "(allowed: 0.3)" in probe(0.4, 0.5).why_not(torch.bfloat16)
    assert "(allowed: 0.02)" in probe(0.13, 0.08).why_not(torch.float32)


def test_rounding_is_the_policys_own():
    model = make_model().bfloat16()
    groups = [[Completion(token_ids=[5, 6, 7], stop_reason="length", logprobs=[-1.0] * 3)]] * 2
    found = shared.compare_probe(model, sampling(), groups)
    assert 0 < found.rounding() < 0.2
    assert found.own == shared.compare_probe(model, sampling(), groups).own  # and leaves nothing behind


# -- several processes


def test_one_process_sends_and_all_ask(two, monkeypatch):
    """The engine of a process that does not send waits for the weights that it has itself."""
    monkeypatch.setattr(server, "POLL_SECONDS", 0.01)
    model, *services = two
    main, copy = engine_of(services, model), make_model()
    other = engine_of(services, copy, sends=False)
    first = list(other.generate(prompts(*LENGTHS[:3]), 2, seed=1))
    assert_drawn_from(model, [*first, *main.generate(prompts(*LENGTHS[3:]), 2, seed=0)])
    with torch.no_grad():
        [one.model.norm.weight[0].add_(0.5) for one in (model, copy)]  # an update, in both
    found = []
    waits = threading.Thread(target=lambda: found.extend(other.generate(prompts(*LENGTHS), 2, seed=1)))
    waits.start()
    time.sleep(0.3)
    assert not found  # until the main process has sent them, though it asks for nothing itself
    assert not list(main.generate([], 2, seed=0))
    waits.join(30)
    assert_drawn_from(copy, found)
    assert len(found) == len(LENGTHS)
    assert (main.syncs, other.syncs) == (2, 0)


def test_several_processes_need_servers_that_name_their_weights(two):
    """What a server answers does not tell two updates apart."""
    model, *services = two
    for service in services:
        service.missing, service.reset_prefix_cache = OLDER, lambda _: None
    engine_of(services, model)
    with pytest.raises(EngineError, match=r"older than 0.32 and does not say which weights it has"):
        list(engine_of(services, model, sends=False).generate(prompts(3), 2, seed=0))


def test_while_weights_are_sent_a_server_names_none_that_anybody_has(two):
    model, first, _ = two
    engine, named = engine_of([first], model), []
    load = first.collective_rpc
    first.collective_rpc = lambda content: (named.append(first.version), load(content))[1]
    before = first.version
    model.model.norm.weight.data[0] += 0.5
    list(engine.generate(prompts(3), 2, seed=0))
    assert named[0].startswith("sending-")
    assert before != first.version == version_of(fingerprint(model))


def test_buffers_that_no_checkpoint_has_do_not_make_another_version():
    """A rotary embedding's frequencies may follow the longest text that a process has seen."""
    one, other = make_model(), make_model()
    other.model.rotary_emb.inv_freq = other.model.rotary_emb.inv_freq * 2
    assert fingerprint(one) == fingerprint(other)


def test_a_process_whose_weights_nobody_sends_says_so(two):
    model, *services = two
    engine_of(services, model)
    other = engine_of(services, make_model(seed=5), sends=False, timeout=0.3)
    with pytest.raises(EngineError, match=r"no vLLM server has the weights of this process after 1 s.* is well; "):
        list(other.generate(prompts(3), 2, seed=0))


# -- vLLM's own protocol


@pytest.mark.parametrize("count", [1, 2])
def test_weights_by_broadcast(count, tmp_path):
    model = make_model()
    with ExitStack() as stack:
        services = [stack.enter_context(serving(model.config, backend="gloo")) for _ in range(count)]
        engine = engine_of(services, model, weights_dir=tmp_path / "weights", group_port=0)
        assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
        model.model.norm.weight.data[0] += 0.5
        assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))
        called = [path for path, _ in services[0].calls]
        assert "/finish_weight_update" in called
        assert not (tmp_path / "weights").exists()


class Copies(transfer.Transfer):
    """Sends copies to nobody."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(developer=lambda *call: None))
        self.sent: list[list[str]] = []

    def _prepared(self, weight):
        return weight.clone()

    def _update(self, named):
        self.sent.append([name for name, _ in named])


@pytest.mark.parametrize(("piece_bytes", "pieces", "most"), [(None, ["abcdef"], 7), (100, ["ab", "cd", "ef"], 3)])
def test_weights_on_their_way_are_there_once(piece_bytes, pieces, most):
    """Each is copied before the next one is made, as merged adapters are. What was sent is let go of before the next
    piece is begun, but for the last weight."""
    way, alive, seen = Copies(), [], []
    way.piece_bytes = piece_bytes

    def made():
        for name in "abcdef":
            weight = torch.ones(13)
            alive.append(weakref.ref(weight))
            yield name, weight

    copied = way._prepared

    def counting(weight):
        copy = copied(weight)
        alive.append(weakref.ref(copy))
        seen.append(sum(one() is not None for one in alive))
        return copy

    way._prepared = counting
    way.send(made())
    assert way.sent == [list(piece) for piece in pieces]
    assert max(seen) == most


class Queue:
    """A group that takes nothing: its server is gone. Broadcasts are queued, as NCCL does."""

    port = 0

    def __init__(self, *place) -> None:
        self.queued, self.closed = 0, False

    def join(self):
        """At once."""

    def broadcast(self, tensor):
        assert not self.closed
        self.queued += 1

    def wait(self, is_lost):
        while not is_lost():
            time.sleep(0.01)
        self.closed = True


def test_few_broadcasts_are_queued_for_a_server_that_is_lost():
    """Behind about a thousand the host would wait in the driver, and could not call them off."""

    def developer(method, path, content=None):
        if path == "/update_weights":
            time.sleep(0.1)
            raise EngineError("no answer")
        return {"world_size": 1}

    client = SimpleNamespace(address="http://127.0.0.1:1", developer=developer)
    way = transfer.BroadcastTransfer(client, 0, Queue, "cpu")
    with pytest.raises(EngineError, match="no answer"):
        way.send((str(number), torch.zeros(1)) for number in range(2000))
    assert way._group.closed
    assert way._group.queued <= 100


def test_a_port_that_is_taken_is_named(two):
    model, first, _ = two
    first.backend = "gloo"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"cannot listen at 127.0.0.1:{port}.* set vllm_group_port"):
            engine_of([first], model, timeout=3.0, group_port=port)


def test_a_server_that_refuses_an_update_is_heard(two):
    """At once, and the next one may use the port again."""
    model, first, second = two
    first.backend = second.backend = "gloo"
    port = free_port()
    first.sick, first.sick_with = ("update_weights",), 500
    first.update_weights = lambda _: {"error": "no room"}
    with pytest.raises(EngineError, match=r"answered /update_weights with 500: .*no room"):
        engine_of([first], model, group_port=port, timeout=3.0)
    engine = engine_of([second], model, group_port=port)
    assert_drawn_from(model, engine.generate(prompts(3), 2, seed=0))


@pytest.mark.parametrize(
    ("backend", "message"),
    [("ipc", "by CUDA IPC, and the trainer has no GPU"), ("rdma", "by 'rdma': rloom knows ipc, nccl and gloo")],
)
def test_ways_that_cannot_be_gone(backend, message):
    if backend == "ipc" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = make_model()
    with serving(model.config, backend=backend) as service, pytest.raises(EngineError, match=message):
        engine_of([service], model)


def test_a_port_that_is_taken_is_found_before_servers_are_told_of_it(monkeypatch):
    parts = {
        "vllm": {}, "vllm.distributed": {}, "vllm.distributed.utils": {"StatelessProcessGroup": None},
        "vllm.distributed.device_communicators": {"pynccl": SimpleNamespace(PyNcclCommunicator=None)},
    }  # fmt: skip
    for name, content in parts.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="in use"):
        transfer.NcclGroup("127.0.0.1", taken.getsockname()[1], 2)


# -- the verb that starts one


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """As if vLLM were there. A folder with a model whose embeddings are tied."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: True if name == "vllm" else found(name, *a))
    make_model(tie_word_embeddings=True).config.save_pretrained(tmp_path)
    return tmp_path


def told(monkeypatch, *words):
    """What the verb becomes: command and environment."""
    became = []
    monkeypatch.setattr("os.execve", lambda path, command, variables: became.append((command, variables)))
    assert main(["vllm-serve", *words]) in (0, None)
    return became[0]


def test_the_verb_starts_a_server_that_can_be_sent_weights(installed, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # a test of vLLM in the process leaves it there
    words = ["--port", "9", "--transfer", "gloo", "--vllm-flags", "--seed", "3"]
    command, variables = told(monkeypatch, str(installed), *words)
    text = " ".join(command)
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in variables
    assert "--logprobs-mode processed_logprobs" in text
    assert '--load-format dummy --hf-overrides {"tie_word_embeddings": false}' in text
    assert '--weight-transfer-config {"backend": "gloo"} --worker-extension-cls rloom.' in text
    assert "--host 127.0.0.1 --port 9 --dtype float32" in text
    assert "--gpu-memory-utilization 0.3" in text  # of the host's memory, which vLLM would take for itself
    assert command[-2:] == ["--seed", "3"]
    # What is printed can be typed.
    printed = shlex.split(capsys.readouterr().out.partition("; starting ")[2])
    assert printed == ["VLLM_SERVER_DEV_MODE=1", "python", *command[1:]]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "--gpu-memory-utilization" not in told(monkeypatch, str(installed))[0]


def test_the_verb_serves_adapters_and_gpus(installed, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    command, variables = told(monkeypatch, "m", "--max-lora-rank", "9", "--gpu-memory-utilization", "0.3")
    assert "--enable-lora --max-loras 1 --max-lora-rank 16" in " ".join(command)
    assert "--dtype bfloat16" in " ".join(command)
    assert "--gpu-memory-utilization 0.3" in " ".join(command)
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_the_verb_looks_for_what_ipc_needs(installed, monkeypatch, capsys):
    """vLLM 0.24 imports Ray for it, which it does not install; 0.32 does not."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    missing, looked_for, find = [], [], importlib.import_module

    def find_module(name, *rest):
        if not name.startswith("vllm."):
            return find(name, *rest)
        looked_for.append(name)
        if missing:
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return None

    monkeypatch.setattr(importlib, "import_module", find_module)
    _, variables = told(monkeypatch, "m", "--transfer", "ipc")
    assert variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert looked_for == ["vllm.distributed.weight_transfer.ipc_engine"]
    missing.append("ray")
    assert main(["vllm-serve", "m", "--transfer", "ipc"]) == 1
    assert "pip install ray, or leave --transfer out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--transfer", "ipc"], "--transfer ipc needs an NVIDIA GPU"),
        (["--transfer", "gloo", "--max-lora-rank", "8"], "adapters go through a folder"),
        (["--max-lora-rank", "513"], "vLLM knows ranks of up to 512"),
    ],
)
def test_what_the_verb_refuses(installed, monkeypatch, capsys, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["vllm-serve", str(installed), *words]) == 1
    assert message in capsys.readouterr().err


def test_the_verb_without_vllm(monkeypatch, capsys):
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    assert main(["vllm-serve", "m"]) == 1
    assert 'pip install "rloom[vllm]"' in capsys.readouterr().err
