"""`rloom generate --engine vllm`."""

from __future__ import annotations

import json

from rloom.cli.main import main
from rloom.types import Completion
from tests.conftest import make_tokenizer
from tests.vllm.conftest import assert_drawn_from, prompts, tiny


def test_generate(tmp_path):
    model, folder = tiny(3), tmp_path / "model"
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "hello there"}\n')
    output = tmp_path / "out.jsonl"
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(output)]
    options = ["--n", "3", "--max-completion-length", "8", "--dtype", "float32", "--engine", "vllm"]
    assert main(["generate", "--model", str(folder), *files, *options]) == 0
    lines = sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda line: line["index"])
    groups = [
        [
            Completion(token_ids=c["token_ids"], stop_reason=c["stop_reason"], logprobs=c["logprobs"])
            for c in line["completions"]
        ]
        for line in lines
    ]
    assert [len(group) for group in groups] == [3, 3]
    assert_drawn_from(model, prompts("ab", "hello there"), groups)
