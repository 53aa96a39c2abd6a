"""Generation: ours and `model.generate` as TRL calls it, same weights, same prompts, in one process.

    python bench/engine.py small tldr reason          # forced lengths
    python bench/engine.py small --ragged             # lengths with a long tail
    python bench/engine.py small --top-k 20 --top-p 0.95
    python bench/engine.py small --lora 16 --merged 0 1
    python bench/engine.py small --lora 16 --four-bit
    python bench/engine.py small tldr reason lora8b --ours --vllm    # beside vLLM, on the same GPU
    python bench/engine.py --growth

Prints ratio, tokens per second, milliseconds per decode step against the floor of the memory bus (weights, and keys
and values, read once per step), memory for keys and values, and what compiling and capturing took.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from shapes import SHAPES, Shape, make_model, make_rows, make_tokenizer

from rloom.generation import NativeEngine, Sampling
from rloom.types import Prompt

BUS = 4.3e12  # bytes per second, H200


def prompts_of(shape: Shape) -> list[Prompt]:
    tokenizer = make_tokenizer()
    return [
        Prompt(content=row["prompt"], token_ids=tokenizer(row["prompt"])["input_ids"]) for row in make_rows(shape, 1)
    ]


def ends_of(shape: Shape, ragged: bool) -> tuple[int, ...]:
    """No end token at all; or so many that a fifth of the limit is the mean length."""
    return tuple(range(1, 1 + 5 * shape.config.vocab_size // shape.completion)) if ragged else ()


def clocked(run: Any) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def run_generate(model: Any, shape: Shape, ends: tuple[int, ...], filters: dict[str, Any]) -> dict[str, float]:
    """As TRL does: every completion a row of its own, the forward as accelerate prepares it for `bf16=True`."""
    rows = [p.token_ids for p in prompts_of(shape) for _ in range(shape.k)]
    ids = torch.tensor(rows, device=model.device)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, **filters}
    options["eos_token_id"] = list(ends) or None
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def generate(limit: int) -> Any:
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **options)

    wrapper = Accelerator(mixed_precision="bf16" if model.dtype == torch.bfloat16 else "no")
    wrapper.prepare_model(model, evaluation_mode=True)
    generate(shape.completion)  # its cache grows at every step: only a second run finds memory of all those sizes
    seconds, output = clocked(lambda: generate(shape.completion))
    wrapper.unwrap_model(model, keep_fp32_wrapper=False)
    return {"seconds": round(seconds, 3), "steps": output.shape[1] - ids.shape[1]}


def profile(engine: Any, prompts: list[Prompt], shape: Shape) -> None:
    """Where the GPU's time goes, kernel by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        list(engine.generate(prompts, shape.k, seed=9))
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:16]:
        print("KERNEL", f"{event.self_device_time_total / 1e3:8.1f} ms {event.count:7d} ×", event.key[:90], flush=True)


