"""Of which groups the values of tokens are stored: the same ones however many processes share a rollout."""

from __future__ import annotations

import pytest

from rloom.data.plan import Schedule
from rloom.observe.token_values import TokenValues
from rloom.types import Completion, Group, Prompt, Record, Rollout

GROUPS, K = 8, 2


def make_rollout(places: list[int], numbers: list[int | None], *, replaced: bool = False) -> Rollout:
    """A rollout of one process. A completion's token is the place of its group."""
    groups = [
        Group(
            prompt=Prompt(content="a", token_ids=[1], columns={}, number=number),
            completions=[Completion(token_ids=[place], stop_reason="eos") for _ in range(K)],
        )
        for place, number in zip(places, numbers, strict=True)
    ]
    made = Rollout.of(groups, train_truncated=True)
    made.records = [
        Record(
            # Groups that replaced others were sampled after them.
            group=number + (len(groups) if replaced else 0),
            prompt=group.prompt,
            completion=completion,
            reply="",
            scores={},
            failures={},
            reward=0.0,
            extra={},
        )
        for number, group in enumerate(groups)
        for completion in group.completions
    ]
    return made


def stored(world_size: int, parts: int, step: int, share: float, *, keyed: bool, replaced: bool = False) -> list[int]:
    """The places of the groups whose values are stored, over all processes."""
    found = []
    for rank in range(world_size):
        places = Schedule(
            prompts=GROUPS // world_size, parts=parts, passes=1, parts_per_update=1, world_size=world_size, rank=rank
        ).places()
        # Those that replace others are numbered among themselves, over all processes.
        numbers = range(rank * len(places), (rank + 1) * len(places)) if replaced else places
        rollout = make_rollout(places, list(numbers) if keyed else [None] * len(places), replaced=replaced)
        TokenValues(share, 0, GROUPS, lambda ids: [str(one) for one in ids], places).add(rollout, step)
        found += [record.tokens["ids"][0] for record in rollout.records if record.tokens is not None]
    return sorted(found)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_every_step_stores_the_same_groups_in_any_number_of_processes(share, keyed, replaced):
    """Whether the engine numbers prompts over all processes (`keyed`), or in each by themselves."""
    for step in range(1, 17):
        chosen = TokenValues(share, 0, GROUPS, lambda ids: []).chosen(step)
        wanted = sorted(chosen * K)
        for world_size, parts in [(1, 1), (2, 1), (2, 2), (4, 2)]:
            assert stored(world_size, parts, step, share, keyed=keyed, replaced=replaced) == wanted
