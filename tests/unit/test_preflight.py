"""What preflight computes, against closed forms."""

from __future__ import annotations

import copy
import math
import random
import re
import resource
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from rloom import RLOOConfig
from rloom.preflight import process_memory
from rloom.preflight.dry_run import DryRun, Measurement, dry_config
from rloom.preflight.ends import end_notes, end_problems, passed_over
from rloom.preflight.estimate import whole_run
from rloom.preflight.group_size import Outcomes, best_size, efficiency, signal_by_size, spread_within
from rloom.preflight.process_memory import most_held
from rloom.preflight.real_size import seconds_at_size
from rloom.preflight.recommend import KL_BUDGET, STEP, cold_start, recommend
from rloom.preflight.summary import Summary, recipe, write_recipe
from rloom.types import Completion, Prompt, Record
from tests.conftest import make_model, make_tokenizer


def drawn(probabilities, size, seed=0):
    draw = random.Random(seed)
    return [[float(draw.random() < p) for _ in range(size)] for p in probabilities]


def records(groups, length=4, truncated=False):
    reason = "length" if truncated else "eos"
    return [
        Record(
            group=number, prompt=Prompt(content="p", token_ids=[1] * 6), reply="x", scores={}, failures={},
            completion=Completion(token_ids=[5] * length, stop_reason=reason), reward=score, extra={},
        )
        for number, group in enumerate(groups)
        for score in group
    ]  # fmt: skip


def measured(groups, **changes):
    options = {"seconds": {"generation": 0.5, "rewards": 0.1, "reference": 0.2, "update": 0.4}, "movement": 1e-4}
    return Measurement(groups=groups, records=records(groups), **(options | changes))


@pytest.fixture
def config(tmp_path):
    return lambda **changes: RLOOConfig(
        str(tmp_path), report_to="none", use_cpu=True, **{"num_generations": 8, "per_device_train_batch_size": 128,
                                                         "max_completion_length": 40, **changes}
    )  # fmt: skip


# -- how many completions


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_prompts_that_are_alike_have_the_signal_of_one(p, size):
    """No correlation within a prompt: the distribution is a point, but for its floor."""
    alike = Outcomes((p * 1e6, (1 - p) * 1e6))
    assert alike.alike(size) == pytest.approx(p**size + (1 - p) ** size, abs=1e-4)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_uniform_success_probabilities(size):
    """∫ p^K dp = 1/(K+1), from either end."""
    assert Outcomes((1.0, 1.0)).alike(size) == pytest.approx(2 / (size + 1))


@pytest.mark.parametrize("size", [2, 8])
def test_the_fit_finds_the_distribution_that_was_drawn_from(size):
    draw = random.Random(1)
    groups = drawn([draw.betavariate(2, 6) for _ in range(16000)], size)
    successes, failures = sorted(Outcomes.fitted(groups).weights)
    assert (successes, failures) == (pytest.approx(2, rel=0.15), pytest.approx(6, rel=0.15))


def test_signal_is_counted_without_replacement():
    groups = [[0.0, 0.0, 0.5, 1.0], [0.25, 0.25, 0.25, 0.25]]
    share = signal_by_size(groups)
    # Of the 6 pairs of the first group one is alike; of its triples none; the second group has no signal at all.
    assert share(2) == pytest.approx((5 / 6 + 0) / 2)
    assert share(3) == share(4) == pytest.approx(0.5)
    assert signal_by_size([[1.0, 1.0]])(8) == 0.0
    # Of two values too: one pair of three is alike.
    assert signal_by_size([[0.0, 1.0, 1.0]])(2) == pytest.approx(2 / 3)


