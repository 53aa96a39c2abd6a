"""What several processes find out together is what one would find out about all of it.

Processes are threads here, which hand each other their values; real ones are in integration/test_processes.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import nn

from rloom import FakeEngine, RLOOConfig, term
from rloom.data.loader import RoundRobin, RoundRobinIndices
from rloom.data.plan import Schedule
from rloom.errors import ConfigError, NoCompletionError, ProcessError
from rloom.evaluation.measured import Measured
from rloom.generation.images import ImageRouter
from rloom.observe.completions import sendable
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.compose import Composition
from rloom.rewards.functions import FunctionReward
from rloom.rewards.scored import Scored
from rloom.training import checkpoint, same_everywhere
from rloom.training.collector import Collector
from rloom.training.credit import Credit, Shaper
from rloom.training.dynamic_sampling import replace_degenerate
from rloom.training.exchange import explaining_lost_peers as lost_peers
from rloom.training.policy import Policy
from rloom.training.processes import ALONE, Processes, fingerprint
from rloom.training.rollout_metrics import RolloutMetrics
from rloom.training.same_everywhere import MAY_DIFFER, check_same_everywhere, check_same_rewards
from rloom.training.sharded import ShardedProcesses
from rloom.training.update_metrics import UpdateMetrics
from rloom.types import Completion, Group, Prompt, Record, Rollout
from tests.conftest import make_model, make_tokenizer


class Threads(Processes):
    """One of several."""

    def __init__(self, rank: int, boxes: list, meeting: threading.Barrier) -> None:
        super().__init__(rank, len(boxes))
        self.boxes, self.meeting = boxes, meeting

    def gather(self, value):
        self.boxes[self.rank] = value
        self.meeting.wait(60)
        values = list(self.boxes)
        self.meeting.wait(60)
        return values


def together(work, count: int = 2) -> list:
    """The results of `work(processes)` in each."""
    boxes, meeting = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(Threads(rank, boxes, meeting)), range(count)))


# -- numbers


def test_means_and_maxima_count_every_value_once():
    values = [torch.tensor([1.0, 2.0, 6.0]), torch.zeros(0), torch.tensor([7.0])]
    assert together(lambda p: float(p.mean(values[p.rank])), 3) == [4.0] * 3
    assert together(lambda p: float(p.max(values[p.rank])), 3) == [7.0] * 3
    assert together(lambda p: p.total(p.rank, 1), 3) == [[3, 3]] * 3
    assert together(lambda p: p.any(p.rank == 2), 3) == [True] * 3


def test_nothing_anywhere_is_nan():
    assert all(torch.isnan(value) for value in together(lambda p: p.mean(torch.zeros(0))))
    assert all(torch.isnan(value) for value in together(lambda p: p.max(torch.zeros(0))))


def test_weights_that_differ_are_named():
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    together(lambda p: p.check_same_weights(models[p.rank]))
    with torch.no_grad():
        models[1].bias[0] += 1e-7

    def check(processes):
        with pytest.raises(ProcessError, match="the weights of process 1 are not those of process 0"):
            processes.check_same_weights(models[processes.rank])
        return True

    assert all(together(check))


OPTIONS = RLOOConfig("out", report_to="none", use_cpu=True)


def check_same(processes, options, train, evaluation=None, model=None, tokenizer=None):
    tokenizer = tokenizer or make_tokenizer()
    policy = Policy(
        model=model or nn.Linear(1, 1), processing_class=tokenizer, tokenizer=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id], vision=False, new_adapter=False,
    )  # fmt: skip
    check_same_everywhere(processes, options, policy, train, evaluation)


def told_of(differing, **given):
    """What one of two processes says that were given something else each: `differing(rank)`."""

    def check(processes):
        try:
            check_same(processes, OPTIONS, **{"train": [{"prompt": "a"}], **given, **differing(processes.rank)})
        except ProcessError as error:
            return str(error)
        return None

    first, second = together(check)
    assert first == second
    return first


def test_prompts_that_begin_alike_are_told_apart():
    """Many have one instruction, and then what differs."""
    system = {"role": "system", "content": "You are a careful assistant. " * 10}
    questions = [[system, {"role": "user", "content": f"what is {number} squared?"}] for number in range(300)]
    for prompts in (questions, [str(chat) for chat in questions]):
        rows = [{"prompt": prompt} for prompt in prompts]
        orders = [rows, rows[1:] + rows[:1]]
        assert "train_dataset (its first, a middle and the last prompt) (" in told_of(
            lambda r, o=orders: {"train": o[r]}
        )
        within = [rows, [rows[0], *rows[1:30][::-1], *rows[30:]]]
        assert "train_dataset (100 prompts) ('digest " in told_of(lambda r, w=within: {"train": w[r]})
        assert told_of(lambda r, rows=rows: {"train": [dict(row, answer=r) for row in rows]}) is None


def frozen_base(rank, **changes):
    """A model whose head alone is trained, with another base in each process."""
    model = make_model(**{name: values[rank] for name, values in changes.items()})
    model.requires_grad_(False).lm_head.requires_grad_(True)
    return model


def with_one(rank, change):
    """A model with one weight changed, in each process another one of its shape."""
    model = make_model()
    change((model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj)[rank])
    return model


@pytest.mark.parametrize(
    "differing",
    [
        lambda rank: {"model": make_model().to((torch.float32, torch.bfloat16)[rank])},
        lambda rank: {"model": frozen_base(rank, intermediate_size=(48, 64))},
        lambda rank: {"model": make_model().requires_grad_(rank == 0)},
        lambda rank: {"model": make_model().to((torch.bfloat16, torch.float32)[rank])},
        lambda rank: {"model": with_one(rank, lambda weight: weight.to(torch.bfloat16))},
        lambda rank: {"model": with_one(rank, lambda weight: weight.requires_grad_(False))},
        lambda rank: {"model": with_one(rank, lambda weight: weight.to(torch.bfloat16)).requires_grad_(False)},
    ],
    ids=["dtype", "frozen shapes", "trained", "main dtype", "whose dtype", "which is frozen", "frozen, whose dtype"],
)
def test_models_that_differ_in_any_weight_are_named(differing):
    """What is not trained too: the main process' weights are sent to all, as bytes."""
    shown = r"'LlamaForCausalLM of [\d,]+ weights in [\w ]+, [\d,]+ of them trained, digest \w+'"
    assert re.search(rf"different model \({shown} in process 0; {shown} in process 1\)", told_of(differing))


