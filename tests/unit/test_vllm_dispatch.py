"""Requests spread over vLLM servers that restart, abort, hang up or run out of files; with stand-ins over HTTP."""

from __future__ import annotations

import resource
import socket
import threading
import time

import pytest
import torch

from rloom.errors import EngineError
from rloom.generation.vllm import dispatch, watch
from rloom.generation.vllm.client import Client
from rloom.generation.vllm.dispatch import REQUESTS_PER_SERVER, Dispatch, requests_per_server
from tests.unit.test_vllm import assert_drawn_from, prompts
from tests.unit.test_vllm_servers import LENGTHS, engine_of, two

__all__ = ["two"]


def lengths(groups):
    return sorted(len(group.prompt.token_ids) for group in groups)


def start_again(service):
    """A new process in its place: with the weights of its start."""
    with torch.no_grad():
        [p.mul_(0.3) for p in service.model.inner.parameters()]
    service.version = "default"


def hang_up(service):
    service.here.connection.shutdown(socket.SHUT_RDWR)


def once(service, happens):
    """At the server's next request this happens instead of an answer."""
    draw, left = service.v1_completions, [happens]

    def answer(content):
        return left.pop()(content) if left else draw(content)

    service.v1_completions = answer


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_what_a_server_answers_after_it_was_started_again_is_not_used(two, answered, monkeypatch, caplog):
    """Behind its address another machine answers from now on, as after an update in a cluster: no request fails."""
    monkeypatch.setattr(dispatch, "REQUESTS_PER_SERVER", 1)
    model, first, second = two
    engine, draw, left = engine_of([first, second], model), second.v1_completions, [answered]

    def answer(content):
        if not left[0]:
            start_again(second)
        left[0] -= 1
        return draw(content)

    draw_first = first.v1_completions
    # It leaves enough for the other.
    first.v1_completions = lambda content: (time.sleep(0.5), draw_first(content))[1]
    second.v1_completions = answer
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert left[0] < 0
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)
    assert f"{second.address} was started again" in caplog.text


def test_the_only_server_that_was_started_again_ends_the_run(two):
    model, first, _ = two
    engine, draw = engine_of([first], model), first.v1_completions
    first.v1_completions = lambda content: (start_again(first), draw(content))[1]
    with pytest.raises(EngineError, match=rf"{first.address} was started again. There is no other server"):
        list(engine.generate(prompts(3), 2, seed=0))


def test_answers_that_come_together_are_confirmed_together(two):
    """Each would else cost a question to the server."""
    model, first, _ = two
    engine, draw, together = engine_of([first], model), first.v1_completions, threading.Barrier(8)
    asks, questions = first.weight_info, []
    first.v1_completions = lambda content: (draw(content), together.wait(30))[0]
    first.weight_info = lambda content: (questions.append(1), time.sleep(0.5), asks(content))[2]
    assert len(list(engine.generate(prompts(*[3] * 8), 2, seed=0))) == 8
    # One before the rollout, one for the answer that is first, one for those that came meanwhile, and one to spare.
    assert 3 <= len(questions) <= 4


@pytest.mark.parametrize("count", [1, 2])
def test_a_connection_that_breaks_costs_no_server(two, count, caplog):
    model, *services = two
    engine = engine_of(services[:count], model)
    for service in services[:count]:
        once(service, lambda _, service=service: hang_up(service))
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)
    assert "left out" not in caplog.text


def test_a_request_that_always_breaks_ends_the_run(two, monkeypatch):
    model, first, _ = two
    engine, tried = engine_of([first], model), []
    monkeypatch.setattr(time, "sleep", lambda _: None)
    first.v1_completions = lambda content: (tried.append(1), hang_up(first))
    with pytest.raises(EngineError, match="cannot be reached"):
        list(engine.generate(prompts(3), 2, seed=0))
    assert len(tried) == dispatch.TRIES


@pytest.mark.parametrize("tokens", [0, 2])
def test_completions_that_a_server_aborts_are_drawn_again(two, tokens):
    """vLLM aborts what is under way when it is stopped, and answers with 200."""
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions

    def aborted(content):
        answer = draw(content)
        for choice in answer["choices"]:
            choice["token_ids"] = choice["token_ids"][:tokens]
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:tokens]
            choice["finish_reason"] = "abort"
        return answer

    once(second, aborted)
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert {c.stop_reason for group in found for c in group.completions} <= {"eos", "length"}
    assert_drawn_from(model, found)


def test_a_server_that_has_forgotten_what_it_was_sent_is_not_believed(two):
    """One that was started again may not know the name of an adapter: that is no fault of the request."""
    model, first, second = two
    engine = engine_of([first, second], model)

    second.sick, second.sick_with = ("v1_completions",), 404
    second.v1_completions = lambda _: (start_again(second), {"error": "no such model"})[1]
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)


def test_one_that_was_started_again_with_nothing_to_answer_is_not_believed(two):
    """No request of it broke, so nobody has noticed; then it is to take the place of one that is lost."""
    model, first, second = two
    engine, draw, all_but_one = engine_of([first, second], model), second.v1_completions, threading.Event()

    def dies_last(content):
        if len(content["prompt"]) != 4:
            return draw(content)
        all_but_one.wait(30)
        return second.die()

    second.v1_completions = dies_last
    groups = engine.generate(prompts(3, 4), 2, seed=0)
    next(groups)
    start_again(first)
    all_but_one.set()
    with pytest.raises(EngineError, match=rf"{first.address} was started again. There is no other server"):
        list(groups)


