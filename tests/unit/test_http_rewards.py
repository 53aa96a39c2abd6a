"""Rewards over HTTP: the client against services that misbehave, and the service against clients that do."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rloom import RLOOTrainer
from rloom.cli.main import main
from rloom.cli.spec import load_reward
from rloom.errors import RewardError
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, http_reward
from rloom.rewards.calling import event_loop, json_service
from rloom.rewards.serve import RewardServer
from tests.services import serving


def lengths(call):
    call.answer({"scores": [len(c) for c in call.payload["completions"]]})


def ask(url, count=3, **options):
    reward = http_reward(url + "/score", **({"retries": 2, "backoff": 0.01, "timeout": 5.0} | options))
    completions = ["x" * (i + 1) for i in range(count)]
    return reward(prompts=["p"] * count, completions=completions, completion_ids=[[1]] * count, answer=[*range(count)])


# -- the loop


@pytest.fixture
def slow_to_start(monkeypatch):
    """Loops that take their time to be made, so that several threads ask for one that is not there yet."""
    make = asyncio.new_event_loop

    def new_event_loop():
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)


def test_threads_that_ask_at_once_share_a_loop(slow_to_start):
    loop = event_loop.BackgroundLoop("test")

    async def which():
        return id(asyncio.get_running_loop())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: loop.start(which()).result(), range(8)))
    assert len(set(found)) == 1


def test_a_run_asks_a_service_at_every_rollout(slow_to_start, monkeypatch, model, rows, config, tokenizer):
    """Groups are scored in several threads from the first rollout on: connections that one loop has made and kept are
    used again in the next."""
    monkeypatch.setattr(json_service, "_requests", event_loop.BackgroundLoop("test"))
    with serving(lengths, keep_alive=True) as (url, calls):
        trainer = RLOOTrainer(
            model, http_reward(url + "/score", retries=0, timeout=5.0), config(max_steps=3, num_generations=2,
            per_device_train_batch_size=8), rows, processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == 3
        assert len(calls) >= 12


# -- the client


def test_batches_columns_and_order():
    with serving(lengths) as (url, calls):
        assert ask(url, 10, batch_size=4) == list(range(1, 11))
        assert sorted(len(call.payload["completions"]) for call in calls) == [2, 4, 4]
        assert set(calls[0].payload) == {"prompts", "completions", "completion_ids", "columns"}
        answers = [
            a
            for call in sorted(calls, key=lambda c: c.payload["completions"][0])
            for a in call.payload["columns"]["answer"]
        ]
        assert answers == list(range(10))


def test_a_token_goes_along(monkeypatch):
    with serving(lengths) as (url, calls):
        ask(url, token="secret", headers={"X-Team": "a"})
        assert calls[0].headers["Authorization"] == "Bearer secret"
        assert calls[0].headers["X-Team"] == "a"
        monkeypatch.setenv("RLOOM_REWARD_TOKEN", "other")
        ask(url)
        assert calls[1].headers["Authorization"] == "Bearer other"


BROKEN = {
    "500": (lambda call: call.answer({"error": "boom"}, 500), "no answer after 3 tries; the last: 500.*boom"),
    "429": (lambda call: call.answer(b"slow down", 429, Retry_After="0.01"), "429 slow down"),
    "half a body": (lambda call: call.answer(b'{"scores": [1', Content_Length="100"), "no answer after 3 tries"),
    "half of the JSON": (lambda call: call.answer(b'{"scores": [1'), "half an answer, or none in JSON"),
    "no JSON": (lambda call: call.answer(b"<html>hello</html>"), "none in JSON.*hello"),
    "slow": (lambda call: time.sleep(1.0), "not done after 0.3 seconds"),
    "too few": (lambda call: call.answer({"scores": [1.0]}), "answered 1 scores for 3 completions"),
    "too many": (lambda call: call.answer({"scores": [1.0] * 4}), "answered 4 scores for 3 completions"),
    "no list": (lambda call: call.answer({"scores": "high"}), "one number per completion"),
    "another object": (lambda call: call.answer({"points": []}), "'scores'"),
    "401": (lambda call: call.answer({"error": "who?"}, 401), "is the token right"),
    "404": (lambda call: call.answer(b"nothing here", 404), "404.*nothing here"),
    "elsewhere": (lambda call: call.answer(b"", 302, Location="http://127.0.0.1:1/"), "answered 302"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_service_that_misbehaves(how):
    script, message = BROKEN[how]
    with serving(script) as (url, calls):
        with pytest.raises(RewardError, match=message):
            ask(url, timeout=0.3 if how == "slow" else 5.0)
        tried = 3 if how in ("500", "429", "half a body", "half of the JSON", "no JSON", "slow") else 1
        assert len(calls) == tried  # what asking again cannot mend is asked once


def test_a_service_that_drips():
    def drips(call):
        call.handler.send_response(200)
        call.handler.send_header("Content-Length", "1000")
        call.handler.end_headers()
        for _ in range(30):
            call.handler.wfile.write(b" ")
            time.sleep(0.1)

    with serving(drips) as (url, _):
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"not done after 0.4 seconds"):
            ask(url, timeout=0.4, retries=0)
        assert time.monotonic() - began < 2.0


def test_a_service_that_drips_headers():
    def drips(call):
        for _ in range(30):
            call.handler.wfile.write(b"X")
            time.sleep(0.1)

    with serving(drips) as (url, _):
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"not done after 0.4 seconds"):
            ask(url, timeout=0.4, retries=0)
        assert time.monotonic() - began < 2.0


def test_secrets_are_not_told(caplog):
    """Neither a token, nor a password or a key in an address, in no message and no log; and all of them are sent."""
    caplog.set_level(logging.DEBUG)
    with serving(lambda call: call.answer(f"{call.headers['Authorization']}".encode(), 404)) as (url, calls):
        address = url.replace("http://", "http://me:p4ssw0rd@") + "/score?key=s3cret"
        for options in ({"token": "t0ken\n"}, {}):
            with pytest.raises(RewardError) as caught:
                http_reward(address, retries=0, **options)(prompts=["p"], completions=["c"])
            for secret in ("p4ssw0rd", "s3cret", "t0ken", calls[-1].headers["Authorization"].split()[1]):
                assert secret not in str(caught.value) + caplog.text
            assert calls[-1].handler.path == "/score?key=s3cret"
        assert calls[0].headers["Authorization"] == "Bearer t0ken"
        assert calls[1].headers["Authorization"].startswith("Basic ")
    with pytest.raises(RewardError) as caught:
        http_reward("http://me:p4ssw0rd@127.0.0.1:1/score?key=s3cret", retries=0)(prompts=["p"], completions=["c"])
    assert not re.search("p4ssw0rd|s3cret", str(caught.value))


@pytest.mark.parametrize("options", [{"token": "t0 ken"}, {"token": "t0k\u00e9n"}, {"headers": {"X-Key": "t0k\nen"}}])
def test_tokens_that_cannot_be_sent_are_refused_at_once(options):
    with pytest.raises(RewardError, match=r"no header can carry") as caught:
        http_reward("http://127.0.0.1:1/score", **options)
    assert "t0" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://me:p4ssw0rd@host:port/x?key=s3cret", "me:p4ssw0rd@host?key=s3cret", "http://[::1"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(RewardError, match="is no address") as caught:
        http_reward(url)
    assert "s3cret" not in str(caught.value)


def test_nobody_there():
    with pytest.raises(RewardError, match="ConnectError"):
        ask("http://127.0.0.1:1", retries=1)


def test_one_that_recovers():
    with serving(lambda call: lengths(call) if call.number >= 2 else call.answer(b"", 503)) as (url, calls):
        assert ask(url) == [1, 2, 3]
        assert len(calls) == 3


def test_what_cannot_be_sent():
    reward = http_reward("http://127.0.0.1:1/score")
    with pytest.raises(RewardError, match="the column 'image' cannot be sent as JSON"):
        reward(prompts=["p"], completions=["c"], image=[object()])
    with pytest.raises(RewardError, match="no column 'answr'"):
        http_reward("http://127.0.0.1:1/score", columns=["answr"])(prompts=["p"], completions=["c"], answer=[1])
    with pytest.raises(RewardError, match="is no address"):
        http_reward("ftp://x")


def test_values_that_are_no_scores_are_counted():
    def mixed(call):
        call.answer(b'{"scores": [1.0, NaN, "good", null]}')

    batch = RewardBatch(prompts=["p"] * 4, completions=["a"] * 4, completion_ids=[[1]] * 4)
    with serving(mixed) as (url, _):
        rewards = RewardSet([FunctionReward(http_reward(url + "/score"))], None, on_error="none")
        scored = rewards.score(batch)
        assert scored.scores.isnan().flatten().tolist() == [False, True, True, True]
        assert dict(scored.costs)["rewards/score/errors"] == 2
        rewards.close()


def test_answers_that_unpack_to_more_than_is_allowed():
    """Gigabytes of zeros pack to kilobytes, twice packed to less."""
    large = json.dumps({"scores": [0.0], "padding": "0" * 10_000_000}).encode()

    def bomb(encoding, times):
        content = large
        for _ in range(times):
            content = gzip.compress(content)
        return lambda call: call.answer(content, Content_Encoding=encoding)

    for encoding, times, words in (
        ("gzip", 1, "more than 1000000 bytes"),
        ("gzip, gzip", 2, "encoding"),
        ("br", 1, "enc"),
    ):
        with serving(bomb(encoding, times)) as (url, _):
            service = json_service.JsonService(url + "/score", retries=0, max_bytes=1_000_000)
            with pytest.raises(RewardError, match=words):
                service.post({})


def test_packed_answers_are_read():
    with serving(lambda call: call.answer(gzip.compress(b'{"scores": [3.0]}'), Content_Encoding="gzip")) as (
        url,
        calls,
    ):
        assert ask(url, 1) == [3.0]
        assert calls[0].headers["Accept-Encoding"] == "gzip"
    with serving(lambda call: call.answer(b"no gzip", Content_Encoding="gzip")) as (url, calls):
        with pytest.raises(RewardError, match="half an answer"):
            ask(url, 1)
        assert len(calls) == 3


# -- the service


@pytest.fixture
def server(request):
    def short(completions, answer=None, **kwargs):
        if "boom" in completions:
            raise ValueError("cannot score that")
        return [None if c == "none" else float(len(c)) for c in completions]

    rewards = RewardSet([FunctionReward(short)], None)
    server = RewardServer(rewards, port=0, token=getattr(request, "param", None))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
    rewards.close()


def send(server, body=b"{}", method="POST", path="/score", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    try:
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_client_and_service_fit(server):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    assert ask(url, 100, batch_size=7) == [float(i + 1) for i in range(100)]
    reward = http_reward(url + "/score")
    strange = ["none", "\ud800", [{"role": "assistant", "content": "x"}], "y" * 10**7]
    assert reward(prompts=["p"] * 4, completions=strange) == [None, 1.0, 1.0, 1e7]
    assert reward(prompts=[], completions=[]) == []
    assert send(server, None, "GET", "/health") == (200, {"status": "ok", "reward": "short"})


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100000, 400, "not JSON"),
        (b"[]", 400, 'a list "completions"'),
        (b'{"completions": "a"}', 400, 'a list "completions"'),
        (b'{"completions": ["a"], "prompts": []}', 400, '"prompts" is no list of 1 values'),
        (b'{"completions": ["a"], "columns": {"answer": [1, 2]}}', 400, '"answer" is no list of 1'),
        (b'{"completions": ["a"], "answer": [1]}', 400, 'unknown field "answer"'),
        (b'{"completions": ["boom"]}', 422, "ValueError: cannot score that"),
    ],
)
def test_requests_that_are_wrong(server, body, status, message):
    got, content = send(server, body)
    assert got == status
    assert message in content["error"]
    assert send(server, b'{"completions": ["ok"]}') == (200, {"scores": [2.0]})  # and it goes on


def test_other_paths_and_sizes(server):
    assert send(server, path="/")[0] == 404
    assert send(server, None, "GET", "/score")[0] == 404
    assert send(server, b"", headers={"Content-Length": "-1"})[0] == 411
    assert send(server, b"", headers={"Content-Length": str(10**12)})[0] == 413


def raw(server, text):
    """What a server answers to these very bytes, until it closes the connection."""
    with socket.create_connection(server.server_address, timeout=5) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_lengths_in_other_digits_are_refused(server):
    head = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: \u00b2\r\n\r\n"
    assert raw(server, head.encode("latin-1")).startswith(b"HTTP/1.1 411")


def test_a_body_that_nobody_reads_is_not_the_next_request(server):
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
    assert raw(server, head + inner).count(b"HTTP/1.1 200") == 1


def test_a_client_that_hangs_up_is_no_error(server, caplog, capsys):
    body = b'{"completions": ["a"]}'
    head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for _ in range(5):
        connection = socket.create_connection(server.server_address, timeout=5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a good-bye
        connection.sendall(f"{head}\r\n\r\n".encode() + body[:5])
        connection.close()
    time.sleep(0.2)
    assert "Traceback" not in caplog.text + capsys.readouterr().err
    assert send(server, body) == (200, {"scores": [1.0]})


def test_a_browser_cannot_be_used_to_reach_it(server):
    body = b'{"completions": ["a"]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert send(server, body, headers={"Content-Type": kind})[0] == 415
    others = ("evil.example", "evil.example:8000", "", "[", "127.0.0.1.evil.example", "[::1].evil.example")
    for host in (*others, "localhost:80@evil.example", "[::1]evil.example:80"):
        assert send(server, body, headers={"Host": host})[0] == 403
        assert send(server, None, "GET", "/health", headers={"Host": host})[0] == 403
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert send(server, body, headers={"Host": host, "Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_a_reward_that_fails_is_not_asked_again(server):
    url = f"http://127.0.0.1:{server.server_address[1]}/score"
    with pytest.raises(RewardError, match=r"answered 422.*cannot score that"):
        http_reward(url, retries=50, backoff=10.0)(prompts=["p"], completions=["boom"])


@pytest.mark.parametrize("server", ["secret"], indirect=True)
def test_a_service_with_a_token(server):
    body = b'{"completions": ["a"]}'
    assert send(server, body)[0] == 401
    assert send(server, body, headers={"Authorization": "Bearer wrong"})[0] == 401
    assert send(server, body, headers={"Authorization": "Bearer secret"}) == (200, {"scores": [1.0]})


def test_other_machines_need_a_token():
    rewards = RewardSet([FunctionReward(lambda completions: [0.0])], None)
    with pytest.raises(RewardError, match="needs a token"):
        RewardServer(rewards, host="0.0.0.0", port=0)


def test_the_verb(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def double(completions, **kwargs):\n    return [2.0 * len(c) for c in completions]\n"
    )
    command = [sys.executable, "-m", "rloom.cli.main", "serve-reward", "mine:double", "--port", "0"]
    environment = {**os.environ, "RLOOM_REWARD_TOKEN": "t", "COLUMNS": "200"}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            url = re.search(r"http://\S+/score", line)[0]
            assert "with the token" in line
            assert http_reward(url, token="t")(prompts=["p"], completions=["abc"]) == [6.0]
        finally:
            process.terminate()


def test_rewards_named_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_rewards.py").write_text("def double(completions): ...\n")
    assert load_reward("some_rewards.py:double").__name__ == "double"
    for spec, message in {
        "some_rewards:doubel": "did you mean 'double'",
        "nowhere:f": "there is no module nowhere",
        "nowhere.py:f": "there is no file nowhere.py",
        "f": "names no reward",
        "some_rewards:f.g": "after the colon",
    }.items():
        with pytest.raises(RewardError, match=message):
            load_reward(spec)
    assert main(["serve-reward", "some_rewards:doubel"]) == 1
    assert "did you mean 'double'" in capsys.readouterr().err


def test_an_answer_may_have_the_words_of_the_address():
    """What is in the query is not shown in messages; it is no secret of the data."""
    with serving(lengths) as (url, _):
        reward = http_reward(url + "/score?type=score&output=scores", retries=0, timeout=5.0)
        assert reward(prompts=["p"], completions=["xx"], completion_ids=[[1]]) == [2]
