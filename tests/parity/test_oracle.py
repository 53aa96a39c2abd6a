"""Whole runs against the oracle: options drawn at random, completions scripted, everything that shows compared.

`--oracle N` draws N runs in place of those that CI draws.
"""

from __future__ import annotations

import copy
import math

import pytest
from transformers import TrainerCallback

from rloom import FakeEngine, RLOOConfig, RLOOTrainer
from rloom.errors import ConfigError
from rloom.observe.clock import PHASES
from rloom.observe.metric_table import find
from tests.conftest import LETTERS, make_tokenizer
from tests.parity.draws import CI, EOS, ESTIMATORS, FIRST, PLACEMENTS, Draw, draw_run
from tests.parity.oracle import Oracle

CLOCKS = ("time", "runtime", "_per_second", "eps", "total_flos", *(f"time/{phase}" for phase in PHASES))


def encode(text: str) -> list[int]:
    return [FIRST + LETTERS.index(letter) for letter in text]


def decode(tokens: list[int]) -> str:
    return "".join(LETTERS[token - FIRST] for token in tokens if token >= FIRST)


class Weights(TrainerCallback):
    """Keeps the weights after every update."""

    def __init__(self):
        self.updates = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.updates.append([p.detach().clone() for p in model.parameters()])


class ScriptedEngine(FakeEngine):
    """The scripted engine, with log-probabilities that an engine would give, and the last group first: engines yield
    groups as they finish."""

    def __init__(self, run: Draw):
        super().__init__(lambda prompt, sample, seed: run.script(prompt.content, sample, seed), eos_token_ids=[EOS])
        self.run = run

    def generate(self, prompts, num_generations, *, seed):
        for group in reversed(list(super().generate(prompts, num_generations, seed=seed))):
            for place, completion in enumerate(group.completions):
                completion.logprobs = self.run.sampled(completion.token_ids, place)
                completion.mask = self.run.mask(completion.token_ids)
            yield group


class Tape:
    """What the engine was asked for, played back in order, and held against what it should have been asked for."""

    def __init__(self, run: Draw, calls):
        self.run, self.calls = run, list(calls)
        self.seeds: dict[str, list[int]] = {"train": [], "eval": []}
        self.prompts: list[list[str]] = []  # of the rollouts

    def __call__(self, wanted, number, count, mode):
        prompts, asked, seed = self.calls.pop(0)
        names = [prompt.content for prompt in prompts]
        assert asked == count
        assert len(names) == number
        assert set(names) <= set(self.run.prompts + self.run.eval_prompts)
        assert names == (names if wanted is None else wanted)
        self.seeds[mode].append(seed)
        if mode == "train":
            self.prompts.append(names)
        return [(name, self._completions(name, count, seed)) for name in names]

    def _completions(self, prompt, count, seed):
        drawn = [self.run.script(prompt, sample, seed) for sample in range(count)]
        there = iter(range(count))
        return [None if tokens is None else self._completion(tokens, next(there)) for tokens in drawn]

    def _completion(self, tokens, place):
        mask = self.run.mask(tokens)
        return tokens, EOS in tokens, self.run.sampled(tokens, place), [True] * len(tokens) if mask is None else mask


