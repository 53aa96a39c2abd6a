"""The model card that is saved with checkpoints and pushed to the hub."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from rloom.version import __version__

CITATION = """\
@inproceedings{ahmadian2024back,
    title     = {Back to Basics: Revisiting {REINFORCE}-Style Optimization for Learning from Human Feedback in {LLM}s},
    author    = {Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and Kreutzer, Julia and
                 Pietquin, Olivier and {\\"U}st{\\"u}n, Ahmet and Hooker, Sara},
    booktitle = {Proceedings of ACL},
    year      = {2024},
    note      = {arXiv:2402.14740},
}"""

TEMPLATE = """\
---
{front_matter}
---

# {name}

{origin} It was trained with REINFORCE Leave-One-Out (RLOO,
[arXiv 2402.14740](https://arxiv.org/abs/2402.14740)) by rloom {rloom}.

## Use

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{repository}")
messages = [{{"role": "user", "content": "What would you like to know?"}}]
print(generator(messages, max_new_tokens=128, return_full_text=False)[0]["generated_text"])
```

## Training

| option | value |
|---|---|
{options}

Versions: {versions}.

## Citation

```bibtex
{citation}
```
"""

SHOWN = (
    "objective", "num_generations", "beta", "learning_rate", "temperature", "max_completion_length",
    "num_iterations", "epsilon", "generation_batch_size",
)  # fmt: skip


def model_card(
    args: Any,
    *,
    model_id: str | None,
    name: str,
    repository: str,
    dataset: str | None,
    tags: set[str],
    front_matter: dict[str, str | None] | None = None,
) -> str:
    """The card as markdown with front matter."""
    base = model_id if model_id and not os.path.isdir(model_id) else None
    front = ["library_name: transformers", f"model_name: {name}"]
    if base:
        front.append(f"base_model: {base}")
    if dataset:
        front.append(f"datasets: {dataset}")
    front += [f"{key}: {value}" for key, value in (front_matter or {}).items() if value]
    front += ["tags:", *(f"- {tag}" for tag in sorted(tags | {"generated_from_trainer"}))]
    origin = f"This model is a fine-tuned version of [{base}](https://huggingface.co/{base})" if base else (
        "This is a fine-tuned language model"
    )  # fmt: skip
    origin += f", trained on {dataset}." if dataset else "."
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("transformers", "torch", "accelerate")]
    return TEMPLATE.format(
        front_matter="\n".join(front),
        name=name,
        origin=origin,
        rloom=__version__,
        repository=repository,
        options="\n".join(f"| `{option}` | {getattr(args, option)} |" for option in SHOWN),
        versions=", ".join(versions),
        citation=CITATION,
    )
