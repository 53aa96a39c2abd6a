"""`rloom eval`: rewards, pass@k, KL, win rates; the judge's command of older documents as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest
import torch

from rloom import RLOOTrainer
from rloom.cli.main import main
from rloom.errors import EngineError
from rloom.evaluation.writer import Writer
from tests.conftest import make_model
from tests.services import serving
from tests.standins import ROOT, prompts, run, save_jsonl, save_llama, save_pythia, save_reward_model

REWARDS = """
def even(completion_ids, **kwargs):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
def size(completions, **kwargs):
    return [float(len(c)) for c in completions]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "model")
    save_jsonl(tmp_path / "p.jsonl", [{**row, "completion": "a reference."} for row in prompts(6)])
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


BASE = ["eval", "--model", "model", "--data", "p.jsonl", "--max_completion_length", "6"]


MORE = """
def wants(completions, solution):
    return [0.0] * len(completions)
async def later(completions):
    return [0.0] * len(completions)
def where(completions):
    import os
    return [float(os.getpid())] * len(completions)
"""


def test_mistakes_are_told_before_the_model_is_loaded(here, capsys):
    (here / "more.py").write_text(MORE)
    for reward, flags, message in (
        ("wants", [], "Its signature is wants(completions, solution)"),
        ("later", ["--isolate_rewards"], "--isolate_rewards has no effect"),
    ):
        assert main(["eval", "--model", "no/model", *BASE[3:], "--reward", f"more.py:{reward}", *flags]) == 1
        assert message in capsys.readouterr().err


def test_isolated_rewards_run_elsewhere(here):
    (here / "more.py").write_text(MORE)
    for flags, here_too in ([], True), (["--isolate_rewards", "--reward_time_limit", "20"], False):
        assert main([*BASE, "--reward", "more.py:where", *flags, "--output_file", "out.json"]) == 0
        found = json.loads((here / "out.json").read_text())["rewards/where"]["value"]
        assert (found == os.getpid()) == here_too


def test_rewards_pass_at_k_and_kl(here, capsys):
    save_llama(here / "other", seed=1)
    arguments = ["--reward", "my_rewards.py:even", "my_rewards.py:size", "--num_generations", "4"]
    assert main([*BASE, *arguments, "--reference_model", "other", "--output_file", "out.json"]) == 0
    found = json.loads((here / "out.json").read_text())
    assert found["pass@1/even"]["value"] == pytest.approx(found["rewards/even"]["value"])
    assert found["pass@4/even"]["value"] >= found["pass@1/even"]["value"]
    assert "pass@1/size" not in found  # not a score of 0 or 1
    assert found["rewards/even"]["low"] <= found["rewards/even"]["value"] <= found["rewards/even"]["high"]
    assert found["kl"]["value"] > 0.5  # another model altogether
    assert found["kl_per_token"]["value"] == pytest.approx(found["kl"]["value"] / found["length"]["value"], rel=1e-3)
    assert found["length"]["count"] == 6
    assert main([*BASE, "--reference_model", "model", "--output_file", "same.json"]) == 0
    assert json.loads((here / "same.json").read_text())["kl"]["value"] == pytest.approx(0.0, abs=1e-4)


def test_divergence_is_the_difference_of_log_probabilities():
    from rloom.evaluation.divergence import divergence

    one, other = make_model(0).eval(), make_model(1).eval()
    prompt, completion = [5, 6, 7], [8, 9]
    with torch.no_grad():
        logits = [m(torch.tensor([prompt + completion])).logits[0] / 0.7 for m in (one, other)]
    steps = [lp.log_softmax(-1) for lp in logits]
    wanted = sum(float(steps[0][2 + t, y] - steps[1][2 + t, y]) for t, y in enumerate(completion))
    found = divergence(one, other, [prompt, [5]], [completion, [4, 4, 4, 4]], temperature=0.7)
    assert found[0] == pytest.approx(wanted, abs=1e-4)


def answering(better):
    def script(call):
        question = call.payload["messages"][0]["content"]
        call.answer({"choices": [{"message": {"content": json.dumps({"better": better(question)})}}]})

    return script


def reference_is_better(question):
    first, second = re.findall(r"<[^/>]+-[ab]>\n(.*?)\n</", question, re.DOTALL)[-2:]
    assert "a reference." in (first, second)
    return "A" if first == "a reference." else "B"


def test_win_rate_by_a_judge_that_likes_the_reference(here, capsys):
    arguments = ["--judge_model", "j", "--reference_column", "completion"]
    with serving(answering(reference_is_better)) as (url, calls):
        assert main([*BASE, *arguments, "--judge_url", url]) == 0
    assert len(calls) == 12  # 6 pairs, in both orders
    assert "Model win rate: 0.00%" in capsys.readouterr().out


def test_a_judge_that_likes_what_it_sees_first_says_nothing(here, capsys):
    arguments = ["--judge_model", "j", "--against", "model"]
    with serving(answering(lambda question: "A")) as (url, _):
        assert main([*BASE, *arguments, "--judge_url", url]) == 0
    assert "Model win rate: 50.00%" in capsys.readouterr().out


