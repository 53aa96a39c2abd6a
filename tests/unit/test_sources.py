"""Rows from files, folders and saved data sets; splits, columns, prompts made of other columns."""

from __future__ import annotations

import pytest

from rloom.data.sources import load_rows, shared_start
from rloom.errors import DataError
from tests.standins import save_jsonl

ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(4)]


@pytest.fixture
def dataset():
    from datasets import Dataset

    return Dataset.from_list(ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_files(kind, dataset, tmp_path):
    path = tmp_path / f"rows.{kind}"
    if kind in ("csv", "tsv"):
        dataset.to_csv(path, sep="," if kind == "csv" else "\t")
    elif kind == "parquet":
        dataset.to_parquet(path)
    else:
        save_jsonl(path, ROWS)
    assert list(load_rows(str(path))) == ROWS
    assert list(load_rows(str(path), split="train[:2]")) == ROWS[:2]
    assert list(load_rows(str(path), streaming=True)) == ROWS


def test_folder_with_splits_by_file_name(tmp_path):
    save_jsonl(tmp_path / "data" / "descriptiveness-00000-of-00001.jsonl", ROWS)
    save_jsonl(tmp_path / "data" / "sentiment-00000-of-00001.jsonl", ROWS[:1])
    assert len(load_rows(str(tmp_path), split="descriptiveness")) == 4
    with pytest.raises(DataError, match=r"descriptivenes.*cannot be loaded"):
        load_rows(str(tmp_path), split="descriptivenes")


def test_saved_to_disk(dataset, tmp_path):
    from datasets import DatasetDict

    DatasetDict({"train": dataset, "validation": dataset.select([0])}).save_to_disk(tmp_path / "d")
    assert len(load_rows(str(tmp_path / "d"), split="validation")) == 1
    with pytest.raises(DataError, match="did you mean 'validation'"):
        load_rows(str(tmp_path / "d"), split="validaton")


def test_columns_under_other_names(tmp_path):
    save_jsonl(tmp_path / "q.jsonl", [{"question": "a", "solution": "b", "prompt": "old"}])
    rows = load_rows(str(tmp_path / "q.jsonl"), columns=["prompt=question", "answer=solution"])
    assert list(rows) == [{"prompt": "a", "answer": "b"}]
    with pytest.raises(DataError, match="did you mean 'question'"):
        load_rows(str(tmp_path / "q.jsonl"), columns=["prompt=questoin"])
    with pytest.raises(DataError, match="new=old"):
        load_rows(str(tmp_path / "q.jsonl"), columns=["prompt"])


def test_prompts_of_conversations_and_of_pairs(tmp_path):
    user, bot = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    save_jsonl(tmp_path / "m.jsonl", [{"messages": [user, bot]}])
    assert load_rows(str(tmp_path / "m.jsonl"))[0]["prompt"] == [user]
    other = {"role": "assistant", "content": "c"}
    save_jsonl(tmp_path / "p.jsonl", [{"chosen": [user, bot], "rejected": [user, other]}])
    assert load_rows(str(tmp_path / "p.jsonl"))[0]["prompt"] == [user]
    assert shared_start("abc", "abd") == "ab"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "no such folder"),
        ("no.jsonl", "no file"),
        ("empty.csv", "is empty"),
        ("bad.jsonl", "cannot be read"),
        ("latin.jsonl", "latin.jsonl, line 2 is not UTF-8"),
        ("latin.csv", "latin.csv, line 2 is not UTF-8"),
    ],
)
def test_what_cannot_be_read(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "bad.jsonl").write_text("{nonsense")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    (tmp_path / "latin.csv").write_bytes(b"prompt\ncaf\xe9\n")
    with pytest.raises(DataError, match=message):
        load_rows(source)
