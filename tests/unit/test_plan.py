"""Which update trains on what: coverage, order, shards, streams."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.data.plan import PlanSampler, Schedule, plan_epoch, plan_stream
from rloom.errors import DataError


def schedule(**changes) -> Schedule:
    return Schedule(**({"prompts": 2, "parts": 1, "passes": 1, "parts_per_update": 1} | changes))


def refs(plan) -> list[tuple[int, int]]:
    return [(ref.rollout, ref.part) for ref in plan.parts]


def epoch_of(sampler: PlanSampler, epoch: int = 0) -> list:
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert all(len(batch) == 1 for batch in batches)
    return [batch[0] for batch in batches]


def prompts_in_order(plans) -> list[int]:
    """The prompts of an epoch, each rollout's once."""
    return [prompt for rollout in rollouts_of(plans).values() for prompt in rollout]


def rollouts_of(plans) -> dict[int, list]:
    found: dict[int, list] = {}
    for plan in plans:
        for rollout, prompts in plan.prompts.items():
            assert found.setdefault(rollout, prompts) == prompts  # the same whenever it is asked for
    return found


schedules = st.builds(
    Schedule,
    prompts=st.integers(1, 4),
    parts=st.integers(1, 5),
    passes=st.integers(1, 3),
    parts_per_update=st.integers(1, 7),
)


# -- how rollouts are cut


def test_the_default_is_one_rollout_per_update():
    plans = list(plan_epoch(schedule(parts=3, parts_per_update=3), 5, list(range(6))))
    assert [refs(plan) for plan in plans] == [[(r, 0), (r, 1), (r, 2)] for r in range(3)]
    assert [plan.prompts for plan in plans] == [{0: [0, 1]}, {1: [2, 3]}, {2: [4, 5]}]
    assert [plan.key(r) for r, plan in enumerate(plans)] == [(5, 0), (5, 1), (5, 2)]
    assert all(ref.parts == 3 for plan in plans for ref in plan.parts)


def test_several_updates_per_rollout():
    plans = list(plan_epoch(schedule(parts=4, parts_per_update=2), 0, list(range(4))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(1, 0), (1, 1)], [(1, 2), (1, 3)]]


def test_several_passes():
    plans = list(plan_epoch(schedule(parts=2, parts_per_update=2, passes=3), 0, list(range(2))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (0, 1)]] * 3


def test_an_update_may_hold_the_end_of_one_rollout_and_the_start_of_the_next():
    plans = list(plan_epoch(schedule(parts=2, parts_per_update=3), 0, list(range(6))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (0, 1), (1, 0)], [(1, 1), (2, 0), (2, 1)]]
    assert [plan.prompts for plan in plans] == [{0: [0, 1], 1: [2, 3]}, {1: [2, 3], 2: [4, 5]}]


def test_an_update_larger_than_a_rollout():
    plans = list(plan_epoch(schedule(parts=1, parts_per_update=2, passes=2), 0, list(range(4))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (0, 0)], [(1, 0), (1, 0)]]
    plans = list(plan_epoch(schedule(parts=1, parts_per_update=4), 0, list(range(10))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (1, 0), (2, 0), (3, 0)], [(4, 0)]]


def test_the_last_update_of_an_epoch_may_be_short():
    plans = list(plan_epoch(schedule(parts=3, parts_per_update=2), 0, list(range(2))))
    assert [refs(plan) for plan in plans] == [[(0, 0), (0, 1)], [(0, 2)]]


@settings(max_examples=100, deadline=None)
@given(schedules, st.integers(0, 30))
def test_every_part_of_every_rollout_is_used_once_per_pass(plan, num_prompts):
    plans = list(plan_epoch(plan, 0, list(range(num_prompts))))
    used = Counter(ref for update in plans for ref in refs(update))
    rollouts = num_prompts // plan.prompts
    assert used == {(r, part): plan.passes for r in range(rollouts) for part in range(plan.parts)}
    assert len(plans) == plan.num_updates(rollouts)
    assert all(len(update.parts) == plan.parts_per_update for update in plans[:-1])
    assert all(0 < len(update.parts) <= plan.parts_per_update for update in plans)
    assert all(set(update.prompts) == {r for r, _ in refs(update)} for update in plans)
    assert prompts_in_order(plans) == list(range(rollouts * plan.prompts))


# -- the order


def test_every_prompt_once_per_epoch_unless_it_fills_no_rollout():
    sampler = PlanSampler(schedule(prompts=3), 11, shuffle=True, seed=4)
    assert sampler.num_left_out == 2
    used = prompts_in_order(epoch_of(sampler))
    assert len(used) == 9 == len(set(used))
    assert set(used) <= set(range(11))
    exact = PlanSampler(schedule(prompts=3), 12, shuffle=True, seed=4)
    assert exact.num_left_out == 0
    assert sorted(prompts_in_order(epoch_of(exact))) == list(range(12))


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        return prompts_in_order(epoch_of(PlanSampler(schedule(), 40, shuffle=True, seed=seed), epoch))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # An epoch is found again whether or not those before it were read.
    sampler = PlanSampler(schedule(), 40, shuffle=True, seed=1)
    for epoch in range(3):
        epoch_of(sampler, epoch)
    assert prompts_in_order(epoch_of(sampler, 1)) == order(1, 1)