def test_tokenizers_that_differ_are_named():
    ends = [make_tokenizer(), make_tokenizer(eos_token="<unk>")]
    assert "different tokenizer (" in told_of(lambda rank: {"tokenizer": ends[rank]})
    chats = [make_tokenizer(), make_tokenizer()]
    chats[1].chat_template = "{{ messages[0].content }}"
    assert "different tokenizer (" in told_of(lambda rank: {"tokenizer": chats[rank]})


def test_launchers_that_shard_otherwise_are_named(monkeypatch):
    """The configuration of `accelerate launch` lies on each machine."""
    plans = [Processes().plan(), *(ShardedProcesses(0, 2, half=None, **kw).plan() for kw in ({}, {"reshard": False}))]
    assert len(set(plans)) == 3
    monkeypatch.setattr(Threads, "plan", lambda self: plans[self.rank])
    assert f"different distribution ('{plans[0]}' in process 0; '{plans[1]}' in process 1)" in told_of(lambda rank: {})


def test_processes_that_were_told_different_things():
    config = OPTIONS
    rows = [{"prompt": text} for text in "abc"]

    def check(processes, *data):
        own = copy.copy(config)
        own.seed = processes.rank if not data else 0
        with pytest.raises(ProcessError) as caught:
            check_same(processes, own, data[processes.rank] if data else rows)
        return str(caught.value)

    def check_evaluation(processes, data):
        with pytest.raises(ProcessError) as caught:
            check_same(processes, config, rows, data)
        return str(caught.value)

    assert all("have different seed ('0' in process 0; '1' in process 1). Does" in m for m in together(check))
    for other in (rows[::-1], rows[:2]):
        assert all("train_dataset" in m for m in together(lambda p, other=other: check(p, rows, other)))
    together(lambda processes: check_same(processes, config, rows))

    assert all("eval_dataset['a']" in m for m in together(lambda p: check_evaluation(p, {"a": rows[p.rank :]})))
    missing = together(lambda p: check_evaluation(p, rows if p.rank else None))  # both say so
    assert all("len(eval_dataset) (nothing in process 0; '3' in process 1)" in message for message in missing)
    streams = [Dataset.from_list(rows).to_iterable_dataset() for _ in range(2)]
    apart = [split_dataset_by_node(one, rank=rank, world_size=2) for rank, one in enumerate(streams)]
    assert all("(its first prompt) ('a' in process 0; 'b' in" in m for m in together(lambda p: check(p, *apart)))
    together(lambda processes: check_same(processes, config, streams[processes.rank], iter(rows)))

    def dated(processes):  # a folder named after the second in which each has started
        own = copy.copy(config)
        own.output_dir = f"out-{processes.rank}"
        with pytest.raises(ProcessError, match="have different output_dir"):
            check_same(processes, own, rows)

    together(dated)


