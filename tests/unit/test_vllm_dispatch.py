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
from rloom.generation.vllm.client import Client, SilentError
from rloom.generation.vllm.dispatch import REQUESTS_PER_SERVER, Dispatch, requests_per_server
from tests.unit.test_vllm import OLDER, assert_drawn_from, prompts
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


def test_a_request_that_breaks_everywhere_ends_the_run(two, monkeypatch):
    """It is tried three times at each server, and not for ever at the last."""
    model, *services = two
    engine, tried = engine_of(services, model), []

    def poisoned(service):
        draw = service.v1_completions

        def answer(content):
            if len(content["prompt"]) != 5:
                return draw(content)
            tried.append(service.port)
            return hang_up(service)

        return answer

    for service in services:
        service.v1_completions = poisoned(service)
    with pytest.raises(EngineError, match=r"cannot be reached: .*There is no other server"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert sorted(map(tried.count, set(tried))) == [dispatch.TRIES] * 2


def test_a_request_that_waits_for_its_next_try_is_taken_from_a_lost_server(two, monkeypatch):
    """The server is started again meanwhile, and would say nothing more."""
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    model, first, second = two
    engine, hangs, tried = engine_of([first, second], model), threading.Event(), []

    def answer(content):
        tried.append(1)
        if len(tried) == 2:
            threading.Timer(0.3, start_again, [second]).start()
        return hang_up(second) if len(tried) <= 2 else hangs.wait(30)

    second.v1_completions = answer
    found = list(engine.generate(prompts(3, 4), 2, seed=0))
    hangs.set()
    assert lengths(found) == [3, 4]
    assert_drawn_from(model, found)


def test_a_server_that_is_left_out_is_asked_for_nothing_more(two, monkeypatch):
    """One of its requests has failed too often. Another has been answered, and its weights are being asked for."""
    monkeypatch.setattr(dispatch, "REQUESTS_PER_SERVER", 2)
    monkeypatch.setattr(dispatch, "TRIES", 1)
    model, first, second = two
    engine, draw, draw_first, ask = engine_of([first, second], model), second.v1_completions, first.v1_completions, []

    def answer(content):
        ask.append(1)
        if len(ask) == 1:
            return hang_up(second)
        time.sleep(0.5)
        return draw(content)

    tell = second.weight_info
    second.v1_completions = answer
    second.weight_info = lambda content: (ask and time.sleep(1.0), tell(content))[1]
    first.v1_completions = lambda content: (time.sleep(0.4), draw_first(content))[1]
    found = list(engine.generate(prompts(*[3] * 14), 2, seed=0))
    assert lengths(found) == [3] * 14
    assert len(ask) == 2


def test_an_answer_that_stops_in_the_middle_is_hung_up(two, monkeypatch):
    """Where the server will close the connection, Python's own forgets it before the answer is read."""
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    model, first, second = two
    engine, hangs, broken = engine_of([first, second], model, timeout=2.0), threading.Event(), []

    def half(content):
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n{"
        second.here.connection.sendall(head)
        second.health = lambda _: hangs.wait(30)
        # Until the other end goes.
        broken.append(second.here.connection.recv(1))
        return hangs.wait(30)

    second.v1_completions = half
    found = list(engine.generate(prompts(3, 4), 2, seed=0))
    assert lengths(found) == [3, 4]
    until = time.monotonic() + 20
    while not broken and time.monotonic() < until:
        time.sleep(0.02)
    hangs.set()
    assert broken == [b""]


@pytest.mark.parametrize("how", ["dies", "breaks"])
def test_older_servers_that_are_lost_after_an_answer_end_the_run(two, how, monkeypatch):
    """They cannot say of which weights that was: this one was started again before it."""
    monkeypatch.setattr(dispatch, "REQUESTS_PER_SERVER", 1)
    model, first, second = two
    for service in (first, second):
        service.missing, service.reset_prefix_cache = OLDER, lambda _: None
    engine = engine_of([first, second], model)
    draw, draw_first, asked = second.v1_completions, first.v1_completions, []
    first.v1_completions = lambda content: (time.sleep(0.5), draw_first(content))[1]

    def answer(content):
        # A proof's.
        if content["max_tokens"] == 8:
            return draw(content)
        asked.append(1)
        if len(asked) == 1:
            start_again(second)
        if len(asked) == 2:
            return second.die() if how == "dies" else hang_up(second)
        return draw(content)

    second.v1_completions = answer
    message = "was lost after it had answered, and is too old" if how == "dies" else "was started again or given other"
    with pytest.raises(EngineError, match=rf"{second.address} {message}"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


@pytest.mark.parametrize("says", [{}, None, []])
def test_a_server_that_says_nothing_of_its_weights_is_left_out(two, says, caplog):
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions
    second.v1_completions = lambda content: (setattr(second, "weight_info", lambda _: says), draw(content))[1]
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert f"the vLLM server at {second.address} has answered /weight_info with" in caplog.text


def drop(choices):
    choices.remove(max(choices, key=lambda choice: choice["index"]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "returned 1 completions, 2 were asked for"),
        (lambda choices: choices[0].update(finish_reason="error"), "ended a completion with 'error'"),
        (lambda choices: choices[0].update(token_ids=7), "cannot be read .TypeError"),
        (lambda choices: choices[0].update(index="a"), "cannot be read .TypeError"),
        (lambda choices: choices[0]["logprobs"]["token_logprobs"].__setitem__(0, "x"), "cannot be read .ValueError"),
        (lambda choices: choices[0]["logprobs"]["token_logprobs"].__setitem__(0, None), "are not finite"),
        (lambda choices: choices[0].pop("finish_reason"), "cannot be read .KeyError"),
        (lambda choices: choices[0].update(choices[1]), "has numbered its completions"),
    ],
)
def test_completions_that_are_none_name_their_server(two, spoil, message, monkeypatch):
    model, first, _ = two
    engine, draw = engine_of([first], model), first.v1_completions
    monkeypatch.setattr(dispatch, "TRIES", 1)

    def spoilt(content):
        answer = draw(content)
        spoil(answer["choices"])
        return answer

    first.v1_completions = spoilt
    with pytest.raises(EngineError, match=message) as caught:
        list(engine.generate(prompts(3), 2, seed=0))
    assert first.address in str(caught.value)


def test_a_question_that_is_not_answered_is_waited_for_once(two):
    """Answers that come while it is asked wait for it, and then not as long again for one of their own."""
    began, put, first_is_put = [], [], threading.Event()

    def silent(seconds):
        put.append(seconds)
        first_is_put.set()
        time.sleep(1.0)
        raise SilentError("no answer")

    question = watch.Question(silent)

    def ask():
        with pytest.raises(SilentError):
            question.ask(2.0)
        began.append(time.monotonic())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    first_is_put.wait(10)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(began) == 4
    assert put == [2.0]


def test_failures_at_one_server_keep_nobody_from_the_answers_of_others(two):
    """Its connections break together, and then it says nothing of itself for a while."""
    model, first, second = two
    engine, hangs, came = engine_of([first, second], model, timeout=60.0), threading.Event(), threading.Barrier(4)

    def answer(content):
        came.wait(30)
        second.weight_info = lambda _: hangs.wait(30)
        return hang_up(second)

    second.v1_completions = answer
    groups = engine.generate(prompts(*[3] * 8), 2, seed=0)
    began = time.monotonic()
    found = [next(groups) for _ in range(4)]
    assert time.monotonic() - began < 20
    del second.weight_info
    second.v1_completions = type(second).v1_completions.__get__(second)
    hangs.set()
    found += groups
    assert lengths(found) == [3] * 8
    assert_drawn_from(model, found)


def test_a_server_that_the_main_process_proves_is_left_out_by_others(two):
    """In an evaluation each process collects by itself. Nothing that it draws in between is used."""
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions
    second.v1_completions = lambda content: (setattr(second, "version", "sending-1"), draw(content))[1]
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)


def test_servers_that_fail_together_are_given_time(two, monkeypatch):
    """As in a network that is away for a moment. The first is left out at once, for there is another; the last is
    waited for."""
    monkeypatch.setattr(dispatch, "HEALTH_SECONDS", 0.3)
    model, *services = two
    engine, came, well = engine_of(services, model), threading.Barrier(2), threading.Event()

    def broken(service):
        def answer(content):
            came.wait(30)
            service.health = lambda _: well.wait(30) and None
            service.v1_completions = type(service).v1_completions.__get__(service)
            return hang_up(service)

        return answer

    for service in services:
        service.v1_completions = broken(service)
    threading.Timer(2.0, well.set).start()
    found = list(engine.generate(prompts(3, 4), 2, seed=0))
    assert lengths(found) == [3, 4]
    assert_drawn_from(model, found)


def test_completions_of_lost_weights_say_nothing_of_the_policy(two):
    """Other numbers than its own, with which a server is proved, may well overflow."""
    model, first, second = two
    engine, draw = engine_of([first, second], model), second.v1_completions

    def answer(content):
        second.version, answer = "sending-1", draw(content)
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
        return answer

    second.v1_completions = answer
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert lengths(found) == list(LENGTHS)
    assert_drawn_from(model, found)


def test_requests_that_nobody_answers_are_told(two, monkeypatch, caplog):
    """Their server is well: it may be busy, or something between has lost them."""
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.05)
    model, first, _ = two
    engine, draw = engine_of([first], model, timeout=20.0), first.v1_completions
    monkeypatch.setattr(Dispatch, "__init__", impatient(Dispatch.__init__))
    first.v1_completions = lambda content: (time.sleep(1.5), draw(content))[1]
    assert lengths(engine.generate(prompts(3, 4), 2, seed=0)) == [3, 4]
    assert f"no completions for 1 s; requests that are not answered: 2 at {first.address}" in caplog.text


