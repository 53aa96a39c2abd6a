"""`rloom serve-reward module:function`: a reward as a service."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.markup import escape

from rloom.cli.spec import find_reward
from rloom.errors import RewardError
from rloom.rewards.build import check_rewards
from rloom.rewards.calling.http_reward import TOKEN_VARIABLE
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.functions import FunctionReward, ObjectReward
from rloom.rewards.serve import RewardServer


def make_server(options: Any) -> RewardServer:
    """The service, listening; nothing is answered before `serve_forever`."""
    function = find_reward(options.reward)
    if isinstance(function, str):
        raise RewardError(
            f"{options.reward!r} is no function to serve: module:function, file.py:function, or a ready-made name"
        )
    check_rewards([function], None)
    reward = ObjectReward(function) if hasattr(function, "get_rewards") else FunctionReward(function)
    rewards = RewardSet(
        [reward], None, workers=options.workers, on_error="none" if options.on_error == "none" else "raise"
    )
    try:
        return RewardServer(rewards, host=options.host, port=options.port, token=os.environ.get(TOKEN_VARIABLE))
    except OSError as error:
        raise RewardError(f"cannot listen on {options.host}:{options.port} ({error}): choose another --port") from None


def run(options: Any) -> int:
    """The verb."""
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
