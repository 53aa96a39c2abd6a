"""The shapes that benchmarks use: random weights of real models' shapes, forced lengths."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

EOS, PAD, WORDS = 0, 1, 4096


@dataclass(frozen=True)
class Shape:
    """A model and the batch that one update trains on."""

    config: Any
    prompt: int
    completion: int
    k: int
    completions: int  # per update
    dtype: str = "float32"  # of the weights as people load them: by name in float32, large ones in bfloat16
    lora: int = 0  # rank of an adapter on all linear layers
    four_bit: bool = False

    @property
    def groups(self) -> int:
        return self.completions // self.k


def qwen(hidden: int, inter: int, layers: int, heads: int, vocab: int = 151936) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden, intermediate_size=inter, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, vocab_size=vocab, max_position_embeddings=32768, tie_word_embeddings=True,
        bos_token_id=EOS, eos_token_id=EOS,
    )  # fmt: skip


PYTHIA_1B = GPTNeoXConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=8, vocab_size=50304,
    max_position_embeddings=2048, rotary_pct=0.25, bos_token_id=EOS, eos_token_id=EOS,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=EOS, eos_token_id=EOS,
)  # fmt: skip
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, bos_token_id=EOS, eos_token_id=EOS,
)  # fmt: skip
TINY = LlamaConfig(
    hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192,
    max_position_embeddings=2048, bos_token_id=EOS, eos_token_id=EOS,
)  # fmt: skip

SHAPES = {
    "tldr": Shape(PYTHIA_1B, 512, 53, 4, 128),
    "small": Shape(qwen(896, 4864, 24, 14), 256, 256, 8, 128),
    "reason": Shape(qwen(1536, 8960, 28, 12), 128, 1024, 8, 128),
    "smol": Shape(SMOLLM2, 64, 160, 8, 256),
    "lora8b": Shape(LLAMA_8B, 512, 1024, 8, 64, dtype="bfloat16", lora=16),
    "qlora8b": Shape(LLAMA_8B, 512, 1024, 8, 64, dtype="bfloat16", lora=16, four_bit=True),
    "long": Shape(qwen(1536, 8960, 28, 12), 128, 8192, 8, 8),
    "cpu": Shape(TINY, 256, 64, 8, 32),
}


def make_model(shape: Shape, dtype: torch.dtype, device: str | None = None) -> Any:
    torch.manual_seed(0)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        # A copy: trainers write into their model's config, and the peer that comes next would inherit that.
        return AutoModelForCausalLM.from_config(copy.deepcopy(shape.config), dtype=dtype)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<eos>": EOS, "<pad>": PAD, **{f"w{i}": i for i in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def make_rows(shape: Shape, steps: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    count = shape.groups * steps
    return [{"prompt": " ".join(f"w{draw.randrange(2, WORDS)}" for _ in range(shape.prompt))} for _ in range(count)]


def completion(shape: Shape, prompt: str, sample: int) -> list[int]:
    """The fixed completion of a prompt: the full length, no end token."""
    return _drawn(shape.completion, prompt, sample)


@functools.cache  # a look-up the second time, so that drawing them need not be part of what is timed
def _drawn(length: int, prompt: str, sample: int) -> list[int]:
    draw = random.Random(f"{hash(prompt) % 10**9} {sample}")
    return [draw.randrange(2, WORDS) for _ in range(length)]


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]