def told(first: dict, second: dict) -> list:
    """What each of two processes says whose options are these."""

    def check(processes):
        own = copy.copy(OPTIONS)
        vars(own).update((first, second)[processes.rank])
        try:
            check_same(processes, own, [{"prompt": "a"}])
        except ProcessError as error:
            return str(error)
        return None

    return together(check)


def test_every_option_is_compared_that_is_not_said_to_differ():
    names = {field.name for field in dataclasses.fields(RLOOConfig)} - {*MAY_DIFFER}
    # These decide who waits for whom.
    assert names > {
        "sync_ref_model", "ref_model_sync_steps", "keep_whole_copy", "ds3_gather_for_generation", "kl_target",
        "early_stop_on", "early_stop_patience", "num_generations_eval", "load_best_model_at_end", "save_only_model",
    }  # fmt: skip
    silent = [n for n in sorted(names) if any(f"different {n} ('1' in" not in str(m) for m in told({n: 1}, {n: 2}))]
    assert silent == []
    assert told({"sync_ref_model": True, "seed": 1}, {"seed": 2})[0] == (
        "processes must be given the same options, data, model and rewards, and have different seed ('1' in process 0; "
        "'2' in process 1); sync_ref_model ('True' in process 0; 'False' in process 1). Does the script look at its "
        "rank or at the clock, or shuffle without a seed? Do machines have other files or settings? docs/recipes.md "
        "says what may differ (Several GPUs)"
    )


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_what_belongs_to_one_process_may_differ(name):
    assert name in {field.name for field in dataclasses.fields(RLOOConfig)}
    assert told({name: "1"}, {name: "2"}) == [None, None]


def test_servers_have_other_names_on_other_machines_and_are_as_many():
    here, there = "http://127.0.0.1:8000", "http://10.0.0.1:8000"
    assert told({"vllm_server_base_url": here}, {"vllm_server_base_url": there}) == [None, None]
    message = told({"vllm_server_base_url": here}, {"vllm_server_base_url": f"{there},{here}"})[0]
    assert "different number of vLLM servers ('1' in process 0; '2' in process 1)" in message


class Plain:
    """An object whose text has its address."""


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("model_init_kwargs", {"device_map": {"": 0}, "dtype": "float32"}, {"dtype": "float32", "device_map": {"": 1}}),
        ("model_init_kwargs", {"max_memory": {0: "9GiB"}}, {"max_memory": {1: "20GiB"}}),
        ("generation_kwargs", {"a": {"x"}, "b": 1}, {"b": 1, "a": {"x"}}),
        ("gradient_checkpointing_kwargs", {"context_fn": Plain()}, {"context_fn": Plain()}),
        ("lr_scheduler_kwargs", {"a": float("nan")}, {"a": float("nan")}),
        ("model_init_kwargs", {"token": "mine"}, {"token": "yours"}),
    ],
)
def test_equal_values_are_equal_however_they_are_written(name, first, second):
    assert told({name: first}, {name: second}) == [None, None]


def test_what_is_within_an_option_is_compared_too():
    assert "model_init_kwargs ('{dtype: float32}' in process 0; '{dtype: bfloat16}' in process 1)" in str(
        told({"model_init_kwargs": {"dtype": "float32"}}, {"model_init_kwargs": {"dtype": "bfloat16"}})
    )
    # A name that may differ there is another thing elsewhere.
    assert "generation_kwargs" in str(
        told({"generation_kwargs": {"cache_dir": "a"}}, {"generation_kwargs": {"cache_dir": "b"}})
    )


