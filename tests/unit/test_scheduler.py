"""Scheduler and pages: plain bookkeeping, tried with random prompts, lengths, places and memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.errors import EngineError
from rloom.generation.native.cache.allocator import PageAllocator
from rloom.generation.native.scheduler import SampledSequence, Scheduler, SharedPrompt


def simulate(scheduler, lengths, chunk, ahead=0):
    """Run to the end, drawing token i as its position; returns every finished sequence's tokens, and checks pages.

    `ahead`: steps that are begun before those before them are read back, as the engine does; the rows of a readback
    are those with which it was begun.
    """
    finished = {}
    rounds = 0
    readbacks = []  # (sequences, steps)

    def end(sequence):
        assert sum(map(len, sequence.stats)) == len(sequence.tokens)  # nothing is left of an attempt that was given up
        finished[sequence] = list(sequence.tokens)
        scheduler.finish(sequence)

    while not scheduler.done:
        rounds += 1
        assert rounds < 10_000, "no progress"
        if not readbacks:
            while prompts := scheduler.next_prefill():
                for prompt in prompts:
                    assert len(prompt.pages) * scheduler.pages.size >= len(prompt.token_ids)
                    for sequence in prompt.sequences:
                        sequence.extend([0], [[0.0] * 3])
                        if lengths[sequence] == 1:
                            end(sequence)
                        else:
                            scheduler.ready.append(sequence)
            readbacks = [(scheduler.fill(chunk), list(scheduler.running))]
        if ahead and readbacks[0][1] == scheduler.running and (more := scheduler.reserve_ahead(readbacks[0][0], ahead)):
            for sequence in scheduler.running:
                last = min(sequence.cached + readbacks[0][0] + more, scheduler.max_new_tokens)
                assert last <= len(sequence.pages) * scheduler.pages.size
            readbacks.append((more, list(scheduler.running)))
        steps, sequences = readbacks.pop(0)
        assert len(scheduler.running) <= scheduler.max_sequences
        holders = [*{s.prompt for s in lengths}, *scheduler.running]
        held = [page for holder in holders for page in holder.pages]
        assert len(held) == len(set(held))  # nobody writes into another's page
        assert 0 not in held
        assert len(held) + scheduler.pages.free == scheduler.pages.usable
        going = []
        for sequence in sequences:
            if sequence in finished:
                continue
            for _ in range(steps):
                position = len(sequence.tokens)
                assert sequence.cached < len(sequence.pages) * scheduler.pages.size  # room for the next key
                sequence.extend([position], [[0.0] * 3])
                if len(sequence.tokens) == lengths[sequence]:
                    break
            if len(sequence.tokens) == lengths[sequence]:
                end(sequence)
            else:
                going.append(sequence)
        scheduler.running = going
    assert scheduler.pages.free == scheduler.pages.usable
    return finished


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_token_is_kept_whatever_the_memory(data):
    size, limit = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 20))
    prompts, lengths = [], {}
    for group in range(data.draw(st.integers(1, 6))):
        prompt = SharedPrompt([1] * data.draw(st.integers(1, 15)))
        prompt.sequences = [SampledSequence(prompt, group, i, key=i) for i in range(data.draw(st.integers(1, 5)))]
        lengths |= {sequence: data.draw(st.integers(1, limit)) for sequence in prompt.sequences}
        prompts.append(prompt)
    longest = max(-(-len(p.token_ids) // size) for p in prompts)
    least = longest + -(-limit // size) + 1
    pages = PageAllocator(total=data.draw(st.integers(least, least + 40)), size=size)
    scheduler = Scheduler(
        prompts,
        pages=pages,
        max_new_tokens=limit,
        max_sequences=data.draw(st.integers(1, 12)),
        prefill_tokens=data.draw(st.integers(1, 40)),
    )
    finished = simulate(scheduler, lengths, chunk=data.draw(st.integers(1, 7)), ahead=data.draw(st.integers(0, 5)))
    assert finished == {sequence: list(range(length)) for sequence, length in lengths.items()}


@pytest.mark.parametrize("total", range(6, 12))
def test_little_memory_sends_the_youngest_back(total):
    prompt = SharedPrompt([1] * 4)
    prompt.sequences = [SampledSequence(prompt, 0, i, key=i) for i in range(4)]
    scheduler = Scheduler(
        [prompt], pages=PageAllocator(total=total, size=4), max_new_tokens=16, max_sequences=4, prefill_tokens=99
    )
    gone, send_back = {}, scheduler._send_back

    def youngest(sequence):
        already = gone.setdefault(id(scheduler.running), set())
        assert set(scheduler.running[scheduler.running.index(sequence) + 1 :]) <= already
        already.add(sequence)
        send_back(sequence)

    scheduler._send_back = youngest
    finished = simulate(scheduler, dict.fromkeys(prompt.sequences, 16), chunk=4)
    assert len(finished) == 4
    assert scheduler.requeued > 0


def test_a_prompt_that_can_never_fit_is_refused_at_once():
    prompt = SharedPrompt([1] * 40)
    prompt.sequences = [SampledSequence(prompt, 0, 0, key=0)]
    pages = PageAllocator(total=12, size=4)
    with pytest.raises(EngineError, match="a prompt of 40 tokens with a completion of 16"):
        Scheduler([prompt], pages=pages, max_new_tokens=16, max_sequences=4, prefill_tokens=99)


def test_all_are_decoded_at_once_where_memory_is_planned_for_all():
    prompts = []
    for group in range(4):
        prompt = SharedPrompt([1] * 8)
        prompt.sequences = [SampledSequence(prompt, group, i, key=i) for i in range(8)]
        prompts.append(prompt)
    for limit in (3, 16):  # one page each, and several
        pages = PageAllocator(total=4 * 2 + 32 * -(-limit // 4) + 1, size=4)
        scheduler = Scheduler(prompts, pages=pages, max_new_tokens=limit, max_sequences=64, prefill_tokens=999)
        for prompt in scheduler.next_prefill():
            for sequence in prompt.sequences:
                sequence.tokens = [0]
                scheduler.ready.append(sequence)
        scheduler.fill(2)
        assert len(scheduler.running) == 32
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
