"""`rloom check-reward`: what it finds in good rewards, bad ones, and ones that can be gamed."""

from __future__ import annotations

import json

import pytest

from rloom.cli.check_reward import read_samples
from rloom.cli.main import main, parser_of
from tests.conftest import make_model, make_tokenizer

REWARDS = """
import json, random, re, time

def right(completions, answer):
    found = [re.findall(r"-?\\d+", c if isinstance(c, str) else c[0]["content"]) for c in completions]
    return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer)]

def contains(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

def flat(completions):
    return [1.0] * len(completions)

def long(completions):
    return [float(len(c)) for c in completions]

def tags(completions):
    return [float("<think>" in c and "</think>" in c) for c in completions]

def nothing(completions):
    return [None] * len(completions)

def fails(completions):
    raise ValueError("no")

noise = random.Random(0)

def noisy(completions):
    return [noise.random() for _ in completions]

def a_little_noisy(completions, answer):
    return [r + 0.1 * n for r, n in zip(right(completions, answer), noisy(completions))]

def wants(completions, solution):
    return [float(s in c) for c, s in zip(completions, solution)]

def deep(completions):
    return [helper(c) for c in completions]

def helper(text):
    return json.loads("x" + text)

def hangs(completions, **kwargs):
    if "no idea" in completions[0]:
        time.sleep(30)
    return [float(len(completions[0]))]

def fragile(completions, answer):
    return [float(c.split()[-1] == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "checked_rewards.py").write_text(REWARDS)
    rows = []
    for n in range(6):
        good, bad = (
            f"<think>it is {n}+{n}</think> so it is {2 * n + 200}",
            f"<think>well</think> it is {n + 300}, I am sure of it.",
        )
        rows.append(
            {"prompt": f"what is {n} and {n}?", "answer": str(2 * n + 200), "completions": [good, bad, good, "no idea"]}
        )
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def check(capsys, *rewards, data="data.jsonl", more=()):
    code = main(
        ["check-reward", *(r if ":" in r else f"checked_rewards.py:{r}" for r in rewards), "--data", data, *more]
    )
    return code, capsys.readouterr().out


def test_a_good_reward(here, capsys):
    code, out = check(capsys, "right")
    assert code == 0, out
    assert "nothing stands against training with right" in out
    assert "0 … 1" in out
    assert "24 completions of 6 prompts" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flat", "all completions of a prompt score alike"),
        ("contains", "as high as the best: digits sprayed"),
        ("tags", "as high as the best: format alone"),
        ("long", "as high as the best: one token repeated"),
        ("nothing", "it gave no score at all"),
        ("fails", "it gave no score at all"),
        ("fragile", "failed on degenerate completions, which a policy will write sooner or later: empty (6)"),
    ],
)
def test_rewards_that_should_not_be_trained_with(here, capsys, name, message):
    code, out = check(capsys, name)
    assert code == 1
    assert message in out


def test_several_rewards_and_length(here, capsys):
    code, out = check(capsys, "right", "long", "rloom.rewards:think_format_reward")
    assert code == 1
    assert "mostly rewards longer completions" in out
    assert "think_format_reward" in out


def test_rewards_are_named_as_for_training(here, capsys):
    """A ready-made one by its name, and a reward model's folder."""
    from tests.standins import save_reward_model

    save_reward_model(here / "judge")
    main(["check-reward", "length(maximum=4)", "judge", "--data", "data.jsonl", "--num_generations", "2"])
    out = capsys.readouterr().out
    assert "length" in out
    assert "judge" in out
    assert main(["check-reward", "lenght", "--data", "data.jsonl"]) == 1
    assert "did you mean 'length'?" in capsys.readouterr().err


def test_completions_from_a_model(here, capsys):
    make_model().save_pretrained(here / "model")
    make_tokenizer().save_pretrained(here / "model")
    rows = [{"prompt": "ab", "answer": "1"}, {"prompt": "1+1=", "answer": "2"}]
    (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ["--model", "model", "--num-generations", "3", "--max-completion-length", "8"]
    code, out = check(capsys, "long", data="prompts.jsonl", more=more)
    assert "6 completions of 2 prompts" in out
    chat = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}] * 2
    (here / "chat.jsonl").write_text("\n".join(map(json.dumps, chat)))
    code, out = check(capsys, "right", data="chat.jsonl", more=more)
    assert code in (0, 1)
    assert "6 completions of 2 prompts" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a\\ud800", "completions": ["b", "c"]}', "line 1: the column 'prompt' has half of a character"),
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', 'has no "prompt"'),
        ('{"prompt": "a", "completions": ["b"]}', "a list of at least two"),
        ('{"prompt": "a"}', "say with --model"),
        ('{"prompt": "a", "completions": ["b", "c"]}\n{"prompt": "a"}', "and others do not"),
    ],
)
def test_data_that_cannot_be_used(here, capsys, content, message):
    (here / "bad.jsonl").write_text(content)
    assert main(["check-reward", "checked_rewards.py:flat", "--data", "bad.jsonl"]) == 1
    assert message in capsys.readouterr().err


