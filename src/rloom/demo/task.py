"""The demo's task: write the digits of the prompt in ascending order.

A prompt is `"73150>"`, its answer `"01357"`. Characters are tokens, the model is a llama of 0.33M random
weights, and a second of supervised warm-up gives it a habit that is right some of the time: enough for a
reward to find something to reinforce. All of it is made on the spot, on a CPU, without a file or a download.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rloom.models.verify import evaluating

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789>"
NUM_DIGITS = 5
MAX_COMPLETION_LENGTH = NUM_DIGITS + 3  # the answer, its EOS, and room to get the length wrong

Row = dict[str, str]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, plus padding and end of sequence; pads on the left, as generation needs it."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins the characters again, without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A llama of two layers and 0.33M random weights. The same seed gives the same weights."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        **special,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.update(**special)
    return model


def make_prompts(
    count: int, seed: int, split: Literal["train", "held_out"] = "train", num_digits: int = NUM_DIGITS
) -> list[Row]:
    """`count` different rows of a prompt and its answer.

    The splits are disjoint whatever the seeds: the answer decides which one a row is in (about a fifth are
    held out), so a held-out prompt is not even a permutation of a training prompt.
    """
    rows = []
    for number in range(10**num_digits):
        digits = f"{number:0{num_digits}d}"
        answer = "".join(sorted(digits))
        held_out = zlib.crc32(answer.encode()) % 5 == 0
        if held_out == (split == "held_out"):
            rows.append({"prompt": f"{digits}>", "answer": answer})
    if count > len(rows):
        raise ValueError(f"{count} rows were asked for; with {num_digits} digits, {split!r} has {len(rows)}")
    return random.Random(seed).sample(rows, count)


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    steps: int = 35,
    *,
    learning_rate: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
) -> float:
    """A cold start: a little supervised training on answers, stopped early. Returns the last loss.

    RLOO can only reinforce what the policy sometimes does: one that is never right has nothing to learn from.
    """
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    loss = torch.zeros(())
    model.train()
    for _ in range(steps):
        batch = draw.sample(list(rows), batch_size)
        ids, labels = _with_answers(tokenizer, batch)
        logits = model(input_ids=ids.to(model.device)).logits[:, :-1]  # the logits at t are about token t + 1
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().to(model.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def _with_answers(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Token ids and labels (B, T) of prompt, answer and EOS, right-padded; only completions are learnt."""
    ids, labels = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([-100] * len(prompt) + completion))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id), pad(labels, True, -100)


def exact_match(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """The reward: 1 for a completion that is the answer, else 0.

    >>> exact_match(["012", "021"], answer=["012", "012"])
    [1.0, 0.0]
    """
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    sampled: bool,
    seed: int = 0,
    batch_size: int = 256,
) -> float:
    """The share of `rows` that the model answers exactly: greedily, or sampled at temperature 1.

    Sampled is what RLOO raises. The seed is this call's alone: the caller's random state is left as it was.
    """
    how: dict[str, Any] = {"do_sample": False}
    if sampled:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    right = 0.0
    with evaluating(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            prompts = tokenizer([row["prompt"] for row in batch], padding=True, return_tensors="pt")
            ids = prompts["input_ids"].to(model.device)
            mask = prompts["attention_mask"].to(model.device)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_COMPLETION_LENGTH, **how)
            texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
            right += sum(exact_match(texts, answer=[row["answer"] for row in batch]))
    return right / len(rows)
