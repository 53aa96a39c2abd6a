"""Writes a small summarisation set and a small model with random weights, so that the whole pipeline runs on a laptop.

    python examples/tldr/make_data.py --output runs/tldr

Posts are made of sentences; one of them says who did what to which thing, and a good summary says just that. A bad one
gets something wrong, leaves something out, or goes on for too long. The texts that people wrote, which the model is
first trained on and later compared with, are bad half of the time; of a pair the good one is preferred.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ["anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo", "ines", "jonas"]
VERBS = ["lost", "found", "sold", "broke", "painted", "borrowed", "hid", "cleaned"]
COLORS = ["red", "blue", "green", "black", "white", "yellow"]
THINGS = ["bike", "boat", "clock", "coat", "guitar", "ladder", "lamp", "piano", "radio", "table"]
PLACES = ["beach", "bridge", "garden", "harbour", "library", "market", "station", "tower"]
FILLERS = [
    "it was late in the {place} .",
    "the weather was bad that day .",
    "nobody at the {place} knew why .",
    "{other} saw it from the {place} .",
    "this happened last week .",
    "i do not know what to do now .",
]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
COMMON = ["tl;dr", ":", "a", "the", "."]


def make_post(draw: random.Random) -> dict[str, str]:
    """A post, what somebody wrote under it, a good summary and a bad one."""
    fact = {
        "name": draw.choice(NAMES),
        "verb": draw.choice(VERBS),
        "color": draw.choice(COLORS),
        "thing": draw.choice(THINGS),
    }
    others = [name for name in NAMES if name != fact["name"]]
    fillers = [s.format(place=draw.choice(PLACES), other=draw.choice(others)) for s in draw.sample(FILLERS, 3)]
    said = "{name} {verb} a {color} {thing} .".format(**fact)
    at = draw.randrange(len(fillers) + 1)
    good, bad = " " + said, " " + worse(fact, said, draw)
    return {
        "prompt": " ".join([*fillers[:at], said, *fillers[at:], "tl;dr :"]),
        "completion": draw.choice([good, bad]),
        "chosen": good,
        "rejected": bad,
    }


def worse(fact: dict[str, str], said: str, draw: random.Random) -> str:
    """A summary with a fault."""
    pools = {"name": NAMES, "verb": VERBS, "color": COLORS, "thing": THINGS}
    kind = draw.choice([*pools, "short", "long"])
    if kind in pools:
        return "{name} {verb} a {color} {thing} .".format(
            **{**fact, kind: draw.choice([w for w in pools[kind] if w != fact[kind]])}
        )
    if kind == "short":
        return said.rsplit(" ", draw.randint(2, 4))[0]
    return said + " " + draw.choice(FILLERS).format(place=draw.choice(PLACES), other=draw.choice(NAMES))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    texts = [
        *NAMES,
        *VERBS,
        *COLORS,
        *THINGS,
        *PLACES,
        *(word for s in FILLERS for word in s.split() if "{" not in word),
    ]
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"▁{word}": number for number, word in enumerate(dict.fromkeys([*COMMON, *texts]), len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")  # a completion keeps the space that it begins with
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A llama of half a million random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.05,
            pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
        )
    )  # fmt: skip


def save(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...]) -> None:
    """Some columns, as JSON lines."""
    path.write_text("".join(json.dumps({name: row[name] for name in columns}) + "\n" for row in rows))


def main(arguments: list[str] | None = None) -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/tldr")
    parser.add_argument("--posts", type=int, default=6000)
    options = parser.parse_args(arguments)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    posts = [make_post(draw) for _ in range(options.posts)]
    kept = {"sft": posts[: options.posts // 2], "prompts": posts[options.posts // 2 :]}
    for name, rows in kept.items():
        save(folder / f"{name}.jsonl", rows, ("prompt", "completion"))
    for name, rows in (("pairs", posts[::2]), ("judge_pairs", posts[1::2])):
        save(folder / f"{name}.jsonl", rows, ("prompt", "chosen", "rejected"))
    held_out = [make_post(random.Random(f"held out {i}")) for i in range(256)]
    save(folder / "validation.jsonl", held_out, ("prompt", "completion"))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    make_model(tokenizer).save_pretrained(folder / "base")


if __name__ == "__main__":
    main()