def impatient(make):
    def made(self, *arguments, **options):
        make(self, *arguments, **options)
        self._patience = 1.0

    return made


def test_no_threads_are_left(two, monkeypatch):
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.05)
    model, *services = two
    engine = engine_of(services, model)
    for _ in range(3):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))
        groups = engine.generate(prompts(*LENGTHS), 2, seed=0)
        next(groups)
        groups.close()
    until = time.monotonic() + 20
    while (left := [t.name for t in threading.enumerate() if t.name.startswith("rloom-vllm")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.02)
    assert left == []


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
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    model, first, second = two
    engine, hangs = engine_of([first, second], model), threading.Event()
    second.v1_completions = lambda _: (start_again(second), hangs.wait(30))
    began = time.monotonic()
    found = list(engine.generate(prompts(*LENGTHS), 2, seed=0))
    assert time.monotonic() - began < 20
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
    with pytest.raises(EngineError, match=rf"{second.address} was given weights by somebody else"):
        list(engine.generate(prompts(*LENGTHS), 2, seed=0))


def test_a_silent_server_keeps_nobody_from_the_answers_of_others(two, monkeypatch):
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
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
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.05)
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

    asked = []
    first.v1_completions = lambda content: (asked.append(1), broken(content))[1]
    with pytest.raises(EngineError, match=rf"log-probabilities are not finite.*{first.address}.$"):
        list(engine.generate(prompts(3), 2, seed=0))
    assert asked == [1]


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
            list(Dispatch([client], "/", lambda *_: {}, 1, read=lambda *_: None, patience=0.2).replies())
        assert time.monotonic() - began < 20
        for one in waiting:
            one.close()