def test_addresses_that_differ_are_named_and_not_shown(monkeypatch):
    """Of options that are addresses; those that are there now may differ."""
    monkeypatch.setattr(same_everywhere, "MAY_DIFFER", set(MAY_DIFFER) - {"eval_judge_url"})
    message, other = (
        told({"eval_judge_url": f"http://me:{word}@{host}"}, {"eval_judge_url": "http://b"})[0]
        for word, host in (("hidden", "a"), ("hidden", "b"))
    )
    assert "different eval_judge_url ('not shown" in message
    assert "hidden" not in message
    assert message != other


def test_other_models_or_rewards_are_named():
    def length(completions): ...
    def largest(completions): ...

    def composed(*terms):
        return Composition(terms, ["length", "largest"])

    def check(processes):
        with pytest.raises(ProcessError) as model:
            check_same(processes, OPTIONS, [], model=make_model(vocab_size=64 + processes.rank))
        rewards = [FunctionReward(length), FunctionReward(largest)]
        plain = composed(term(length), term(largest))
        with pytest.raises(ProcessError) as order:
            check_same_rewards(processes, RewardSet(rewards if processes.is_main else rewards[::-1], None), plain)
        with pytest.raises(ProcessError) as weights:
            check_same_rewards(processes, RewardSet(rewards, weights=[1.0, 0.5 + processes.rank]), plain)
        clipped = composed(term(length, clip=(0.0, 1.0 + processes.rank)), term(largest))
        with pytest.raises(ProcessError) as terms:
            check_same_rewards(processes, RewardSet(rewards, None), clipped)
        gated = composed(term(length), term(largest, **({"only_if": "length"} if processes.is_main else {})))
        with pytest.raises(ProcessError) as gates:
            check_same_rewards(processes, RewardSet(rewards, None), gated)
        check_same_rewards(processes, RewardSet(rewards, None), plain)
        return str(model.value), str(order.value), str(weights.value), str(terms.value), str(gates.value)

    (model, order, weights, terms, gates), _ = together(check)
    assert "different model ('LlamaForCausalLM of " in model
    assert """different reward_funcs ("['length', 'largest']" in process 0; "['largest', 'length']" in""" in order
    assert "different weights of rewards (" in weights
    assert "different terms of rewards ('[{at_least: 1.0, clip: [0.0, 1.0], function: length," in terms
    assert "only_if: 0" in gates