def graded(draw):
    """Nine of ten score 0, the others one of four values."""
    return 0.0 if draw.random() < 0.9 else draw.choice([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("size", [2, 4])
def test_signal_beyond_what_was_sampled_is_extrapolated(size):
    """As large groups have it, within what a fit can know: and not that of the small ones."""
    draw = random.Random(1)
    share = signal_by_size([[graded(draw) for _ in range(size)] for _ in range(4000)])
    for larger in (8, 16, 32):
        assert share(larger) == pytest.approx(1 - 0.9**larger, abs=0.05)
    assert best_size(share, 512) == 32


def test_signal_of_prompts_that_differ_is_extrapolated():
    """Success probabilities from Beta(0.5, 2): a tenth of the prompts hardly ever succeed."""
    draw = random.Random(2)
    groups = drawn([draw.betavariate(0.5, 2) for _ in range(8000)], 2)
    share = signal_by_size(groups)
    for larger in (2, 8, 32):
        assert share(larger) == pytest.approx(1 - Outcomes((0.5, 2.0)).alike(larger), abs=0.03)


def test_prompts_with_scores_of_their_own_never_get_signal():
    """Each prompt's completions all score alike, and every prompt otherwise: larger groups would change nothing."""
    share = signal_by_size([[float(n)] * 2 for n in range(64)])
    assert share(2) == 0.0
    assert share(32) < 0.01


def test_the_reason_says_which_sizes_were_not_sampled(config):
    draw = random.Random(1)

    def reason(size):
        found = measured([[graded(draw) + draw.random() for _ in range(size)] for _ in range(64)])
        return next(one.reason for one in recommend(found, config(), context=None) if one.option == "num_generations")

    # All scores differ: groups of 8 are the best whatever was sampled.
    assert "100% of groups of 8 have signal" in reason(2)
    assert "groups of more than 2 were not sampled" in reason(2)
    assert "groups of more than 8 were not sampled" in reason(8)
    assert "sampled" not in reason(16)


def test_groups_without_scores_are_left_out():
    scored = [[1.0, 1.0, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]]
    for size in (2, 4):
        assert signal_by_size([[], [1.0], *scored, []])(size) == signal_by_size(scored)(size)
    assert signal_by_size([[], [0.0], [1.0]])(4) == 0.0


def test_a_completion_is_worth_what_its_baseline_leaves():
    """Var(r_i − mean of the others) = σ²·K/(K−1), by drawing."""
    draw = random.Random(0)
    for size in (2, 4, 8):
        values = []
        for _ in range(20000):
            group = [draw.gauss(0, 1) for _ in range(size)]
            values.append(group[0] - sum(group[1:]) / (size - 1))
        variance = sum(value * value for value in values) / len(values)
        assert efficiency(lambda size: 1.0, size) == pytest.approx(1 / variance, rel=0.05)


def test_the_size_that_is_chosen():
    def point(p):
        return lambda size: 1 - p**size - (1 - p) ** size

    # By hand: efficiency(8) = 0.868 and efficiency(16) = 0.937 at p = 0.5, which is 8% more.
    assert best_size(point(0.5), 256) == 8
    # At p = 0.1: 0.498, 0.764, 0.936 and 0.983 for 8, 16, 32 and 64.
    assert best_size(point(0.1), 256) == 32
    assert best_size(point(0.1), 64) == 16
    assert best_size(lambda size: 0.0, 256) == 2


# -- how far an update moves the policy


def dry_run(tmp_path, rows, *, model=None, rate=1e-3, **changes):
    """A dry run of eight groups, two updates. Completions of "ab" score alike."""

    def kinds(prompts, completions, **kwargs):
        return [1.0 if p == "ab" else float(len(set(text))) for p, text in zip(prompts, completions, strict=True)]

    options = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 8, "seed": 3}
    args = RLOOConfig(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **(options | changes))
    config = dry_config(args, 8, str(tmp_path / "dry"), rows)
    model = make_model() if model is None else model
    return DryRun(model, kinds, config, rows, processing_class=make_tokenizer(), rate=rate, size=16)


def movement_of(before, trainer):
    """½ E[(log π_after − log π_before)²] over the rows that were run forward in the last update, by plain forwards."""
    changes = []
    for rollout in trainer.last_rollouts():
        for row, (prompt, drawn) in enumerate(zip(rollout.prompt_ids, rollout.completion_ids, strict=True)):
            if rollout.policy_logprobs[row] is not None:
                old, new = (plain_logprobs(model, prompt, drawn) for model in (before, trainer.model))
                changes.append(new - old)
    assert changes
    return torch.cat(changes).square().mean().item() / 2


@torch.no_grad()
def plain_logprobs(model, prompt, drawn):
    logits = model.eval()(torch.tensor([[*prompt, *drawn]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(drawn)[:, None])[:, 0]


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_movement_is_that_of_the_rows_that_were_run(tmp_path, beta):
    """Without a KL, rows without an advantage are not run: the others are measured all the same."""
    trainer = dry_run(tmp_path, [{"prompt": text} for text in ("ab", "cd", "ef", "gh")], beta=beta)
    before = copy.deepcopy(trainer.model)
    found, rollout = trainer.measure(), trainer.sampled[-1].rollout
    run = [row for row in range(len(rollout)) if rollout.policy_logprobs[row] is not None]
    assert (len(run) == 16) == (beta > 0)
    assert found.movement == pytest.approx(movement_of(before, trainer), rel=1e-3)


def with_dropout():
    torch.manual_seed(0)
    sizes = {"vocab_size": 46, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def test_dropout_moves_nothing(tmp_path):
    """GPT-2's is 0.1 in training: its noise is much more than a small step, and no rate would make it smaller."""
    rows = [{"prompt": text} for text in ("ab", "cd", "ef", "gh")]
    assert with_dropout().config.resid_pdrop == 0.1
    assert dry_run(tmp_path, rows, model=with_dropout(), rate=1e-12).measure().movement is None
    trainer = dry_run(tmp_path, rows, model=with_dropout(), rate=1e-4)
    before = copy.deepcopy(trainer.model)
    assert trainer.measure().movement == pytest.approx(movement_of(before, trainer), rel=1e-2)


def test_what_is_measured_before_the_step_is_no_part_of_an_updates_time(tmp_path, monkeypatch):
    trainer = dry_run(tmp_path, [{"prompt": text} for text in ("ab", "cd", "ef", "gh")])
    look, phases = DryRun._logprobs, []
    monkeypatch.setattr(DryRun, "_logprobs", lambda self: (phases.append(self.clock.current()), look(self))[1])
    trainer.measure()
    assert [phase and phase[0] for phase in phases] == ["evaluation", None]


def test_small_rollouts_are_put_together_for_the_update_that_is_measured(tmp_path):
    """With one group to an update, the rate could not be measured as often as not: groups without signal move nothing.
    Rollouts stay as large as the run's, since their speed is measured."""
    rows = [{"prompt": text} for text in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")]
    trainer = dry_run(tmp_path, rows, per_device_train_batch_size=4, beta=0.0)
    before = copy.deepcopy(trainer.model)
    found = trainer.measure()
    assert [(one.update, len(one.rollout)) for one in trainer.sampled] == [(1, 4)] * 4 + [(2, 4)] * 4
    assert (len(found.groups), len(found.records), trainer.state.global_step) == (8, 32, 2)
    run = [lines for one in trainer.last_rollouts() for lines in one.policy_logprobs if lines is not None]
    assert len(run) > 4
    assert found.movement == pytest.approx(movement_of(before, trainer), rel=1e-3)
    # Seconds are those of the second update, by the completions that were sampled for it.
    last = [entry for entry in trainer.state.log_history if "time/update" in entry][1]
    assert found.seconds["generation"] == pytest.approx(last["time/generation"] / 16)


def test_the_step_that_is_measured_is_a_runs_first(tmp_path):
    """Adam's first step moves every weight that has a gradient by the whole rate, whatever the gradient is."""
    trainer = dry_run(tmp_path, [{"prompt": text} for text in ("ab", "cd", "ef", "gh")])
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.measure()
    moved = torch.cat([(p - old).flatten() for p, old in zip(trainer.model.parameters(), before, strict=True)]).abs()
    assert moved[moved > 0].quantile(0.1).item() == pytest.approx(1e-3, rel=0.01)


# -- how long the run's own size takes


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_runs_own_size_is_timed_without_rewards(tmp_path, beta):
    """Twice, of which the second counts: as many completions as a rollout of the run has, of few prompts too."""
    trainer = dry_run(tmp_path, [{"prompt": text} for text in ("ab", "cd", "ef", "gh")], beta=beta)
    trainer.measure()
    asked, trained, generate, loss = [], [], trainer.collector.engine.generate, trainer.learner.loss

    def asking(prompts, k, *, seed):
        asked.append(len(prompts) * k)
        return generate(prompts, k, seed=seed)

    def learning(model, batch):
        trained.append(len(batch.rows))
        return loss(model, batch)

    trainer.collector.engine.generate, trainer.learner.loss = asking, learning
    trainer.rewards.begin = lambda: pytest.fail("a reward was called")
    found = seconds_at_size(trainer, 64)
    assert asked == [64, 64]
    assert sum(trained) == 128
    assert found["generation"] > 0 < found["update"]
    assert (found["reference"] > 1e-6) == (beta > 0)
    assert all(p.grad is None for p in trainer.model.parameters())


# -- memory


def test_the_memory_that_is_told_is_the_most_that_was_held(tmp_path, monkeypatch):
    """The worst shape is freed when it has been run."""
    trainer = dry_run(tmp_path, [{"prompt": text} for text in ("ab", "cd", "ef", "gh")])
    more = most_held() + 200 * 2**20

    def worst(*args, **kwargs):
        held = bytearray(more - psutil.Process().memory_info().rss)
        held[::4096] = b"x" * len(held[::4096])
        return 64

    monkeypatch.setattr(trainer.learner, "try_worst_case", worst)
    memory = trainer._memory()
    assert memory.peak > more - 2**20
    assert psutil.Process().memory_info().rss < more - 100 * 2**20
    assert (memory.device, memory.micro_batch) == ("cpu", 64)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_most_that_was_held_without_a_status_file(tmp_path, monkeypatch, platform, unit):
    monkeypatch.setattr(process_memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr(process_memory.sys, "platform", platform)
    assert most_held() == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- what is recommended


def test_base_success_near_zero_says_train_supervised_first(config):
    zero = measured([[0.0] * 8] * 8)
    assert "train it supervised first" in cold_start(zero)
    assert recommend(zero, config(), context=None) == []
    assert "supervised first" in cold_start(measured([[0.0] * 8] * 99 + [[1.0] + [0.0] * 7]))
    assert "every completion scores 1" in cold_start(measured([[1.0] * 8] * 4))
    assert "near zero" in cold_start(measured([[0.0] * 8] * 4))
    assert "solved already" in cold_start(measured([[1.0] * 8] * 99 + [[0.0] + [1.0] * 7]))
    assert cold_start(measured(drawn([0.3] * 16, 8))) is None
    assert "no completion got a score" in cold_start(measured([[], []]))


def test_recommendations_follow_from_what_was_measured(config):
    found = measured(drawn([0.5] * 64, 8))
    advice = {one.option: one for one in recommend(found, config(), context=None)}
    assert advice["num_generations"].value == 8
    assert advice["per_device_train_batch_size"].value == 128
    # A step of 1e-4 nats shall be one of 0.01: a hundred times the KL is ten times the rate.
    assert advice["learning_rate"].value == pytest.approx(1e-6 * math.sqrt(STEP / 1e-4), rel=0.06)
    # A coin's standard deviation is a half. To one digit.
    assert advice["beta"].value == pytest.approx(0.5 / math.sqrt(2 * KL_BUDGET), rel=0.15)
    # Four tokens and a quarter more, in eights.
    assert advice["max_completion_length"].value == 8
    assert "beta" not in {one.option for one in recommend(found, config(beta=0.0), context=None)}


def test_a_batch_has_no_more_prompts_than_the_data_set(config):
    """A rollout has no prompt twice: `rloom train` refuses a larger one."""
    found = measured(drawn([0.5] * 64, 8))

    def advised(prompts):
        advice = {one.option: one for one in recommend(found, config(), context=None, prompts=prompts)}
        return advice["per_device_train_batch_size"]

    assert advised(3).value == 3 * 8
    assert "3 prompts × 8: about 3 groups have signal" in advised(3).reason
    assert "the data set has no more than 3 prompts" in advised(3).reason
    for enough in (16, 1000, None):
        assert advised(enough).value == 128
        assert "the data set" not in advised(enough).reason


@pytest.mark.parametrize("size", [2, 4, 32])
def test_the_spread_of_a_prompts_scores_does_not_depend_on_the_size_of_groups(config, size):
    draw = random.Random(0)
    groups = [[draw.gauss(0, 0.5) for _ in range(size)] for _ in range(8000 // size)]
    assert spread_within(groups) == pytest.approx(0.5, rel=0.03)
    beta = {one.option: one for one in recommend(measured(groups), config(), context=None)}["beta"]
    assert re.search(r"differ by 0\.(5|49) \(standard deviation\)", beta.reason)
    # To one digit, β is 0.1, and not √(0.25/20) = 0.11: what is told is of the one that is recommended.
    assert beta.value == 0.1
    assert re.search(r"about 1[23] nats", beta.reason)


def test_groups_with_fewer_than_two_scores_tell_nothing_anywhere(config):
    """A reward may be unknown. Of a single score no spread and no signal can be told."""
    scored = [[0.0, 1.0]] * 4 + [[1.0, 1.0]] * 4
    found, known = measured([*scored, *[[1.0]] * 12, []]), measured(scored)
    base, of_known = base_of(found), base_of(known)
    assert of_known["groups_with_signal"] == signal_by_size(scored)(2) == 0.5
    for name in ("groups_with_signal", "std_within_groups"):
        assert base[name] == of_known[name]
    assert (base["groups_left_out"], of_known["groups_left_out"]) == (13, 0)
    advice, of_known = (recommend(one, config(), context=None) for one in (found, known))
    assert [(one.option, one.value) for one in advice] == [(one.option, one.value) for one in of_known]
    # One group in 150 has two scores, and they differ.
    assert cold_start(measured([[0.0, 1.0], *[[0.0]] * 149])) is None
    assert "no prompt has two completions with a score" in cold_start(measured([[1.0], [0.0], []]))
    assert base_of(measured([[1.0], [0.0]]))["std_within_groups"] is None


def base_of(found):
    return Summary(
        found=found, recipe={}, rewards=[], estimate=None, recommended=None, advice=[], problems=[], notes=[]
    ).base()  # fmt: skip


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_the_given_batch_is_no_bound_of_the_size_of_groups(config, batch):
    """A larger one is recommended along with it: groups of 32, and 16 of them."""
    found = measured(drawn([0.1] * 64, 8))
    advice = recommend(found, config(per_device_train_batch_size=batch), context=None)
    values = {one.option: one.value for one in advice}
    assert (values["num_generations"], values["per_device_train_batch_size"]) == (32, 512)


def test_truncated_completions_get_twice_the_room(config):
    groups = drawn([0.5] * 8, 8)
    found = Measurement(groups=groups, records=records(groups, 40, truncated=True))
    length = {one.option: one.value for one in recommend(found, config(), context=None)}["max_completion_length"]
    assert length == 80
    length = {one.option: one.value for one in recommend(found, config(), context=50)}["max_completion_length"]
    assert length == 50


def test_a_rate_that_could_not_be_measured_stays(config):
    advice = {one.option: one for one in recommend(measured(drawn([0.5] * 8, 8), movement=None), config(), context=9)}
    assert advice["learning_rate"].value == advice["learning_rate"].now
    assert "not measured" in advice["learning_rate"].reason


def test_evaluation_has_whole_groups_too(config):
    """A tenth of successes asks for larger groups than the 8 that an evaluation holds by default."""
    found = measured(drawn([0.1] * 64, 8))

    def advised(**changes):
        advice = {one.option: one.value for one in recommend(found, config(**changes), context=None)}
        return advice["num_generations"], advice.get("per_device_eval_batch_size")

    size, batch = advised(eval_strategy="steps", eval_steps=1)
    assert size >= 16
    assert batch == size
    assert advised(per_device_eval_batch_size=72)[1] == -(-72 // size) * size
    assert advised(per_device_eval_batch_size=4 * size)[1] is None
    assert advised(num_generations_eval=8)[1] is None


def test_a_recipe_does_not_contradict_itself(config):
    advice = recommend(measured(drawn([0.5] * 64, 8)), config(), context=None)
    given = {"model_name_or_path": "m", "rloo_k": 4, "kl_coef": 0.1, "gradient_accumulation_steps": 4, "seed": 1}
    options = recipe(given, advice)
    assert {"rloo_k", "kl_coef", "gradient_accumulation_steps"}.isdisjoint(options)
    assert (options["model_name_or_path"], options["seed"], options["num_generations"]) == ("m", 1, 8)


def test_a_recipe_has_no_secrets(tmp_path):
    given = {
        "model_name_or_path": "m", "hub_token": "hf_1", "stop_token": "eos", "report_to": ["none"],
        "model_init_kwargs": {"token": "hf_2", "revision": "main"},
    }  # fmt: skip
    write_recipe(tmp_path / "r.yaml", given, [])
    text = (tmp_path / "r.yaml").read_text()
    assert "hf_" not in text
    assert yaml.safe_load(text) == {
        "model_name_or_path": "m", "stop_token": "eos", "report_to": ["none"],
        "model_init_kwargs": {"revision": "main"},
    }  # fmt: skip
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line.split(":")[0] for line in comments] == ["# hub_token", "# model_init_kwargs"]


def test_an_address_with_a_password_is_no_part_of_a_recipe(tmp_path):
    given = {"model_name_or_path": "m", "reward_funcs": ["length", "https://me:s3cret@host/score"]}
    write_recipe(tmp_path / "r.yaml", given, [])
    text = (tmp_path / "r.yaml").read_text()
    assert "s3cret" not in text
    assert "# reward_funcs: it, or a part of it, is left out" in text
    assert yaml.safe_load(text) == {"model_name_or_path": "m"}


# -- the whole run


def test_time_tokens_and_cost_of_the_whole_run(config):
    """Ten updates of 128 completions, each passed over twice: 640 are sampled, 1280 trained on."""
    found = measured([[0.0, 1.0]])
    run = whole_run(found, config(max_steps=10, num_iterations=2), [], price_per_hour=36.0)
    assert (run.updates, run.completions, run.tokens) == (10, 640, 640 * 10)
    assert run.seconds == pytest.approx(640 * (0.5 + 0.1 + 0.2) + 1280 * 0.4)
    assert run.cost == pytest.approx(run.seconds / 100)
    rows = [{"prompt": "p"}] * 100
    # 16 prompts an update: six in an epoch of a hundred, which leaves four over.
    assert whole_run(found, config(num_train_epochs=2), rows, None).updates == 12
    assert whole_run(found, config(), iter(rows), None) is None


def test_groups_that_are_drawn_anew_are_paid_for(config):
    """A quarter of the groups has signal: 1 + 3/4 + 9/16 of them are drawn with two rounds. The reference and updates
    see those that are kept."""
    found = measured([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    options = {"num_generations": 2, "max_steps": 10, "num_iterations": 2}
    run = whole_run(found, config(dynamic_sampling=2, **options), [], None)
    sampled = 640 * 37 / 16
    assert (run.updates, run.completions, run.tokens) == (10, sampled, 10 * sampled)
    assert run.by_phase == pytest.approx(
        {"generation": 0.5 * sampled, "rewards": 0.1 * sampled, "reference": 0.2 * 640, "update": 0.4 * 1280}
    )
    assert whole_run(found, config(**options), [], None).completions == 640
    # Without any signal all rounds are made.
    nothing = measured([[0.0, 0.0]] * 4)
    assert whole_run(nothing, config(dynamic_sampling=3, **options), [], None).completions == 4 * 640
    nothing.groups = [[]]
    assert whole_run(nothing, config(dynamic_sampling=3, **options), [], None).completions == 640


# -- ends


@pytest.mark.parametrize(("movement", "expected"), [(1e-12, 1e-4), (1e9, 1e-8)])
def test_a_rate_far_from_the_given_one_is_round_and_not_extrapolated(movement, expected, config):
    found = measured([[0.0, 1.0]] * 8)
    found.movement = movement
    (advice,) = [one for one in recommend(found, config(), context=None) if one.option == "learning_rate"]
    assert advice.value == expected
    assert "more than a factor of 100 is missing: run preflight again" in advice.reason


def test_several_tokens_that_are_passed_over_are_one_line():
    tokenizer = make_tokenizer()
    encoder = SimpleNamespace(vision=None, processing_class=tokenizer)
    encoder.encode = lambda rows: [SimpleNamespace(token_ids=[5, 6])]
    drawn = Completion(token_ids=[7, 0, 1, 8, 2], stop_reason="eos")
    (line,) = end_problems(encoder, tokenizer, {"prompt": "ab"}, [SimpleNamespace(completion=drawn)], [2])
    assert "100% after <pad> and 100% after <bos>" in line
    assert "set stop_token_id=0 (<pad>) or stop_token_id=1 (<bos>)" in line


def test_ends_that_are_passed_over():
    tokenizer = make_tokenizer()
    encoder = SimpleNamespace(vision=None, processing_class=tokenizer)
    encoder.encode = lambda rows: [SimpleNamespace(token_ids=[5, 6])]
    passing = [Completion(token_ids=[7, 1, 8, 9], stop_reason="length") for _ in range(4)]
    ending = [Completion(token_ids=[7, 2], stop_reason="eos") for _ in range(4)]
    assert passed_over(passing + ending, tokenizer.all_special_ids, [2]) == {1: 0.5}
    some = [SimpleNamespace(completion=completion) for completion in passing]
    lines = end_problems(encoder, tokenizer, {"prompt": "ab"}, some, [2])
    assert len(lines) == 2
    assert "set stop_token_id=1" in lines[0]
    assert "no completion ends by itself (at <eos>)" in lines[1]
    fine = [SimpleNamespace(completion=completion) for completion in ending]
    assert end_problems(encoder, tokenizer, {"prompt": "ab"}, fine, [2]) == []


def test_notes_about_ends():
    tokenizer = make_tokenizer(pad_token="<eos>")
    notes = end_notes(tokenizer, [2], chat=False)
    assert notes[0] == "completions end at <eos>"
    assert "padding token is an end token" in notes[1]
    assert "chat template" in notes[2]
    assert end_notes(make_tokenizer(), [2], chat=True) == ["completions end at <eos>"]
