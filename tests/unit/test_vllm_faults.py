"""Rollouts over several servers that break, restart, hang and die at random: each request is answered once, by weights
that the server was sent."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rloom.generation.vllm import dispatch, watch
from rloom.generation.vllm.client import Client, LostWeights
from rloom.generation.vllm.dispatch import Dispatch

SENT = "sent"
FAULTS = [
    {},
    {"break": 0.1},
    {"busy": 0.1},
    {"restart": 0.05},
    {"die": 0.05},
    {"hang": 0.05},
    {"break": 0.05, "die": 0.05},
]


class Server:
    """Answers with the number that it was asked for, and with the version of its weights."""

    def __init__(self, draws: random.Random, *, keeps_connections: bool) -> None:
        self.draws, self.faults, self.version, self.state = draws, {}, SENT, "well"
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if keeps_connections else "HTTP/1.0"

            def do_GET(self):
                if not self.is_cut():
                    self.say(200, None if self.path == "/health" else {"weight_version": server.version})

            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                began_with = server.version
                time.sleep(server.draws.random() * 0.01)
                fault = server.next_fault()
                if fault in ("die", "hang"):
                    server.state = fault
                if self.is_cut() or fault == "break":
                    self.close_connection = True
                elif fault == "busy":
                    self.say(502, {"error": "busy"})
                elif fault == "restart":
                    server.version = "default"
                    self.say(200, {"number": content["number"], "weights": "default"})
                else:
                    self.say(200, {"number": content["number"], "weights": began_with})

            def is_cut(self):
                if server.state == "hang":
                    server.release.wait(20)
                self.close_connection |= server.state != "well"
                return server.state != "well"

            def say(self, status, answer):
                body = b"" if answer is None else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.client = Client(f"http://127.0.0.1:{self.http.server_address[1]}", 1.0)

    def next_fault(self):
        pick = self.draws.random()
        for name, share in self.faults.items():
            pick -= share
            if pick < 0:
                return name
        return None

    def begin(self, faults):
        self.release.set()
        self.release, self.state, self.version, self.faults = threading.Event(), "well", SENT, faults

    def stop(self):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()


def confirm(client, seconds):
    if client.get("/weight_info", seconds)["weight_version"] != SENT:
        raise LostWeights(f"{client.address} was started again")


@pytest.mark.parametrize(("seed", "at_once"), [(1, 256), (2, 3)])
def test_every_request_is_answered_once_by_the_right_weights(seed, at_once, monkeypatch):
    monkeypatch.setattr(dispatch, "REQUESTS_PER_SERVER", at_once)
    monkeypatch.setattr(dispatch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(dispatch, "HEALTH_SECONDS", 0.3)
    monkeypatch.setattr(watch, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(watch, "HEALTH_SECONDS", 0.3)
    draws = random.Random(seed)
    with ExitStack() as open_servers:
        servers = [Server(draws, keeps_connections=index % 2 == 0) for index in range(3)]
        for server in servers:
            open_servers.callback(server.stop)
        for _ in range(20):
            plans = [draws.choice(FAULTS) for _ in servers]
            plans[draws.randrange(3)] = {}  # one is well, or the run may end
            for server, plan in zip(servers, plans, strict=True):
                server.begin(plan)
            count, found = draws.choice([1, 5, 30, 60]), []
            calls = Dispatch(
                [server.client for server in servers], "/v1/completions", lambda _, number: {"number": number}, count,
                read=lambda _, answer: answer, patience=0.8, confirm=confirm,
            ).replies()  # fmt: skip
            for reply in calls:
                assert reply.answer == {"number": reply.number, "weights": SENT}
                found.append(reply.number)
            assert sorted(found) == list(range(count))
    until = time.monotonic() + 20
    while any(thread.name.startswith("rloom-vllm") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)