# -- another process has gone, or something is wrong with this one

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:36753. Check the logs"),
        RuntimeError(f"{GLOO}pair.cc:534] Read error [127.0.0.1]:1234: Connection reset by peer"),
        RuntimeError(f"{GLOO}pair.cc:598] writev [127.0.0.1]:1234: Broken pipe"),
        RuntimeError(f"{GLOO}unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete"),
        dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/1"),
        dist.DistNetworkError("Connection was likely closed. Did the remote server shutdown or crash?"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        dist.DistBackendError(
            f"{NCCL}remote process exited or there was a network error\nncclRemoteError: a call failed"
        ),
        dist.DistBackendError(
            f"{NCCL}unhandled system error\nLast error:\nsocketProgress: Connection closed by remote"
        ),
        dist.DistBackendError("Watchdog caught collective operation timeout: ran for 600000 milliseconds"),
        RuntimeError(f"{GLOO}pair.cc:227] connect [10.0.0.9]:1234: No route to host"),
        RuntimeError("Gloo connectFullMesh failed with [pair.cc:160] no error"),
        dist.DistNetworkError("The client socket has failed to connect to node: Network is unreachable"),
    ],
    ids=str,
)
def test_a_process_that_has_gone_is_named_with_what_was_noticed(error):
    with pytest.raises(ProcessError, match="has ended, or did not answer within ddp_timeout") as caught, lost_peers():
        raise error
    assert str(caught.value).endswith(f"noticed here: {str(error).partition(chr(10))[0]}")
    assert caught.value.__cause__ is error
    with pytest.raises(ProcessError) as again, lost_peers():  # collectives within a block that explains them
        raise caught.value
    assert again.value is caught.value


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(
            f"{NCCL}invalid usage\nncclInvalidUsage: …\nLast error:\nDuplicate GPU detected : rank 0 and rank 1"
        ),
        dist.DistBackendError(
            f"{NCCL}unhandled cuda error\nncclUnhandledCudaError: …\nLast error:\nCuda failure 2 'out of memory'\n"
            "Exception raised from create at NCCLUtils.cpp:94 (most recent call first):\nframe #2: checkTimeout()"
        ),
        dist.DistBackendError(
            "NCCL communicator was aborted on rank 0. Original reason for failure was: NCCL error: unhandled cuda error"
            "\nncclUnhandledCudaError: …\nLast error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError(f"{GLOO}device.cc:83] ifa != nullptr. Unable to find address for: eth7"),
        RuntimeError("the reward's own connection timed out"),
        ValueError("no gloo timeout"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_what_is_wrong_here_is_not_put_down_to_others(error):
    with pytest.raises(type(error)) as caught, lost_peers():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_fingerprint_sees_every_bit(dtype):
    weights = torch.arange(6).to(dtype)
    other = weights.clone()
    assert fingerprint([weights]) == fingerprint([other])
    other.view(torch.uint8)[0] += 1
    assert fingerprint([weights]) != fingerprint([other])
    table = weights.view(2, 3)
    assert fingerprint([table.T.contiguous().T]) == fingerprint([table])  # whatever its layout
    assert fingerprint([weights.flip(0)]) != fingerprint([weights])


# -- scores and advantages

SCORES = torch.tensor([[1.0, 0.2], [2.0, torch.nan], [0.5, 0.9], [3.0, 0.1], [torch.nan, torch.nan], [9.0, 0.4]])
LENGTHS = torch.tensor([3, 9, 2, 5, 4, 7])
ENDED = torch.tensor([True, False, True, True, False, True])
CUTS = [slice(0, 4), slice(4, 6)]


def shaper_of(**changes) -> Shaper:
    choices = SimpleNamespace(normalize_rewards=changes.pop("normalize_rewards", None), reward_clip_range=None)
    options = {"missing_eos_penalty": 0.5, "length_regularization": "linear", "length_coefficient": 1.0}
    config = SimpleNamespace(**options, max_completion_length=10, length_margin=None, choices=choices)

    def right(completions): ...
    def form(completions): ...

    terms = [term(right, normalize=True, only_if=form, at_least=0.15), term(form)]
    return Shaper(config, torch.tensor([1.0, 0.5]), Composition(terms, ["right", "form"]))


@pytest.mark.parametrize("normalize", [None, "batch", "running"])
def test_scores_are_shaped_by_the_statistics_of_all(normalize):
    """Twice, since running moments go on; with a call that failed, which shuts a gate."""
    failed = torch.zeros_like(SCORES, dtype=torch.bool)
    failed[1, 1] = True
    whole = shaper_of(normalize_rewards=normalize)
    expected = [whole(SCORES * factor, LENGTHS, ENDED, failed, update=True) for factor in (1.0, 2.0)]

    def shape(processes):
        own, cut = shaper_of(normalize_rewards=normalize), CUTS[processes.rank]
        rest = LENGTHS[cut], ENDED[cut], failed[cut]
        parts = [own.together(processes, SCORES[cut] * factor, *rest) for factor in (1.0, 2.0)]
        assert own.moments == whole.moments
        assert own.composition.state_dict() == whole.composition.state_dict()
        return parts

    found = [torch.cat(parts) for parts in zip(*together(shape), strict=True)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def credit_of(processes: Processes = ALONE, **changes) -> Credit:
    options = {"kl_placement": "reward", "advantage_estimator": "leave_one_out", "advantage_clip": None,
               "normalize_advantages": False} | changes  # fmt: skip
    choices = SimpleNamespace(**options)
    config = SimpleNamespace(beta=0.1, kl_target=None, kl_target_gain=0.1, choices=choices, baseline_momentum=0.5)
    return Credit(config, processes)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_advantages": True},
        {"normalize_advantages": True, "kl_placement": "reward_tokens"},
        {"advantage_estimator": "batch_mean"},
        {"advantage_estimator": "moving_average", "kl_placement": "reward_tokens"},
    ],
    ids=str,
)
def test_advantages_compare_over_all(changes):
    torch.manual_seed(0)
    score, groups = torch.randn(6), torch.tensor([0, 0, 1, 1, 2, 2])
    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 1, 2, 3]).unsqueeze(1)).float()
    kl = torch.randn(6, 5) * mask
    score[4] = torch.nan
    whole = credit_of(**changes)
    expected = [whole.advantages(score * factor, groups, kl, mask) for factor in (1.0, 3.0)]

    def compare(processes):
        own, cut = credit_of(processes, **changes), CUTS[processes.rank]
        width = int(mask[cut].sum(-1).max())  # tables are as wide as a process' longest completion
        numbers = groups[cut] - groups[cut][0]
        tables = kl[cut][:, :width], mask[cut][:, :width]
        found = [own.advantages(score[cut] * factor, numbers, *tables) for factor in (1.0, 3.0)]
        assert own.state_dict() == whole.state_dict()
        return [nn.functional.pad(one, (0, 5 - width)) if one.dim() == 2 else one for one in found]

    found = [torch.cat(parts) for parts in zip(*together(compare), strict=True)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_groups_are_nobody_elses_business():
    """Leave-one-out asks nobody: a process may do it when the others do not."""
    credit = credit_of(Processes(rank=1, count=2))
    found = credit.advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.zeros(2, 1), torch.ones(2, 1))
    assert found.tolist() == [-2.0, 2.0]


