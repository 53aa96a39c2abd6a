"""A reward that is a service: batches of completions as JSON, scores as JSON.

What is sent: `{"prompts": […], "completions": […], "completion_ids": […], "columns": {name: […]}}`. What comes back:
`{"scores": […]}`, one number (or null) per completion. `rloom serve-reward` speaks it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rloom.errors import RewardError, checks_options
from rloom.gpu_of_threads import on_this_gpu
from rloom.rewards.calling.addresses import bearer
from rloom.rewards.calling.call_options import named_reward
from rloom.rewards.calling.json_service import JsonService

TOKEN_VARIABLE = "RLOOM_REWARD_TOKEN"


@checks_options
def http_reward(
    url: str,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: int = 64,
    timeout: float = 60.0,
    retries: int = 4,
    backoff: float = 0.5,
    concurrency: int = 8,
) -> Callable[..., list[Any]]:
    """Make a reward of a service. `reward_funcs="http://host:port/score"` is this with its defaults.

    Args:
        url: where to post.
        token: for the header `Authorization: Bearer …`; the environment's RLOOM_REWARD_TOKEN if not given.
        headers: further ones.
        columns: the columns to send; all if not given.
        batch_size: completions per request.
        timeout: seconds for one try of one request.
        retries, backoff: further tries after a failure, and the seconds before the first of them, doubling.
        concurrency: requests at a time.

    ```python
    trainer = RLOOTrainer(model, [http_reward("http://scores:8000/score", timeout=10.0), brevity], config, rows)
    ```
    """
    if batch_size < 1 or concurrency < 1:
        raise RewardError(f"batch_size ({batch_size}) and concurrency ({concurrency}) must be at least 1")
    given = bearer(token, "token=…")
    authorization = given or bearer(os.environ.get(TOKEN_VARIABLE), f"the environment's {TOKEN_VARIABLE}")
    service = JsonService(
        url, headers={**authorization, **(headers or {})}, timeout=timeout, retries=retries, backoff=backoff
    )
    senders: list[ThreadPoolExecutor] = []

    def http_reward_function(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]] | None = None,
        trainer_state: Any = None,
        log_extra: Any = None,
        log_metric: Any = None,
        **others: Any,
    ) -> list[Any]:
        if not senders:
            senders.append(ThreadPoolExecutor(concurrency, thread_name_prefix="rloom-http"))
        sent = _chosen(others, columns)
        fields = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        starts = range(0, len(completions), batch_size)
        payloads = [_part(fields, sent, slice(start, start + batch_size)) for start in starts]
        answers = senders[0].map(on_this_gpu(partial(_scores, service)), payloads)
        return [score for scores in answers for score in scores]

    return named_reward(http_reward_function, service_name(url), streaming=True, threads=True, concurrency=concurrency)


def service_name(url: str) -> str:
    """What metrics call a service: the end of its path, or its host.

    >>> service_name("http://127.0.0.1:8000/score"), service_name("https://judge.example.org/")
    ('score', 'judge.example.org')
    """
    parts = urlsplit(url)
    return parts.path.strip("/").split("/")[-1] or parts.hostname or "http"


def _chosen(others: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is not None and (missing := [name for name in columns if name not in others]):
        raise RewardError(
            f"http_reward: the data set has no column '{missing[0]}'; it has {', '.join(others) or 'none'}"
        )
    chosen = others if columns is None else {name: others[name] for name in columns}
    for name, values in chosen.items():
        try:
            json.dumps(values)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"http_reward: the column '{name}' cannot be sent as JSON ({error}); name those that can in columns=[…]"
            ) from None
    return chosen


def _part(fields: dict[str, Any], columns: dict[str, Any], part: slice) -> dict[str, Any]:
    payload = {name: values[part] for name, values in fields.items() if values is not None}
    return {**payload, "columns": {name: list(values)[part] for name, values in columns.items()}}


def _scores(service: JsonService, payload: dict[str, Any]) -> list[Any]:
    answer = service.post(payload)
    scores = answer.get("scores", answer.get("rewards")) if isinstance(answer, dict) else answer
    if not isinstance(scores, list):
        shown = service.safe(str(answer))[:100]
        raise RewardError(f"{service.url} answered {shown!r}; {{'scores': [one number per completion]}} is expected")
    if len(scores) != len(payload["completions"]):
        raise RewardError(f"{service.url} answered {len(scores)} scores for {len(payload['completions'])} completions")
    # A message may show a text that the service sent in place of a number.
    return [service.safe(score) if isinstance(score, str) else score for score in scores]