def test_drawing_an_order_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    PlanSampler(schedule(), 40, shuffle=True, seed=1).order()
    assert torch.equal(torch.get_rng_state(), before)


def test_how_rollouts_are_cut_does_not_change_the_order():
    one = PlanSampler(schedule(prompts=4, parts=1), 16, shuffle=True, seed=9)
    other = PlanSampler(schedule(prompts=4, parts=8, passes=2, parts_per_update=3), 16, shuffle=True, seed=9)
    assert rollouts_of(epoch_of(one)) == rollouts_of(epoch_of(other))


def test_without_shuffling_every_epoch_is_in_order():
    sampler = PlanSampler(schedule(), 6, shuffle=False, seed=3)
    assert prompts_in_order(epoch_of(sampler, 0)) == prompts_in_order(epoch_of(sampler, 1)) == list(range(6))


def test_plans_carry_their_epoch():
    sampler = PlanSampler(schedule(), 4, shuffle=True, seed=0)
    assert [plan.key(r) for r, plan in enumerate(epoch_of(sampler, 7))] == [(7, 0), (7, 1)]


def test_the_length_is_the_number_of_updates():
    sampler = PlanSampler(schedule(prompts=2, parts=3, passes=2, parts_per_update=4), 7, shuffle=True, seed=0)
    assert len(sampler) == 5 == len(list(sampler))  # 3 rollouts × 3 parts × 2 passes, by 4


@pytest.mark.parametrize(("num_prompts", "world_size"), [(0, 1), (4, 1), (9, 2)])
def test_too_few_prompts_for_a_rollout(num_prompts, world_size):
    with pytest.raises(DataError, match=rf"{num_prompts} prompts, and one rollout needs {5 * world_size}"):
        PlanSampler(schedule(prompts=5, world_size=world_size), num_prompts, shuffle=True, seed=0)


def test_just_enough_prompts():
    assert len(PlanSampler(schedule(prompts=5, world_size=2), 10, shuffle=True, seed=0)) == 1


# -- several processes


@settings(max_examples=50, deadline=None)
@given(schedules, st.integers(1, 3), st.integers(0, 20), st.booleans())
def test_processes_share_every_rollout_without_overlap(plan, world_size, extra, shuffle):
    num_prompts = plan.prompts * world_size + extra
    shards = []
    for rank in range(world_size):
        fields = {name: getattr(plan, name) for name in ("prompts", "parts", "passes", "parts_per_update")}
        local = Schedule(**fields, world_size=world_size, rank=rank)
        shards.append(epoch_of(PlanSampler(local, num_prompts, shuffle=shuffle, seed=2)))
    assert len({len(plans) for plans in shards}) == 1
    for plans in zip(*shards, strict=True):  # the same parts at the same time, or the processes would wait for ever
        assert len({tuple(refs(p)) for p in plans}) == 1
    each = [rollouts_of(plans) for plans in shards]
    used = []
    for rollout in each[0]:
        assert [len(prompts[rollout]) for prompts in each] == [plan.prompts] * world_size
        used += [p for prompts in each for p in prompts[rollout]]
    assert len(used) == len(set(used)) == num_prompts // (plan.prompts * world_size) * plan.prompts * world_size


def test_two_processes_hold_what_one_would():
    order = [5, 3, 0, 7, 1, 6, 2, 4]
    one = rollouts_of(plan_epoch(schedule(prompts=4), 0, order))
    first, second = (rollouts_of(plan_epoch(schedule(world_size=2, rank=rank), 0, order)) for rank in (0, 1))
    assert one == {0: [5, 3, 0, 7], 1: [1, 6, 2, 4]}
    assert first == {0: [5, 3], 1: [1, 6]}
    assert second == {0: [0, 7], 1: [2, 4]}


# -- streams


@settings(max_examples=100, deadline=None)
@given(schedules, st.integers(1, 2), st.integers(0, 30))
def test_a_stream_gives_the_plans_of_a_data_set(plan, world_size, num_rows):
    for rank in range(world_size):
        fields = {name: getattr(plan, name) for name in ("prompts", "parts", "passes", "parts_per_update")}
        local = Schedule(**fields, world_size=world_size, rank=rank)
        rows = [{"prompt": str(number)} for number in range(num_rows)]
        assert list(plan_stream(local, 3, iter(rows))) == list(plan_epoch(local, 3, rows))


def test_a_stream_is_read_no_further_than_the_update_needs():
    read = []

    def rows():
        for number in range(100):
            read.append(number)
            yield number

    plans = plan_stream(schedule(prompts=2, parts=2, parts_per_update=1), 0, rows())
    next(plans)
    assert read == [0, 1]
    next(plans)
    assert read == [0, 1]
    next(plans)
    assert read == [0, 1, 2, 3]


def test_an_endless_stream():
    plans = plan_stream(schedule(parts=2, parts_per_update=3), 0, itertools.count())
    got = list(itertools.islice(plans, 100))
    assert got[-1].prompts == {149: [298, 299], 148: [296, 297]}
    assert sum(len(plan.parts) for plan in got) == 300


def test_a_stream_that_fills_no_rollout():
    assert list(plan_stream(schedule(prompts=4), 0, iter(range(3)))) == []