# -- metrics


def outcome_of(lengths, scores, sizes, costs=(), logged=()) -> RolloutMetrics:
    groups = []
    left = iter(lengths)
    for size in sizes:
        completions = [Completion(token_ids=[1] * next(left), stop_reason="eos") for _ in range(size)]
        groups.append(Group(prompt=Prompt(content="p", token_ids=[1, 2]), completions=completions))
    columns = torch.tensor(scores).unsqueeze(-1)
    scored = Scored(scores=columns, failed=torch.zeros_like(columns).bool(), costs=list(costs), logged=list(logged))
    return RolloutMetrics.of(groups, scored, columns[:, 0], 2)


def test_metrics_of_rollouts_are_those_of_all_completions():
    whole = outcome_of([3, 5, 2, 2, 9], [1.0, 2.0, 4.0, 4.0, torch.nan], [2, 2, 1])
    parts = [outcome_of([3, 5], [1.0, 2.0], [2]), outcome_of([2, 2, 9], [4.0, 4.0, torch.nan], [2, 1])]
    found, expected = {}, {}
    RolloutMetrics.joined(parts).record(["r"], found.__setitem__)
    whole.record(["r"], expected.__setitem__)
    assert found.keys() == expected.keys()
    assert {name: float(value) for name, value in found.items()} == {n: float(v) for n, v in expected.items()}
    assert found["completions/unscored_ratio"] == 2 / 6  # one without a score, one that there is not
    assert RolloutMetrics.joined(parts).num_tokens == whole.num_tokens == 5 * 2 + 21


def test_who_sits_out_changes_nothing():
    some = outcome_of([3, 5], [1.0, 2.0], [2], costs=[("rewards/r/time", 1.0), ("rewards/r/none_ratio", 0.5)])
    found, expected = {}, {}
    RolloutMetrics.joined([RolloutMetrics.nothing(1), some]).record(["r"], found.__setitem__)
    some.record(["r"], expected.__setitem__)
    assert found == expected
    RolloutMetrics.joined([RolloutMetrics.nothing(1)] * 2).record(["r"], lambda name, value: pytest.fail(name))


def test_totals_of_processes_are_summed_and_other_numbers_averaged():
    logged = [
        [("share", 0.5), ("judge/calls", 3.0), ("judge/calls", 2.0)],
        [("share", 1.0), ("judge/calls", 4.0)],
    ]
    joined = RolloutMetrics.joined([outcome_of([1], [0.0], [1], logged=entries) for entries in logged])
    assert joined.logged == [("share", 0.5), ("share", 1.0)]
    assert joined.totals == {"judge/calls": 7.0}


