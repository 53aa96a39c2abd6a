"""bfloat16 weights that learn: a small language model, 200 steps at a small learning rate, three ways.

    python bench/precision.py --lr 1e-6

The same data and the same start: float32 weights, bfloat16 weights with the bits kept (`SplitAdamW`), bfloat16 weights
with torch's AdamW. Prints how far the weights have moved and the loss on the training text before and after, computed
in float32 from the weights as they are.
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rloom.models.low_bits import accumulate_in_float32
from rloom.models.optimizers import SplitAdamW


def make(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # all three begin with the same numbers
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.to(dtype)


def batches(steps: int) -> list[torch.Tensor]:
    """Counting upwards with a random stride: something to learn."""
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(64, (steps, 16, 1), generator=draw)
    strides = torch.randint(1, 5, (steps, 16, 1), generator=draw)
    return list((starts + strides * torch.arange(32)) % 64)


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, data: list[torch.Tensor]) -> float:
    exact = make(torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return float(sum(exact(input_ids=ids, labels=ids).loss for ids in data) / len(data))


def run(kind: str, lr: float, steps: int) -> dict[str, float]:
    model = make(torch.float32 if kind == "float32" else torch.bfloat16)
    data = batches(steps)
    start = [p.detach().float().clone() for p in model.parameters()]
    before = loss_of(model, data[:20])
    if kind == "ours":
        accumulate_in_float32(model.parameters())
        optimizer: torch.optim.Optimizer = SplitAdamW(model.parameters(), lr=lr, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for ids in data:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = sum(float((p.detach().float() - s).square().sum()) for p, s in zip(model.parameters(), start, strict=True))
    return {"moved": round(moved**0.5, 5), "before": round(before, 5), "after": round(loss_of(model, data[:20]), 5)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for lr in arguments.lr:
        for kind in ("float32", "ours", "plain bfloat16"):
            print("RESULT", json.dumps({"lr": lr, "kind": kind, **run(kind, lr, arguments.steps)}), flush=True)


if __name__ == "__main__":
    main()
