"""Flags from the cache are the flags of the classes, at once; a cache that is old, broken or nowhere does no harm."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from rloom.cli import flag_cache
from rloom.cli.main import VERBS, _module, main, parser_of
from rloom.cli.parser import Parser

SLOW = [verb for verb in VERBS if getattr(_module(verb), "FLAGS_TAKE_SECONDS", False)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLOOM_CACHE", str(tmp_path))
    return tmp_path / "flags"


def from_class(verb: str) -> Parser:
    parser = Parser(prog=f"rloom {verb}")
    _module(verb).add_arguments(parser)
    return parser


def described(parser: Parser) -> list[dict]:
    return [{"kind": type(a), **{k: v for k, v in vars(a).items() if k != "container"}} for a in parser._actions]


def never(parser):
    raise AssertionError("collected, in spite of the cache")


@pytest.mark.parametrize("verb", SLOW)
def test_the_cache_holds_what_the_class_has(verb, cache):
    collected = parser_of(verb)
    read = flag_cache.with_flags(Parser(prog=f"rloom {verb}"), verb, never)
    expected = from_class(verb)
    for parser in (collected, read):
        assert described(parser) == described(expected)
        assert parser.format_help() == expected.format_help()
        assert parser.full_help() == expected.full_help()
        assert parser.flags() == expected.flags()
    # argparse knows these by identity, which equality does not show.
    for action in read._actions:
        assert action.default is argparse.SUPPRESS or action.default is None
        assert action.help != argparse.SUPPRESS or action.help is argparse.SUPPRESS


def test_values_are_read_alike(cache):
    parser_of("train")
    words = ["--bf16", "--fp16", "no", "--beta", "0.5", "--reward", "a", "b", "--no_gradient_checkpointing",
             "--model_init_kwargs", '{"a": 1}', "--reward_clip_range", "-1", "1", "--debug", "underflow_overflow",
             "--objective", "paper", "--report_to", "none"]  # fmt: skip
    read = flag_cache.with_flags(Parser(prog="rloom train"), "train", never).parse_args(words)
    assert vars(read) == vars(from_class("train").parse_args(words))
    assert read.bf16 is True
    assert read.fp16 is False
    assert "learning_rate" not in vars(read)


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--modle", "x"], ["train", "--model", "x"],
                                   ["eval", "--hepl"], ["sft", "--help-all"], ["completion", "bash"],
                                   ["train", "--model", "x", "--data", "not-there.jsonl", "--reward", "length"],
                                   ["eval", "--model", "x", "--data", "./no/folder", "--reward", "length"],
                                   ["preflight", "--model", "x", "--data", "not-there.csv", "--reward", "length"],
                                   ["sft", "--model", "x", "--data", "not-there.json"]])  # fmt: skip
def test_answers_import_no_torch(words, cache):
    for verb in SLOW:
        parser_of(verb)
    code = (
        "import sys\nfrom rloom.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode == 0


@pytest.mark.parametrize("damage", ["", "not JSON", "[]", '{"key": 1}', "half", "key"])
def test_a_cache_that_is_old_or_broken_is_made_again(damage, cache):
    parser_of("eval")
    [file] = cache.iterdir()
    whole = file.read_text()
    table = json.loads(whole)
    if damage == "half":
        damage = json.dumps({**table, "actions": [*table["actions"][:9], {"action": "store"}]})
    elif damage == "key":
        damage = json.dumps({**table, "key": "of yesterday", "footer": "old"})
    file.write_text(damage)
    assert described(parser_of("eval")) == described(from_class("eval"))
    assert file.read_text() == whole
    assert list(cache.iterdir()) == [file]


def test_versions_and_files_are_in_the_key(monkeypatch, tmp_path):
    before = flag_cache.fingerprint()
    assert flag_cache.fingerprint() == before
    with monkeypatch.context() as changed:
        changed.setattr(flag_cache, "_version", lambda name: "9.9")
        assert flag_cache.fingerprint() != before
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(flag_cache.rloom, "__file__", str(tmp_path / "a.py"))
    first = flag_cache.fingerprint()
    os.utime(tmp_path / "a.py", ns=(1, 1))
    assert flag_cache.fingerprint() != first


def test_no_place_to_write(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLOOM_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--help"])
    assert stop.value.code == 0
    assert "--model, --model_name_or_path" in capsys.readouterr().out
    monkeypatch.delenv("RLOOM_CACHE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert flag_cache.cache_file("eval") is None
    assert parser_of("eval").flags()


def test_a_write_that_fails_leaves_nothing_behind(cache, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(flag_cache.os, "replace", full)
        assert parser_of("eval").flags()
    assert list(cache.iterdir()) == []


def test_help_shows_the_names_that_the_docs_use(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    for names in ("--model, --model_name_or_path", "--data, --dataset_name", "--reward, --reward_funcs", "--lora, "):
        assert f"  {names}" in shown


def test_the_first_use_says_why_it_takes_long(cache, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(flag_cache, "_said", [])
    for _ in range(2):
        parser_of("eval")
    assert capsys.readouterr().err.count("collected once") == 1