def test_tallies_are_summed_and_shares_of_clipped_ones_counted_by_completion():
    metrics = SimpleNamespace(found={}, add=lambda mode, name, value: metrics.found.__setitem__(name, float(value)))
    parts = [
        UpdateMetrics(
            entropy=torch.tensor(6.0), tokens=torch.tensor(3.0), low=[torch.tensor([1.0])], high=[torch.zeros(1)]
        ),
        UpdateMetrics(entropy=torch.tensor(2.0), tokens=torch.tensor(5.0), skipped=2,
              low=[torch.zeros(2), torch.zeros(1)], high=[torch.zeros(2), torch.ones(1)]),
        UpdateMetrics(),  # nothing to learn from
    ]  # fmt: skip
    together(lambda p: parts[p.rank].record(metrics, "train", p), 3)
    found = metrics.found
    assert found["entropy"] == 1.0
    assert found["completions/skipped"] == 2
    assert (found["clip_ratio/low_mean"], found["clip_ratio/high_mean"]) == (0.25, 0.25)
    assert (found["clip_ratio/low_min"], found["clip_ratio/high_max"]) == (0.0, 1.0)
    assert "aux_loss" not in found


# -- who does what


@pytest.mark.parametrize(("prompts", "parts", "count"), [(4, 2, 2), (6, 3, 3), (3, 2, 2), (2, 1, 4), (1, 4, 2)])
def test_places_are_everybodys_and_an_update_has_the_groups_of_one_process(prompts, parts, count):
    each = [
        Schedule(prompts=prompts, parts=parts, passes=1, parts_per_update=1, world_size=count, rank=rank).places()
        for rank in range(count)
    ]
    assert sorted(place for places in each for place in places) == list(range(prompts * count))
    if prompts % parts == 0:
        share = prompts // parts
        for part in range(parts):
            taken = {place for places in each for place in places[part * share : (part + 1) * share]}
            assert taken == set(range(part * share * count, (part + 1) * share * count))


def test_batches_are_dealt_in_turns():
    whole = [[0, 1], [2, 3], [4, 5], [6]]
    each = [list(RoundRobinIndices(7, RoundRobin(2, rank=rank, count=3))) for rank in range(3)]
    assert each == [[whole[0], whole[3]], [whole[1]], [whole[2]]]
    assert [len(RoundRobinIndices(7, RoundRobin(2, rank=rank, count=3))) for rank in range(3)] == [2, 1, 1]
    assert list(RoundRobinIndices(1, RoundRobin(2, rank=1, count=2))) == []


@pytest.mark.parametrize("keyed", [True, False])
def test_processes_never_draw_the_same_noise_for_different_prompts(keyed):
    engine = FakeEngine(lambda prompt, sample, seed: [2], eos_token_ids=[2])
    engine.keyed_by_prompt = keyed

    def noise(processes):
        prompts = [Prompt(content="a", token_ids=[1]) for _ in range(2)]
        places = [2 * processes.rank, 2 * processes.rank + 1]
        seed = Collector._share_noise(SimpleNamespace(processes=processes, engine=engine), prompts, 7, places)
        return [(seed, index if prompt.number is None else prompt.number) for index, prompt in enumerate(prompts)]

    drawn = [one for own in together(noise) for one in own]
    assert len(set(drawn)) == 4
    if keyed:  # as one process
        assert drawn == [(7, 0), (7, 1), (7, 2), (7, 3)]


def test_images_draw_other_noise_in_each_process():
    """Where prompts with images go to an engine that does not look at a prompt's number."""
    seeds = []

    def script(prompt, sample, seed):
        seeds.append(seed)
        return [2]

    text, pictures = (FakeEngine(script, eos_token_ids=[2]) for _ in range(2))
    text.keyed_by_prompt, text.takes_images = True, False
    router = ImageRouter(lambda: text, pictures)
    assert router.keyed_by_prompt
    for number in (None, 0, 2):
        prompt = Prompt(content="a", token_ids=[1], inputs={"pixels": torch.zeros(1)}, number=number)
        list(router.generate([prompt], 1, seed=7))
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_what_a_reward_function_shows_never_keeps_rows_from_travelling():
    class Silent:
        def __str__(self):
            raise ValueError("no text")

        def __reduce__(self):
            raise ValueError("no pickle")

    within_itself = [lambda: 1]
    within_itself.append(within_itself)
    extra = {"n": 1, "t": torch.ones(2), "nested": [1, {"a": 2}], "function": within_itself, "silent": Silent()}
    image = object()
    (row,) = sendable([{"prompt": "a", "extra": extra, "images": [image]}])
    assert row["images"] == [image]
    found = row["extra"]
    assert (found["n"], found["t"].tolist(), found["nested"]) == (1, [1.0, 1.0], [1, {"a": 2}])
    assert "function" in found["function"]
    assert found["silent"] == "a Silent"


