"""`rloom serve-reward module:function`: a reward as a service."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from rloom.cli.parser import Parser, count
from rloom.cli.spec import find_reward
from rloom.errors import RewardError
from rloom.rewards.calling.http_reward import TOKEN_VARIABLE

if TYPE_CHECKING:
    from rloom.rewards.serve import RewardServer

SUMMARY = "serve a reward over HTTP, for reward_funcs='http://…/score'"


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    add = parser.add_argument
    add("reward", metavar="REWARD", help="a ready-made name, module:function or file.py:function(option=1)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=8000, help="port; 0 takes a free one (default 8000)")
    add("--workers", type=count, help="worker processes (default: one per core, at most 8)")
    add("--on-error", choices=("raise", "none"), default="raise", help="answer 422, or null scores")


def run(options: Namespace) -> int:
    """Serve until Ctrl-C."""
    from rich.console import Console
    from rich.markup import escape

    server = make_server(options)
    host, port = server.server_address[:2]
    secret = f"with the token in {TOKEN_VARIABLE}" if server.token else "without a token"
    Console().print(
        f"{escape(server.rewards.names[0])} is served at http://{host!s}:{port}/score, {secret}. Ctrl-C ends it."
    )
    try:
        server.serve_forever()
    finally:
        server.server_close()
        server.rewards.close()
    return 0


def make_server(options: Namespace) -> RewardServer:
    """The service, listening; nothing is answered before `serve_forever`."""
    from rloom.cli.written import build_rewards
    from rloom.rewards.calling.reward_set import RewardSet
    from rloom.rewards.serve import RewardServer

    function = find_reward(options.reward)
    if isinstance(function, str):
        raise RewardError(
            f"{options.reward!r} is no function to serve: module:function, file.py:function, or a ready-made name"
        )
    rewards = RewardSet(build_rewards([function]), None, workers=options.workers, on_error=options.on_error)
    try:
        return RewardServer(rewards, host=options.host, port=options.port, token=os.environ.get(TOKEN_VARIABLE))
    except OSError as error:
        raise RewardError(f"cannot listen on {options.host}:{options.port} ({error}): choose another --port") from None
