"""`rloom generate`, as a user calls it."""

from __future__ import annotations

import json
import re

import pytest
import torch

from rloom.cli.main import main
from tests.conftest import make_model, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_other_verbs_flags_are_understood(folder, tmp_path, capsys):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    flags = ["--dataset_name", prompts, "--num_generations", "2", "--max_completion_length=5", "--json"]
    assert main(["generate", "--model_name_or_path", folder, *flags]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)["completions"]
    assert len(found) == 2
    assert all(len(completion["token_ids"]) <= 5 for completion in found)


@pytest.mark.parametrize("flags", [["--num-examples", "2"], ["--split", "train[:2]"]])
def test_the_first_prompts_alone(folder, tmp_path, capsys, flags):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("abc", "de", "f")])
    assert main(["generate", "--model", folder, "--data", prompts, "--json", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["abc", "de"]


def test_completions_with_their_logprobs(folder, tmp_path, capsys):
    rows = [{"prompt": "abc", "answer": 3}, {"prompt": [{"role": "user", "content": "hi"}]}]
    for row in rows:
        prompts, output = write(tmp_path / "prompts.jsonl", [row, row]), tmp_path / "out.jsonl"
        flags = ["--n", "3", "--max-completion-length", "9", "--temperature", "0.8", "--stop", "zz"]
        assert main(["generate", "--model", folder, "--prompts", prompts, "--output", str(output), *flags]) == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(lines) == 2
        for line in lines:
            assert {key: line[key] for key in row} == row
            assert len(line["completions"]) == 3
            for completion in line["completions"]:
                assert completion["stop_reason"] in ("eos", "length", "stop_string")
                assert len(completion["logprobs"]) == len(completion["token_ids"]) <= 9
    assert "6 completions" in capsys.readouterr().err


def test_numbers_that_an_engine_does_not_give_are_missed_aloud(folder, tmp_path, capsys):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abc"}, {"prompt": "ab"}])
    for engine, told in (("transformers", 1), ("forked", 0), ("native", 0)):
        assert (
            main(["generate", "--model", folder, "--prompts", prompts, "--engine", engine, "--n", "2", "--json"]) == 0
        )
        out, err = capsys.readouterr()
        assert err.count("completions without logprobs and entropies") == told
        for line in out.splitlines():
            assert all(("logprobs" in completion) == (not told) for completion in json.loads(line)["completions"])


def test_they_are_a_plain_forwards(folder, tmp_path, capsys):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abcab"}])
    assert main(["generate", "--model", folder, "--prompts", prompts, "--max-completion-length", "6", "--json"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (completion,) = line["completions"]
    ids = make_tokenizer()("abcab")["input_ids"]
    with torch.no_grad():
        logits = make_model().eval()(input_ids=torch.tensor([ids + completion["token_ids"]])).logits[0]
    plain = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(-1, torch.tensor(completion["token_ids"])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion["logprobs"]), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("\n\r\n", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', 'has no "prompt"'),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('{"prompt": "a"}\n{"prompt": "a", "index": 3}', 'line 2 has a column "index", .* rename it'),
        ('{"prompt": "a", "completions": []}', 'line 1 has a column "completions", .* rename it'),
        ('{"prompt": "a"}\n{"prompt": "a\\ud800b"}', r"line 2: the column 'prompt' has half of a char.*'\\ud800'"),
        ('{"prompt": [{"role": "user", "content": "\\udc00"}]}', "line 1: the column 'prompt' has half of a character"),
        ('{"prompt": "a", "note": "\\ud800"}', "line 1: the column 'note' has half of a character"),
    ],
)
def test_bad_prompts(folder, tmp_path, capsys, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert main(["generate", "--model", folder, "--prompts", str(path)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_bytes_that_are_no_text(folder, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert main(["generate", "--model", folder, "--prompts", str(path)]) == 1
    assert "line 2 is not JSON in UTF-8" in capsys.readouterr().err


def test_a_line_ends_with_a_line_feed_and_nothing_else(folder, tmp_path):
    """What the verb wrote itself, with other separators in its texts, can be read; so can a file of an editor that
    marks its encoding."""
    rows = [{"prompt": f"ab{separator}c"} for separator in ("\u2028", "\u2029", "\x85", "\x0c", "\r")]
    text = "".join(
        json.dumps(row, ensure_ascii=False) + end for row, end in zip(rows, ["\r\n", *"\n" * 4], strict=True)
    )
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    flags = ["--output", str(output), "--max-completion-length", "3"]
    assert main(["generate", "--model", folder, "--prompts", str(path), *flags]) == 0
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line["prompt"] for line in sorted(lines, key=lambda line: line["index"])] == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "-3"], "top_k must be 0 (all tokens) or positive"),
        (["--min-p", "2"], "min_p must be in [0, 1]"),
        (["--temperature", "nan"], "temperature must be 0"),
        (["--stop", ""], "stop_strings must be texts of at least one character, not ''"),
    ],
)
def test_options_that_cannot_be_drawn_with(tmp_path, capsys, flags, message):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    assert main(["generate", "--model", "no/model", "--prompts", prompts, *flags]) == 1  # before it is looked for
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["native", "forked", "transformers"])
def test_tokens_that_end_a_completion(folder, tmp_path, capsys, engine):
    """All but the first five end one: each then is of one such token, or began with one of the five."""
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    stops = [str(token) for token in range(5, 46)]
    flags = ["--engine", engine, "--n", "8", "--max-completion-length", "9", "--json", "--stop-token-ids", *stops]
    assert main(["generate", "--model", folder, "--prompts", prompts, *flags]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    for completion in json.loads(line)["completions"]:
        *before, last = completion["token_ids"]
        assert all(token < 5 for token in before)
        assert completion["stop_reason"] == ("eos" if last == 2 or last >= 5 else "length")


def test_a_stop_token_that_the_model_does_not_have(folder, tmp_path, capsys):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "abc"}])
    for token in ("-1", "4000"):
        assert main(["generate", "--model", folder, "--prompts", prompts, "--stop-token-ids", "5", token]) == 1
        assert f"the stop token {token} is none of the model's, whose ids are 0 to" in capsys.readouterr().err