def run_ours(
    model: Any, shape: Shape, sampling: Sampling, *, repeat: int = 2, with_profile: bool = False, **options: Any
) -> dict[str, float]:
    prompts = prompts_of(shape)
    start, engine = clocked(lambda: NativeEngine(lambda: model, sampling, **options))
    first, _ = clocked(lambda: list(engine.generate(prompts, shape.k, seed=0)))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for seed in range(1, repeat + 1):
        seconds, groups = clocked(lambda seed=seed: list(engine.generate(prompts, shape.k, seed=seed)))
        times.append(seconds)
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    result = {
        "seconds": round(min(times), 3),
        "proof_s": round(start, 1),
        "first_s": round(first, 2),
        "capture_s": round(engine.runner.graphs.capture_seconds, 2),
        "tokens": sum(lengths),
        "steps": max(lengths),
    }
    if torch.cuda.is_available():
        result["extra_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        tokens = shape.groups * shape.prompt + sum(lengths)
        result["kv_gib"] = round(tokens * engine.runner.geometry.bytes_per_token / 2**30, 2)
        result |= steps(engine, prompts, shape, lengths, min(times))
    if with_profile:
        profile(engine, prompts, shape)
    return result


def steps(engine: Any, prompts: Any, shape: Shape, lengths: list[int], seconds: float) -> dict[str, float]:
    """Milliseconds per decode step, prefill taken off, against the bus."""
    runner = engine.runner
    with runner.ready():
        runner.prefill([p.token_ids for p in prompts])
        prefill, _ = clocked(lambda: runner.prefill([p.token_ids for p in prompts]))
    weights = sum(p.nbytes for p in runner.model.parameters())
    if not runner.base.config.tie_word_embeddings:
        weights -= runner.base.get_input_embeddings().weight.nbytes  # of which a step reads a line for each row
    live = shape.groups * shape.prompt + sum(n * n / 2 for n in lengths) / max(lengths)
    floor = (weights + live * runner.geometry.bytes_per_token) / BUS * 1e3
    each = (seconds - prefill) / max(lengths) * 1e3
    return {
        "prefill_s": round(prefill, 3),
        "ms_per_step": round(each, 3),
        "floor_ms": round(floor, 3),
        "of_floor": round(floor / each, 3),
    }


def compare(
    name: str, shape: Shape, *, ragged: bool, ours_alone: bool, compiled: list[bool], with_profile: bool = False,
    filters: dict[str, Any] | None = None, lora: int = 0, merged: list[bool] | None = None, four_bit: bool = False,
) -> None:  # fmt: skip
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model, lora = make_model(shape, dtype).eval(), lora or shape.lora
    if four_bit:
        model = in_four_bits(model)
    if lora:
        model = with_adapter(model, lora)
    ends = ends_of(shape, ragged)
    sampling = Sampling(max_completion_length=shape.completion, eos_token_ids=ends, pad_token_id=0, **(filters or {}))
    theirs = None
    what = {"shape": name, "P": shape.prompt, "C": shape.completion, "K": shape.k, "N": shape.completions}
    what |= {"ragged": ragged, **(filters or {}), **({"lora": lora} if lora else {})}
    what |= {"four_bit": True} if four_bit else {}
    if not ours_alone:
        theirs = run_generate(model, shape, ends, filters or {})
        print("RESULT", json.dumps({**what, "peer": "generate", **theirs}), flush=True)
        clean()
    for one, copied in itertools.product(compiled, merged if lora and merged else [None]):
        ours = run_ours(model, shape, sampling, with_profile=with_profile, compiled=one, merged=copied)
        ours["tokens_per_second"] = round(ours["tokens"] / ours["seconds"])
        if theirs is not None:
            ours["ratio"] = round(theirs["seconds"] / ours["seconds"], 2)
        print("RESULT", json.dumps({**what, "peer": "rloom", "compiled": one, "merged": copied, **ours}), flush=True)
    del model
    clean()


def in_four_bits(model: Any) -> Any:
    """Its linear layers in NF4, as bitsandbytes has them."""
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": model.dtype}
    return type(model).from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), dtype=model.dtype, device_map=model.device.type,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, **options),
    ).eval()  # fmt: skip


def with_adapter(model: Any, rank: int) -> Any:
    """LoRA on all linear layers, no longer at its beginning, where it adds nothing."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    return model


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_layers(config: Any, factor: int) -> Any:
    made_from = {key: value for key, value in config.to_dict().items() if key != "layer_types"}  # one for each layer
    return type(config)(**{**made_from, "num_hidden_layers": config.num_hidden_layers * factor})


def beside_vllm(names: list[str], ragged: bool) -> None:
    """vLLM's rows, from a process of its own."""
    asked = [f"{name}:ragged" if ragged else name for name in names]
    subprocess.run([sys.executable, str(Path(__file__).with_name("vllm_rollouts.py")), *asked], check=True)


def growth() -> None:
    cuda = torch.cuda.is_available()
    base = replace(SHAPES["small"], completion=128) if cuda else SHAPES["cpu"]
    compare("x1", base, ragged=False, ours_alone=True, compiled=[False])
    for factor in (2, 4):
        for what, shape in {
            "K (batch grows)": replace(base, k=base.k * factor, completions=base.completions * factor),
            "prompts": replace(base, completions=base.completions * factor),
            "prompt": replace(base, prompt=base.prompt * factor),
            "completion": replace(base, completion=base.completion * factor),
            "layers": replace(base, config=with_layers(base.config, factor)),
        }.items():
            compare(f"{what} x{factor}", shape, ragged=False, ours_alone=True, compiled=[False])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--ours", action="store_true", help="leave model.generate out")
    parser.add_argument("--compile", type=int, nargs="*", default=[0], help="0, 1 or both")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter on all linear layers")
    parser.add_argument("--merged", type=int, nargs="*", help="0, 1 or both: whether the adapter is merged into copies")
    parser.add_argument("--four-bit", action="store_true", help="the layers' weights in NF4")
    parser.add_argument("--vllm", action="store_true", help="vLLM too, one after the other, in its own process")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--growth", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.shapes:
        compiled = [bool(c) for c in arguments.compile]
        options = {"ragged": arguments.ragged, "ours_alone": arguments.ours, "with_profile": arguments.profile}
        options |= {
            "four_bit": arguments.four_bit,
            "lora": arguments.lora,
            "merged": [bool(m) for m in arguments.merged or []],
        }
        filters = {key: getattr(arguments, key) for key in ("top_k", "top_p") if getattr(arguments, key) is not None}
        compare(name, SHAPES[name], compiled=compiled, filters=filters, **options)
    if arguments.vllm:
        beside_vllm(arguments.shapes, arguments.ragged)
    if arguments.growth:
        growth()


if __name__ == "__main__":
    main()