def test_a_file_that_marks_its_encoding(here):
    path = here / "marked.jsonl"
    path.write_text('{"prompt": "a\u2028b", "completions": ["b", "c"]}\n', encoding="utf-8-sig")
    (sample,) = read_samples(parser_of("check-reward").parse_args(["a:b", "--data", str(path)]))
    assert (sample.prompt, sample.completions) == ("a\u2028b", ["b", "c"])


def test_rewards_by_the_flag_of_other_verbs(here, capsys):
    data = ["--data", "data.jsonl", "--reward", "checked_rewards.py:flat", "checked_rewards.py:flat"]
    assert main(["check-reward", *data]) == 1
    assert capsys.readouterr().out.count("problem") >= 2
    assert main(["check-reward", "--data", "data.jsonl"]) == 1
    assert "name a reward" in capsys.readouterr().err


def test_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check-reward", "a:b", "--data", "x", "--prompts", "0"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit):
        main(["check-rewards", "a:b"])
    assert "did you mean 'check-reward'" in capsys.readouterr().err


def test_noise_is_told(here, capsys):
    code, out = check(capsys, "noisy")
    assert code == 1
    assert "scored again, 100% of the same completions had another score" in out
    assert "more than half of what sets a prompt's completions apart is noise" in out
    _, out = check(capsys, "a_little_noisy")
    assert "note: scored again, 100%" in out
    assert "of the variance within groups is noise" in out
    code, out = check(capsys, "right")
    assert "scored again," not in out
    assert "± 0 " in out
    _, out = check(capsys, "noisy", more=["--once"])
    assert "not looked at" in out
    assert "scored again," not in out


def test_a_missing_column_is_refused_before_a_model_is_loaded(here, capsys):
    (here / "bare.jsonl").write_text('{"prompt": "a", "solutions": "b"}\n' * 2)
    assert main(["check-reward", "checked_rewards.py:wants", "--data", "bare.jsonl", "--model", "no/model"]) == 1
    err = capsys.readouterr().err
    assert "did you mean 'solutions'? Its signature is wants(completions, solution). The columns are: solutions" in err
    more = ["--model", "no/model", "--columns", "solution=solutions"]
    assert main(["check-reward", "checked_rewards.py:wants", "--data", "bare.jsonl", *more]) == 1
    assert "wants an argument" not in capsys.readouterr().err


def test_conversations_and_json(here, capsys):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}]
    rows = [{"messages": talk, "answer": "12", "completions": ["it is 12", "it is 13"]}] * 2
    (here / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out = check(capsys, "right", "nothing", data="talk.jsonl", more=["--json"])
    found = json.loads(out)
    assert (found["completions"], found["prompts"]) == (4, 2)
    right, nothing = found["rewards"]
    assert (right["name"], right["mean"], right["noise"], right["problems"]) == ("right", 0.5, 0.0, [])
    assert nothing["mean"] is None
    assert code == 1


def test_a_failure_shows_the_users_frames_once(here, capsys):
    main(["check-reward", "checked_rewards.py:deep", "--data", "data.jsonl"])
    err = capsys.readouterr().err
    assert err.count("in helper") == 1
    assert 'return json.loads("x" + text)' in err
    for stranger in ("json/decoder.py", "caller.py", "functions.py"):
        assert stranger not in err
    main(["check-reward", "checked_rewards.py:deep", "--data", "data.jsonl", "--isolate-rewards"])
    err = capsys.readouterr().err
    assert "in a worker process" in err
    assert "in helper" in err
    for stranger in ("json/decoder.py", "worker.py"):
        assert stranger not in err


def test_isolation_and_time_limit_are_flags(here, capsys):
    more = ["--isolate_rewards", "--reward_time_limit", "1", "--once", "--prompts", "1", "--json"]
    _, out = check(capsys, "hangs", more=more)
    [report] = json.loads(out)["rewards"]
    assert report["errors"] == 1
    assert report["none"] == 0.25
    (here / "late.py").write_text("async def late(completions):\n    return [0.0] * len(completions)\n")
    assert main(["check-reward", "late.py:late", "--data", "data.jsonl", "--isolate-rewards"]) == 1
    assert "--isolate_rewards has no effect" in capsys.readouterr().err