def test_an_unknown_flag_names_the_nearest(folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--model", folder, "--prompts", "p", "--max-tokens", "9"])
    assert stopped.value.code == 2


def test_prompts_are_typed_and_answers_are_for_people(folder, capsys):
    flags = ["--prompt", "ab", "--prompt", "hi\x1b[31m", "--n", "2", "--max-completion-length", "4"]
    assert main(["generate", "--model", folder, *flags]) == 0
    out = capsys.readouterr().out
    for words in ("── prompt 0\nab\n", "── prompt 1\nhi\\x1b[31m\n", "── completion 2 of 2: "):
        assert words in out
    assert "{" not in out
    assert "\x1b" not in out


def test_what_training_takes(folder, tmp_path, capsys):
    """Conversations, other names of columns, other kinds of files, and texts as a user's messages."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    chat = write(tmp_path / "chat.jsonl", [{"messages": talk}])
    named = write(tmp_path / "named.jsonl", [{"question": "hi"}])
    (tmp_path / "rows.csv").write_text("question,answer\nhi,1\n")
    shown = {
        ("--data", chat): talk[:1],
        ("--data", named, "--columns", "prompt=question"): "hi",
        ("--data", str(tmp_path / "rows.csv"), "--columns", "prompt=question"): "hi",
        ("--prompt", "hi", "--chat"): talk[:1],
    }
    for flags, prompt in shown.items():
        assert main(["generate", "--model", folder, *flags, "--json", "--max-completion-length", "2"]) == 0
        assert json.loads(capsys.readouterr().out)["prompt"] == prompt


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no prompts: --data takes"),
        (["--data", "a.jsonl", "--prompt", "b"], "prompts are given twice"),
        (["--prompt", "b", "--columns", "prompt=x"], "--columns renames columns of --data"),
    ],
)
def test_prompts_that_do_not_go_together(flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--model", "m", *flags])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"promt": "a"}, [], "line 1 has no \"prompt\"; did you mean 'promt'?"),
        ({"question": "a"}, ["--columns", "prompt=qestion"], "no column 'qestion'; did you mean 'question'?"),
        ({"question": "a"}, ["--columns", "prompt"], "not of the form new=old"),
        ({"messages": "a"}, [], "line 1: no prompt can be made of its messages"),
    ],
)
def test_rows_without_a_prompt(row, flags, message, tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", [row])
    assert main(["generate", "--model", "no/model", "--data", prompts, *flags]) == 1
    assert message in capsys.readouterr().err