def test_one_that_was_started_again_is_noticed_beside_its_requests(two, monkeypatch, caplog):
    """Something between keeps its connections, over which nothing will ever come."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    model, first, second = two
    engine, hangs = engine_of([first, second], model), threading.Event()
    second.v1_completions = lambda _: (start_again(second), hangs.wait(30))
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    hangs.set()
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)
    assert f"{second.address} was started again" in caplog.text


def test_one_that_was_started_again_after_its_last_answer_costs_nothing(two):
    model, first, second = two
    engine = engine_of([first, second], model)
    groups = engine.generate(prompts(*LENGTHS), 2, seed=0)
    found = [next(groups) for _ in LENGTHS]
    start_again(second)
    assert not list(groups)
    assert_drawn_from(model, found)
    assert_drawn_from(model, engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_weights_of_somebody_else_end_the_run_though_there_is_another_server(two):
    """Two runs that send weights to one server would do so at each update."""
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions
    second.v1_completions = lambda content: (setattr(second, "version", "somebody else's"), draw(content))[1]
    with pytest.raises(EngineError, match=rf"{second.address} was given other weights while it generated"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_silent_server_keeps_nobody_from_the_answers_of_others(two, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    model, first, second = two
    engine, hangs = engine_of([first, second], model, timeout=60.0), threading.Event()
    draw, second.v1_completions = first.v1_completions, lambda _: hangs.wait(30)
    # Neither does it answer how it is, for less than the time-out.
    second.health = lambda _: hangs.wait(30)
    first.v1_completions = lambda content: (time.sleep(0.3), draw(content))[1]
    groups = engine.generate(prompts(*LENGTHS), 2, seed=0)
    began = time.monotonic()
    found = [next(groups) for _ in range(3)]
    assert time.monotonic() - began < 20
    second.v1_completions = type(second).v1_completions.__get__(second)
    del second.health
    hangs.set()
    # What it answers to those that hung is nothing, and is asked again.
    found += groups
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)


def test_a_server_that_is_silent_is_named_once(two, monkeypatch, caplog):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    model, first, _ = two
    engine, draw = engine_of([first], model, timeout=20.0), first.v1_completions

    def busy(content):
        first.sick = ("health",)
        time.sleep(0.5)
        first.sick = ()
        return draw(content)

    first.v1_completions = busy
    assert lengths(engine.generate(prompts(3), 2, seed=0)) == [3]
    assert caplog.text.count("; waiting for it, up to 20 s (vllm_server_timeout)") == 1


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"choices": "none"},
        {"choices": [{"index": 0, "finish_reason": "stop", "logprobs": None}]},
    ],
)
def test_an_answer_that_is_none_is_shown(two, answer):
    model, first, _ = two
    engine = engine_of([first], model)
    first.v1_completions = lambda _: answer
    with pytest.raises(EngineError, match=r"no completions with log-probabilities: .*Is it a vLLM server"):
        list(engine.generate(prompts(3), 2, seed=0))


def test_a_logprob_that_is_no_number_is_an_error(two):
    """JSON has no NaN: the server sends null."""
    model, first, _ = two
    engine, draw = engine_of([first], model), first.v1_completions

    def broken(content):
        answer = draw(content)
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
        return answer

    first.v1_completions = broken
    with pytest.raises(EngineError, match="log-probabilities are not finite"):
        list(engine.generate(prompts(3), 2, seed=0))


def test_connections_over_which_nothing_comes_are_tried(two):
    """Else nobody would notice that the other machine, or a gateway, has forgotten them."""
    model, first, _ = two
    engine, draw, opened, kept = engine_of([first], model), first.v1_completions, [], []
    client = engine.servers[0].client
    connection = client.connection

    def remember(timeout):
        opened.append(connection(timeout))
        return opened[-1]

    def look(content):
        port = first.here.connection.getpeername()[1]
        ours = [one.sock for one in opened if one.sock is not None]
        [asking] = [one for one in ours if one.getsockname()[1] == port]
        kept.append(asking.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        kept.append(asking.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
        return draw(content)

    list(engine.generate(prompts(3), 2, seed=0))
    client.connection, first.v1_completions = remember, look
    assert lengths(engine.generate(prompts(3), 2, seed=0)) == [3]
    assert kept == [1, 30]


@pytest.mark.parametrize(
    ("limit", "servers", "expected"),
    [(20_000, 4, REQUESTS_PER_SERVER), (1024, 4, 128), (256, 200, 1), (-1, 9, REQUESTS_PER_SERVER)],
)
def test_requests_do_not_take_all_files_that_a_process_may_open(limit, servers, expected, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert requests_per_server(servers) == expected


def test_fewer_requests_at_once_are_told(two, monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    model, first, _ = two
    engine = engine_of([first], model)
    assert "at most 3 requests at a time at each vLLM server" in caplog.text
    assert len(list(engine.generate(prompts(*LENGTHS), 2, seed=0))) == len(LENGTHS)


def test_a_machine_that_does_not_answer_is_not_waited_for(monkeypatch):
    """It neither takes nor refuses the connection."""
    monkeypatch.setattr(dispatch, "CONNECT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        address = silent.getsockname()
        # Those fill its queue, so that later ones wait.
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        client = Client(f"http://127.0.0.1:{address[1]}", 0.2)
        began = time.monotonic()
        with pytest.raises(EngineError, match="cannot be reached: TimeoutError"):
            list(Dispatch([client], "/", lambda *_: {}, 1, patience=0.2, still_well=lambda *_: False).replies())
        assert time.monotonic() - began < 20
        for one in waiting:
            one.close()
