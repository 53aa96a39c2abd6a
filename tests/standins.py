"""Small local stand-ins for the models and data sets that documents name, at the same relative paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from tests.conftest import LETTERS, make_model, make_tokenizer

ROOT = Path(__file__).parents[1]
NEOX = {
    "vocab_size": len(LETTERS) + 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def save_pythia(folder: Path, *, ends: int = 20, kind=GPTNeoXForCausalLM, **options) -> None:
    """A GPT-NeoX of a few thousand weights. Many tokens end a completion, so that random weights write short ones."""
    torch.manual_seed(0)
    model = kind(GPTNeoXConfig(**NEOX, **options))
    if kind is GPTNeoXForCausalLM:
        model.generation_config.eos_token_id = [2, *range(5, 5 + ends)]
    model.save_pretrained(folder)
    make_tokenizer(pad_token=None).save_pretrained(folder)


def save_reward_model(folder: Path) -> None:
    save_pythia(folder, kind=GPTNeoXForSequenceClassification, num_labels=1)


def save_llama(folder: Path, **changes) -> None:
    make_model(**changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def save_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(count: int) -> list[dict]:
    return [{"prompt": f"post {i}. tl,dr", "answer": str(i % 3)} for i in range(count)]


def environment(tmp_path: Path) -> dict[str, str]:
    """For programs: this checkout's rloom, one thread, no network, caches of their own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "OMP_NUM_THREADS": "1",
    }


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python in a folder."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done
