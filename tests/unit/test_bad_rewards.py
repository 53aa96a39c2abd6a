"""Every kind of bad answer on every way to call a function: a clear message, or a counted None, and no more lost."""

from __future__ import annotations

import time

import pytest

import rloom
from rloom.errors import RewardError
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, http_reward, judge
from tests.services import serving
from tests.unit.test_http_rewards import BROKEN

COUNT = 6
BAD = 2  # the sample that is answered badly


def data() -> RewardBatch:
    return RewardBatch(
        prompts=[f"p{i // 3}" for i in range(COUNT)],
        completions=["x" * (i + 1) for i in range(COUNT)],
        completion_ids=[[i] for i in range(COUNT)],
        columns={"n": list(range(COUNT))},
    )


VALUES = {
    "too few": ("values[:-1]", "rewards, but"),
    "too many": ("values + [1.0]", "rewards, but"),
    "NaN": ("[nan if n == 2 else v for v, n in zip(values, ns)]", "returned NaN for sample"),
    "infinity": ("[inf if n == 2 else v for v, n in zip(values, ns)]", "returned infinity for sample"),
    "a text": ("['high' if n == 2 else v for v, n in zip(values, ns)]", "returned str 'high' for sample"),
    "an exception": ("[v if n != 2 else 1 / 0 for v, n in zip(values, ns)]", "division by zero"),
    "a text for all": ("'high'", "returned str 'high'"),
    "nothing": ("None", "is a `return` missing"),
}
WAYS = {
    "plain": {},
    "streaming": {"streaming": True},
    "in threads": {"per_sample": True, "threads": True},
    "per sample": {"per_sample": True},
    "isolated": {"isolated": True, "time_limit": 30.0},
    "async": {},
    "async, per sample": {"per_sample": True},
}


def made(value: str, way: str):
    def answer(completions, n):
        names = {"values": [float(len(c)) for c in completions], "ns": n, "nan": float("nan"), "inf": float("inf")}
        return eval(value, names)

    async def later(completions, n):
        return answer(completions, n)

    function = later if way.startswith("async") else answer
    return rloom.reward(function, **WAYS[way]) if WAYS[way] else function


def scored(function, on_error, *, streamed: bool):
    rewards = RewardSet([FunctionReward(function)], None, on_error=on_error, workers=1)
    try:
        scoring = rewards.begin()
        if streamed:
            for position in (1, 0):
                scoring.add(position, data().take(range(3 * position, 3 * position + 3)))
        found = scoring.score(data())
        return found.scores[:, 0], dict(found.costs), found, rewards.names[0]
    finally:
        rewards.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", VALUES)
def test_a_bad_answer(bad, way, caplog):
    value, message = VALUES[bad]
    function = made(value, way)
    streamed = way not in ("plain", "async")
    with pytest.raises((RewardError, ZeroDivisionError), match=message) as caught:
        scored(function, "raise", streamed=streamed)
    assert "in the reward '" in caught.value.__notes__[-1]
    scores, report, found, name = scored(function, "none", streamed=streamed)
    lost = scores.isnan()
    assert lost[BAD]
    assert report[f"rewards/{name}/errors"] == lost.sum()
    assert set(found.reasons) == {row for row in range(COUNT) if lost[row]}
    assert f"'{name}' failed" in caplog.text
    assert scores[~lost].tolist() == [float(row + 1) for row in range(COUNT) if not lost[row]]
    alone = bad in ("NaN", "infinity", "a text") or (bad == "an exception" and "sample" in str(WAYS[way]))
    if alone or (bad == "an exception" and way == "isolated"):
        assert lost.sum() == 1  # whoever else was asked about in the same call has its score
    assert scored(function, -3.0, streamed=streamed)[0][BAD] == -3.0


@pytest.mark.parametrize("how", BROKEN)
def test_a_service_that_misbehaves_costs_scores_and_not_the_run(how, caplog):
    script, _ = BROKEN[how]
    with serving(script) as (url, _):
        options = {"retries": 1, "backoff": 0.01, "timeout": 0.3 if how == "slow" else 5.0}
        scores, report, found, _ = scored(http_reward(url + "/score", **options), "none", streamed=True)
    assert scores.isnan().all()
    assert report["rewards/score/errors"] == COUNT
    assert url in found.reasons[0]["score"]
    assert "'score' failed" in caplog.text