def test_win_rate_by_a_reward_model(here, capsys):
    save_reward_model(here / "rm")
    assert main([*BASE, "--judge_reward_model", "rm", "--against", "model"]) == 0  # the same model, the same seed
    assert "Model win rate: 50.00%" in capsys.readouterr().out


def test_an_adapter_is_evaluated_on_its_base(here):
    train = ["--model", "model", "--data", "p.jsonl", "--reward", "my_rewards.py:size", "--output_dir", "adapter"]
    short = ["--use_peft", "--max_steps", "1", "--per_device_train_batch_size", "2", "--max_completion_length", "4"]
    assert main(["train", *train, *short]) == 0
    assert main(["eval", "--model", "adapter", "--data", "p.jsonl", "--max_completion_length", "4"]) == 0


def test_evaluation_during_training_counts_passes(model, tokenizer, rows, config):
    def even(completion_ids, **kwargs):
        return [float(ids[0] % 2 == 0) for ids in completion_ids]

    def size(completions, **kwargs):
        return [len(c) / 7 + 0.1 for c in completions]

    args = config(num_generations_eval=4, per_device_eval_batch_size=8, beta=0.0)
    trainer = RLOOTrainer(model, [even, size], args, rows, rows, processing_class=tokenizer)
    found = trainer.evaluate()
    assert found["eval_rewards/even/pass@1"] == pytest.approx(found["eval_rewards/even/mean"])
    assert found["eval_rewards/even/pass@4"] >= found["eval_rewards/even/pass@1"]
    assert "eval_rewards/size/pass@1" not in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pass_at", "4", "--reward", "length"], "pass@4 needs --num_generations 4"),
        (["--judge_model", "j"], "needs an opponent"),
        (["--against", "x", "--reference_column", "y"], "give one of"),
        (["--reference_model", "x", "--temperature", "0"], "temperature above 0"),
        (["--num_example", "3"], "did you mean '--num_examples'?"),
    ],
)
def test_wrong_usage(here, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*BASE, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_misspelt_reward_is_found_before_anything_is_written(here, capsys, monkeypatch):
    monkeypatch.setattr("rloom.cli.written.write", lambda *a, **k: pytest.fail("completions were written"))
    assert main([*BASE, "--reward", "lenght"]) == 1
    assert "'lenght' names no reward; did you mean 'length'? A reward is" in capsys.readouterr().err


def test_images_are_looked_at(here, capsys):
    """An engine that takes none would pass over them without a word."""
    from tests import vision_models

    model, processor = vision_models.make("qwen2.5-vl")
    model.save_pretrained(here / "eyes")
    chat = [{"role": "user", "content": "what is it"}]
    vision_models.picture(0).save(here / "a.png")
    save_jsonl(here / "seen.jsonl", [{"prompt": chat, "image": str(here / "a.png")}] * 2)
    writer = Writer(str(here / "eyes"), processing_class=processor, max_completion_length=4, chat=True, temperature=1.0)
    rows = [{"prompt": chat, "image": vision_models.picture(0)}, {"prompt": chat}]
    groups = dict(writer.write(rows, 2, seed=0))
    assert groups[0].prompt.inputs
    assert len(groups[0].completions) == len(groups[1].completions) == 2
    options = {"processing_class": processor, "max_completion_length": 4, "chat": True}
    assert len(list(Writer(str(here / "eyes"), **options, engine="native").write(rows, 2, seed=0))) == 2
    with pytest.raises(EngineError, match="does not take images"):
        list(Writer(str(here / "eyes"), **options, engine="forked").write(rows, 2, seed=0))
    assert main(["eval", "--model", "eyes", "--data", "seen.jsonl", "--reference_model", "eyes"]) == 1
    assert "the KL of completions of images is not measured here" in capsys.readouterr().err


def test_wrong_column(here, capsys):
    assert main([*BASE, "--judge_model", "j", "--reference_column", "completio"]) == 1
    assert "did you mean 'completion'?" in capsys.readouterr().err


JUDGE = (
    "--model_name_or_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr --judge_model gpt-4o-mini --num_examples 1000"
)


def test_the_judge_s_command_of_the_older_document(here, monkeypatch):
    save_pythia(here / "cleanrl" / "EleutherAI_pythia-1b-deduped__sft__tldr")
    rows = [{**row, "completion": "a reference."} for row in prompts(4)]
    save_jsonl(here / "trl-lib" / "tldr" / "data" / "validation-00000-of-00001.jsonl", rows)
    turns = iter(range(100))
    with serving(answering(lambda q: reference_is_better(q) if next(turns) else "tie")) as (url, _):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        done = run([str(ROOT / "examples/scripts/evals/judge_tldr.py"), *shlex.split(JUDGE)], here)
    assert re.search(r"^Model win rate: 6\.25%$", done.stdout, re.MULTILINE)  # one tie in eight: half of 1/8


def test_a_judge_whose_answers_cannot_be_read(here, capsys):
    arguments = ["--judge_model", "j", "--reference_column", "completion", "--output_file", "n.json"]
    with serving(answering(lambda question: "I would rather not say.")) as (url, _):
        assert main([*BASE, *arguments, "--judge_url", url]) == 1
    assert "no verdict of the judge could be read" in capsys.readouterr().err
    assert json.loads((here / "n.json").read_text())["win_rate"]["value"] is None
    assert "NaN" not in (here / "n.json").read_text()
