"""Requests spread over vLLM servers that restart, abort, hang up or run out of files; with stand-ins over HTTP."""

from __future__ import annotations

import resource
import socket
import threading
import time

import pytest
import torch

from rloom.errors import EngineError
from rloom.generation.vllm import dispatch
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


def test_what_a_server_answers_after_it_was_started_again_is_not_used(two, monkeypatch, caplog):
    """Two threads ask it: the request of one breaks, and the other goes on as if nothing had been."""
    monkeypatch.setattr(dispatch, "REQUESTS_PER_SERVER", 2)
    model, first, second = two
    engine, draw, asked = engine_of([first, second], model), second.v1_completions, []
    lock, is_new, goes_on, broken, answered = threading.Lock(), *(threading.Event() for _ in range(4))
    draw_first = first.v1_completions
    first.v1_completions = lambda content: (time.sleep(0.5), draw_first(content))[1]

    def answer(content):
        with lock:
            asked.append(content)
            number = len(asked)
        if number == 1:
            found = draw(content)
            start_again(second)
            is_new.set()
            return found
        if number == 2:
            # When it breaks, the other thread has asked again.
            is_new.wait(30)
            goes_on.wait(30)
            hang_up(second)
            broken.set()
        if number == 3:
            goes_on.set()
            broken.wait(30)
            time.sleep(1.0)  # until who asked for it has noticed
            found = draw(content)
            answered.set()
            return found
        return draw(content)

    second.v1_completions = answer
    groups = engine.generate(prompts(*range(3, 11)), 2, seed=0)
    found = []
    for group in groups:
        # A reward that takes its time: that a request broke is looked at after the other's answer.
        answered.wait(30)
        time.sleep(0.2)
        found.append(group)
    assert len(asked) > 2
    assert lengths(found) == list(range(3, 11))
    assert_drawn_from(model, found)
    assert "left out for the rest of this rollout" in caplog.text


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
            list(Dispatch([client], "/", lambda *_: {}, 1, patience=0.2, still_well=lambda _: False).replies())
        assert time.monotonic() - began < 20
        for one in waiting:
            one.close()