def endless(call):
    """A body that does not end; in pieces, since it is not there yet."""
    call.handler.send_response(200)
    call.handler.end_headers()
    try:
        while True:
            call.handler.wfile.write(b'{"scores": [' + b"0," * 2**19)
    except OSError:  # the other side has had enough
        pass


def deep(call):
    call.answer(b"[" * 10**6)


SERVICES = {
    "gigabytes": (endless, "answered more than 67108864 bytes"),
    "nested without end": (deep, "half an answer, or none in JSON"),
    "slow": (lambda call: time.sleep(1.5), "not done after 1 seconds"),
    "500": (lambda call: call.answer(b"", 500), "no answer after 1 tries; the last: 500"),
    "half a body": (lambda call: call.answer(b'{"choices": [', Content_Length="100"), "no answer after 1 tries"),
    "no choices": (lambda call: call.answer({"choices": []}), "answered no chat completion|'scores'"),
    "a number as text": (lambda call: call.answer({"choices": [{"message": {"content": 5}}]}), "no chat comp|'scores'"),
}


@pytest.mark.parametrize("kind", ["service", "judge"])
@pytest.mark.parametrize("how", SERVICES)
def test_what_else_a_service_may_answer(how, kind):
    script, message = SERVICES[how]
    with serving(script) as (url, _):
        options = {"retries": 0, "timeout": 1.0 if how == "slow" else 20.0}
        reward = http_reward(url, **options) if kind == "service" else judge("m", base_url=url, **options)
        began = time.monotonic()
        with pytest.raises(RewardError, match=message):
            reward(prompts=["p"], completions=["c"])
        assert time.monotonic() - began < 30
        scores, report, _, name = scored(reward, "none", streamed=True)
        assert scores.isnan().all()
        assert report[f"rewards/{name}/errors"] == COUNT


def test_strange_completions_reach_a_judge():
    def judges(call):
        text = call.payload["messages"][0]["content"]
        call.answer({"choices": [{"message": {"content": f'{{"score": {1 + len(text) // 10**6}}}'}}], "usage": [1]})

    with serving(judges) as (url, _):
        reward = judge("m", base_url=url, retries=0, scale=(1, 11))
        assert reward(["p"] * 2, ["\ud800", "y" * 10**7]) == [0.0, 1.0]


SECRETS = {
    "a token": ({"token": "t0ken-1234"}, "", "t0ken-1234"),
    "a key in the address": ({}, "?key=k3y-1234&x=1", "k3y-1234"),
    "a header of one's own": ({"headers": {"X-Team-Key": "h3ader-12345"}}, "", "h3ader-12345"),
    "a token with quotes": ({"token": 't0"ken-1234'}, "", 't0"ken-1234'),
}
ECHOES = {
    "an error": lambda call, s: call.answer({"error": s}, 404),
    "an error that is cut": lambda call, s: call.answer(b"x" * (296 - len(s) // 2) + s.encode(), 404),
    "another object": lambda call, s: call.answer({"echo": s}),
    "a list": lambda call, s: call.answer({"choices": s}),
    "scores": lambda call, s: call.answer({"scores": [s]}),
    "no JSON": lambda call, s: call.answer(s.encode()),
}


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("how", ECHOES)
def test_a_key_that_a_service_echoes_is_not_told(what, how, caplog):
    options, query, secret = SECRETS[what]
    with serving(lambda call: ECHOES[how](call, secret)) as (url, _):
        reward = http_reward(url + "/score" + query, retries=0, **options)
        rewards = RewardSet([FunctionReward(reward)], None, on_error="none")
        reasons = rewards.score(data().take([0])).reasons
        rewards.close()
    told = caplog.text + str(reasons)
    assert reasons
    assert all(part not in told for part in (secret, secret[: len(secret) // 2 + 1], secret[-len(secret) // 2 :]))


def test_a_key_that_a_judge_echoes_is_not_told(monkeypatch):
    monkeypatch.setenv("MY_KEY", "k3y-12345")
    with serving(lambda call: call.answer({"error": call.headers["Authorization"]})) as (url, _):
        with pytest.raises(RewardError, match="no chat completion") as caught:
            judge("m", base_url=url, api_key_env="MY_KEY", retries=0)(["q"], ["a"])
        assert "k3y" not in str(caught.value)
