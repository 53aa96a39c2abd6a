"""Asking a judge: cached, counted, several questions at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rloom.errors import RewardError
from rloom.gpu_of_threads import on_this_gpu
from rloom.printable import get_logger
from rloom.rewards.calling.json_service import JsonService
from rloom.rewards.library.judging.reply_cache import ReplyCache

logger = get_logger(__name__)

# The beginning of the names of a judge's metrics. They are totals of the run so far, which have no mean.
TOTALS = "judge/"
ASK_AGAIN = "That was not the JSON that I asked for. Reply with that JSON object alone."

# Reads a number from a reply; None where it says none.
Parse = Callable[[str], float | None]


class JudgeClient:
    """Puts questions to a language model that speaks OpenAI's chat completions."""

    def __init__(
        self,
        service: JsonService,
        request: dict[str, Any],
        cache: ReplyCache | None,
        concurrency: int,
        prices: tuple[float, float] | None,
    ) -> None:
        self.service, self.request, self.cache, self.prices = service, request, cache, prices
        self.counts = dict.fromkeys(("calls", "cached", "unparsed", "prompt_tokens", "completion_tokens"), 0)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="rloom-judge")

    def ask_all(self, questions: list[str], parse: Parse) -> list[float | None]:
        """The number in the reply to each question; None where there is none, even when asked once more."""
        return list(self._threads.map(on_this_gpu(partial(self._ask_twice, parse=parse)), questions))

    def _ask_twice(self, question: str, parse: Parse) -> float | None:
        messages = [{"role": "user", "content": question}]
        reply, value = self._ask(messages, parse)
        if value is None:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": ASK_AGAIN}]
            reply, value = self._ask(messages, parse)
        if value is None:
            self._note_unparsed(reply)
        return value

    def _note_unparsed(self, reply: str) -> None:
        """Count a reply without a number. The first, the tenth, the hundredth … is quoted in a warning."""
        with self._lock:
            self.counts["unparsed"] += 1
            count = self.counts["unparsed"]
        if str(count).strip("0") == "1":
            logger.warning(
                "The judge at %s does not answer as it was asked to: its sample gets no score (%d so far, as "
                "judge/unparsed). It says: %.200r", self.service.url, count, self.service.safe(reply),
            )  # fmt: skip

    def _ask(self, messages: list[dict[str, str]], parse: Parse) -> tuple[str, float | None]:
        """A reply, and the number in it. A reply without a number is not cached, so that the judge is asked again."""
        request = {**self.request, "messages": messages}
        # Another judge may go by the same name elsewhere.
        key = {**request, "url": self.service.url}
        known = self.cache.get(key) if self.cache else None
        if known is not None and (value := parse(known)) is not None:
            self._count(cached=1)
            return known, value
        reply = self._post(request)
        value = parse(reply)
        if self.cache and value is not None:
            self.cache.put(key, reply)
        return reply, value

    def _post(self, request: dict[str, Any]) -> str:
        answer = self.service.post(request)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
            assert isinstance(text, str)
        except (KeyError, IndexError, TypeError, AssertionError):
            shown = str(self.service.safe(answer))[:200]
            raise RewardError(f"{self.service.url} answered no chat completion: {shown!r}") from None
        usage = answer.get("usage")
        used = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
        # Services say all kinds of things there.
        prompt, completion = (n if isinstance(n, int) else 0 for n in used)
        self._count(calls=1, prompt_tokens=prompt, completion_tokens=completion)
        return text

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                self.counts[name] += number

    def totals(self) -> dict[str, float]:
        """What the judge has been asked, and what that cost, so far."""
        totals = {f"{TOTALS}{name}": float(value) for name, value in self.counts.items()}
        if self.prices is not None:
            tokens = (self.counts["prompt_tokens"], self.counts["completion_tokens"])
            totals[f"{TOTALS}cost"] = sum(n * price / 1e6 for n, price in zip(tokens, self.prices, strict=True))
        return totals