def test_what_an_evaluation_has_measured_travels_whatever_rows_hold():
    columns = {"check": lambda text: True, "summary": "a text."}
    prompt = Prompt(content="a", token_ids=[1], columns=columns, images=[lambda: 1])
    measured = Measured(reward_names=["r"], prompts=[prompt], firsts=["b"])
    sent = pickle.loads(pickle.dumps(measured.sendable()))
    assert sent.firsts == ["b"]
    assert sent.prompts[0].columns["summary"] == "a text."
    assert prompt.columns is columns


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)
    workers = {}
    for count in ("1", "4", "64"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
        rewards = RewardSet([FunctionReward(lambda completions, **_: [0.0] * len(completions))], None)
        workers[count] = rewards.callers[0].defaults.workers
    assert workers == {"1": 8, "4": 3, "64": 1}


def test_all_take_part_in_rounds_of_replacement():
    """One has nothing to replace, and draws in as many rounds all the same."""

    def rollout(*scores):
        score, count = torch.tensor(scores), len(scores)
        prompt, completion = Prompt(content="p", token_ids=[1]), Completion(token_ids=[1], stop_reason="eos")
        rest = {"prompt": prompt, "completion": completion, "reply": "", "failures": {}, "extra": {}}
        records = [Record(group=row // 2, scores={}, reward=value, **rest) for row, value in enumerate(scores)]
        return Rollout(
            prompt_ids=[[1]] * count,
            completion_ids=[[1]] * count,
            groups=torch.arange(count) // 2,
            num_groups=count // 2,
            scores=score.unsqueeze(-1),
            score=score,
            trained=[True] * count,
            total=score,
            records=records,
            drawn=records,
        )

    def replace(processes):
        own = rollout(1.0, 1.0, 0.0, 1.0) if processes.rank else rollout(0.0, 1.0, 1.0, 0.0)
        counts = []

        def draw(count, number):
            counts.append(processes.gather(count))  # as the trainer does: all are asked in every round
            if not count:
                raise NoCompletionError("nothing is to be replaced here")
            return rollout(1.0, 1.0) if number == 0 else rollout(2.0, 3.0)

        changed, replaced = replace_degenerate(own, draw, 3, processes)
        assert [record.reward for record in changed.records] == changed.score.tolist()
        return replaced, counts, changed.score.tolist(), [record.group for record in changed.drawn]

    assert together(replace) == [
        (0, [[0, 1], [0, 1]], [0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1]),
        (1, [[0, 1], [0, 1]], [2.0, 3.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2, 3, 3]),  # all that was drawn is written down
    ]


def test_each_process_has_its_own_state_and_a_new_one_the_first_ones(tmp_path):
    for rank in range(2):
        state = checkpoint.state_of({}, {"rank": rank})
        checkpoint.save(tmp_path, state, {"w": torch.ones(1) * rank} if not rank else None, rank=rank)
    assert [checkpoint.load(tmp_path, rank=rank)[0]["plan"]["rank"] for rank in range(3)] == [0, 1, 0]
    assert checkpoint.load(tmp_path, rank=2)[1] == {"w": torch.zeros(1)}


def test_checkpoints_in_parts_are_fsdps_alone(tmp_path):
    alone = Processes()
    for call in (
        lambda: alone.save_weights(tmp_path),
        lambda: alone.save_optimizer(tmp_path, None),
        lambda: alone.load_weights(tmp_path),
        lambda: alone.load_optimizer(tmp_path, None),
    ):
        with pytest.raises(ConfigError, match="are FSDP2's: go on with fsdp=True"):
            call()
