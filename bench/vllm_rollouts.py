"""vLLM's side of `bench/engine.py --vllm`: the same weights, prompts and lengths, in a process of its own.

    python bench/vllm_rollouts.py small reason tldr small:ragged lora8b

A row for each: seconds of a rollout (the best of two after a warm-up), without log-probabilities and with those of the
drawn tokens, which a trainer needs. Prefix caching, CUDA graphs and compilation as vLLM has them by default. Weights
come from memory; with an adapter vLLM runs its own LoRA.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from engine import ends_of, prompts_of, with_adapter
from shapes import SHAPES, Shape, make_model, make_tokenizer

from rloom.generation.vllm.loader import LOADER, loading_from
from rloom.generation.vllm.lora import write_adapter
from rloom.generation.vllm.starting import write_config


def start(shape: Shape, folder: Path) -> tuple[Any, Any, float]:
    """vLLM with the shape's weights, its adapter as a request names it, and the seconds that took."""
    import vllm
    from vllm.lora.request import LoRARequest

    model = make_model(shape, torch.bfloat16).eval()
    options: dict[str, Any] = {"max_model_len": shape.prompt + shape.completion + 16, "gpu_memory_utilization": 0.5}
    lora = None
    if shape.lora:
        model = with_adapter(model, shape.lora)
        write_adapter(model, folder / "adapter", torch.bfloat16)
        lora = LoRARequest("adapter", 1, str(folder / "adapter"))
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": shape.lora}
    write_config(model, make_tokenizer(), str(folder))
    began = time.perf_counter()
    with loading_from(model):
        llm = vllm.LLM(str(folder), load_format=LOADER, dtype="bfloat16", seed=0, disable_log_stats=True, **options)
    return llm, lora, time.perf_counter() - began


def rollout(llm: Any, lora: Any, shape: Shape, ends: tuple[int, ...], logprobs: int | None) -> tuple[float, int]:
    """Seconds and tokens of one. Requests have no seeds of their own, with which vLLM draws row by row."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            n=shape.k, temperature=1.0, max_tokens=shape.completion, ignore_eos=True, stop_token_ids=list(ends) or None,
            detokenize=False, logprobs=logprobs,
        )
        for _ in range(shape.groups)
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts_of(shape)]
    llm.reset_prefix_cache()  # as after an update
    torch.cuda.synchronize()
    began = time.perf_counter()
    answers = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - began, sum(len(output.token_ids) for answer in answers for output in answer.outputs)


def measure(llm: Any, lora: Any, shape: Shape, ragged: bool) -> dict[str, Any]:
    ends, row = ends_of(shape, ragged), dict[str, Any]()
    rollout(llm, lora, shape, ends, None)
    for name, logprobs in (("seconds", None), ("with_logprobs_s", 0)):
        runs = [rollout(llm, lora, shape, ends, logprobs) for _ in range(2)]
        row |= {name: round(min(seconds for seconds, _ in runs), 3), "tokens": runs[-1][1]}
    return row


def run(name: str, ragged: list[bool]) -> None:
    import vllm

    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        llm, lora, started = start(shape, Path(folder))
        for one in ragged:
            row = {"shape": name, "ragged": one, "peer": f"vllm {vllm.__version__}", "lora": shape.lora}
            row |= {"start_s": round(started, 1), **measure(llm, lora, shape, one)}
            print("RESULT", json.dumps(row), flush=True)
        llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    wanted: dict[str, list[bool]] = {}
    for argument in sys.argv[1:]:
        name, _, kind = argument.partition(":")
        wanted.setdefault(name, []).append(kind == "ragged")
    for name, ragged in wanted.items():
        run(name, ragged)


if __name__ == "__main__":
    main()