class Rows:
    """A stream: iterable, without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def train(run: Draw, folder) -> tuple[RLOOTrainer, Weights, ScriptedEngine]:
    """The run, by rloom."""
    fixed = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "diagnosis": False}
    args = RLOOConfig(str(folder / "out"), advice=False, store_completions=False, **fixed, **copy.deepcopy(run.options))
    weights, engine = Weights(), ScriptedEngine(run)
    rows = [{"prompt": prompt} for prompt in run.prompts]
    trainer = RLOOTrainer(
        run.model(),
        run.rewards,
        args,
        Rows(rows) if run.stream else rows,
        [{"prompt": prompt} for prompt in run.eval_prompts] or None,
        processing_class=make_tokenizer(),
        callbacks=[weights],
        engine=engine,
    )
    begin_at = run.moved(run.model()).state_dict()
    with trainer.processes.whole_weights(trainer.model, loading=True):
        trainer.model.load_state_dict(begin_at)
    trainer.train()
    return trainer, weights, engine


def simulate(run: Draw, calls) -> tuple[Oracle, Tape]:
    """The run, by the oracle."""
    tape = Tape(run, calls)
    oracle = Oracle(
        run.moved(run.model()),
        run.model(),
        copy.deepcopy(run.options),
        prompts=run.prompts,
        eval_prompts=run.eval_prompts,
        rewards=run.rewards,
        tape=tape,
        encode=encode,
        decode=decode,
        stream=run.stream,
    )
    oracle.run()
    return oracle, tape


def test_run_is_the_oracles(oracle_draw, tmp_path):
    run = draw_run(oracle_draw)
    trainer, weights, engine = train(run, tmp_path)
    oracle, tape = simulate(run, engine.calls)
    if oracle.chance and oracle_draw not in CI:
        pytest.skip("a score is the mean of others by chance: rounding decides whether its completion is run")
    assert not tape.calls, "the engine was asked for more than the schedule says"
    compare_draws(run, tape, oracle)
    tolerance = 2e-4 * max(1.0, 0.01 / oracle.finest)
    least = 0.01 * run.options["learning_rate"]
    compare_weights(run.moved(run.model()), weights.updates, oracle.weights, least=least, tolerance=tolerance)
    compare_logs(trainer.state.log_history, oracle.logs, tolerance)


def compare_draws(run, tape, oracle):
    """Every rollout has noise of its own, every evaluation the same; a prompt comes once in an epoch."""
    assert len(set(tape.seeds["train"])) == len(tape.seeds["train"])
    batches = len(run.eval_prompts) // 2
    if batches:
        assert tape.seeds["eval"] == tape.seeds["eval"][:batches] * (len(tape.seeds["eval"]) // batches)
    per_epoch = len(run.prompts) // oracle.prompts_per_rollout
    for first in range(0, len(tape.prompts), per_epoch):
        epoch = [prompt for prompts in tape.prompts[first : first + per_epoch] for prompt in prompts]
        assert len(set(epoch)) == len(epoch)


def compare_weights(start, ours, theirs, *, least, tolerance):
    """How far each update moves each weight. One that moves them less than `least` moves them by rounding."""
    before_ours = before_theirs = [parameter.detach() for parameter in start.parameters()]
    names = [name for name, _ in start.named_parameters()]
    assert len(ours) == len(theirs) > 0
    for update, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        moved = [(b - a).abs().max() for a, b in zip(before_theirs, other, strict=True)]
        scale = max(float(max(moved)), least)
        for name, *four in zip(names, before_ours, mine, before_theirs, other, strict=True):
            error = float(((four[1] - four[0]) - (four[3] - four[2])).abs().max()) / scale
            assert error < tolerance, f"update {update + 1}, {name}: {error}"
        before_ours, before_theirs = mine, other


def compare_logs(ours, theirs, tolerance):
    """The same names in each log, clocks aside, with the same values."""
    assert len(ours) == len(theirs)
    names = {name.removeprefix("eval_") for log in ours for name in log if not name.startswith("train_")}
    unknown = {name for name in names if not name.endswith(("_low", "_high", *CLOCKS)) and find(name) is None}
    assert not unknown, "these metrics have no entry in the table of metrics"
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        mine = {name: value for name, value in mine.items() if not name.endswith(CLOCKS)}
        for name in [name for name in mine if name.startswith("eval_") and name.endswith(("_low", "_high"))]:
            compare_interval(mine, name)
        assert mine.keys() == other.keys(), f"log {number}: {mine.keys() ^ other.keys()}"
        for name, value in other.items():
            assert (mine[name] is None) == (value is None), f"log {number}, {name}: {mine[name]} and {value}"
            if value is not None:
                close = math.isclose(mine[name], value, rel_tol=tolerance, abs_tol=tolerance / 10)
                assert close, f"log {number}, {name}: {mine[name]} and {value}"


def compare_interval(log, name):
    """The bootstrap draws at random: its interval is only held against its value, and let go."""
    bound, value = log.pop(name), log[name.rsplit("_", 1)[0]]
    if bound is not None:
        assert bound <= value + 1e-6 if name.endswith("_low") else bound >= value - 1e-6


def test_draws_reach_every_choice():
    """What CI draws has each choice of each option at least once."""
    runs = [draw_run(number) for number in CI]
    wanted = {
        "advantage_estimator": ESTIMATORS,
        "kl_estimator": ["k1", "k2", "k3", "full"],
        "kl_placement": PLACEMENTS,
        "ratio_level": ["sequence", "token"],
        "surrogate": ["clip", "reinforce"],
        "loss_aggregation": ["sequence_mean", "sequence_token_mean", "token_mean"],
        "normalize_rewards": ["batch", "running"],
        "normalize_advantages": [True],
        "truncated_completions": ["keep", "mask", "exclude"],
        "length_regularization": ["linear", "soft_overlong"],
        "objective": ["trl", "paper", "openrlhf", "verl", "reinforce++"],
        "optim": ["sgd", "adamw_torch", "rmsprop"],
        "lr_scheduler_type": ["constant", "linear", "cosine", "constant_with_warmup"],
        "packing": [True, False],
        "max_tokens_per_micro_batch": [1, 20, 60],
        "num_iterations": [1, 2, 3],
        "steps_per_generation": [1, 2, 3],
        "gradient_checkpointing": [True, False],
        "sync_ref_model": [True],
        "seed": [42, 7],
        "router_aux_loss_coef": [0.0, 0.5],
        "log_older_metrics": [True],
    }
    for name, choices in wanted.items():
        found = {run.options[name] for run in runs if name in run.options}
        assert set(choices) <= found, name
    for name in (
        "missing_eos_penalty",
        "dual_clip",
        "advantage_clip",
        "epsilon_high",
        "reward_clip_range",
        "eval_steps",
    ):
        assert any(run.options.get(name) for run in runs), name
    assert {run.kind for run in runs} == {"plain", "dropout", "experts"}
    assert {run.stream for run in runs} == {run.loses for run in runs} == {True, False}


REFUSED = [
    {"kl_placement": "reward_tokens", "ratio_level": "sequence"},
    {"kl_placement": "reward_tokens_after_baseline"},
    {"surrogate": "reinforce", "epsilon": 0.1},
    {"surrogate": "reinforce", "epsilon_high": 0.1},
    {"surrogate": "reinforce", "dual_clip": 2.0},
    {"baseline_momentum": 0.5},
    {"length_coefficient": 0.5},
    {"length_regularization": "linear", "length_margin": 3},
    {"beta": 0.0, "sync_ref_model": True},
    {"num_generations": 1},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_what_is_not_drawn_is_refused(options, tmp_path):
    """The rules of the draws are those of the config: each combination that they avoid is an error."""
    with pytest.raises(ConfigError):
        RLOOConfig(str(tmp_path), use_cpu=True, report_to="none", **options)


def test_seed_decides_prompts_and_noise(tmp_path):
    """Equal seeds, equal calls of the engine; another seed draws other completions, of prompts in another order."""
    run = draw_run(0)
    run.prompts, run.stream = [f"{number} prompt" for number in range(24)], False
    options = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 3, "beta": 0.0, "optim": "sgd"}

    def calls(**changes):
        run.options = options | changes
        _, _, engine = train(run, tmp_path)
        names = [prompt.content for prompts, _, _ in engine.calls for prompt in prompts]
        return names, [seed for _, _, seed in engine.calls]

    names, seeds = calls(seed=1)
    assert calls(seed=1) == (names, seeds)
    others, other_seeds = calls(seed=2)
    assert not set(seeds) & set(other_seeds)
    assert others != names
    order, same_seeds = calls(seed=1, data_seed=2)
    assert (order == others, same_seeds == seeds) == (True, True)
