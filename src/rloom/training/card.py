"""The model card that is saved with checkpoints and pushed to the hub."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import re
from typing import Any
from urllib.parse import quote

from rloom.config import RLOOConfig
from rloom.printable import printable
from rloom.rewards.completion_text import without_surrogates
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

generator = pipeline("text-generation", model={repository})
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

PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z][\w./-]*", re.ASCII | re.IGNORECASE)
"""Texts that YAML reads as themselves."""
NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML does not allow unescaped in quotes."""
SPECIAL = re.compile(r"([\\`*_{}\[\]()#!|~$])")
"""Characters with a meaning in Markdown."""


def as_yaml(value: Any) -> str:
    """A text, or a list of texts, for front matter. It is quoted where YAML would read it as something else.

    >>> print(as_yaml("org/model-1.5"), as_yaml("x\\ntags: [evil]"), as_yaml("no"))
    org/model-1.5 "x\\ntags: [evil]" "no"
    """
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return value
    text = without_surrogates(json.dumps(value, ensure_ascii=False))
    return NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_markdown(value: Any) -> str:
    """A text as one line with Markdown and HTML escaped. Underscores within words stay as they are.

    >>> print(as_markdown("a_b [x](y) <b>\\n# c"))
    a_b \\[x\\]\\(y\\) &lt;b&gt; \\# c
    """
    text = " ".join(printable(str(value)).split())
    escaped = SPECIAL.sub(r"\\\1", html.escape(text, quote=False))
    return re.sub(r"(?<=[^\W_])\\_(?=[^\W_])", "_", escaped)


def model_card(
    args: RLOOConfig,
    *,
    model_id: str | None,
    name: str,
    repository: str,
    dataset: str | None,
    tags: set[str],
    front_matter: dict[str, str | None] | None = None,
) -> str:
    """The card as Markdown with front matter."""
    base = model_id if model_id and not os.path.isdir(model_id) else None
    front = ["library_name: transformers", f"model_name: {as_yaml(name)}"]
    if base:
        front.append(f"base_model: {as_yaml(base)}")
    if dataset:
        front.append(f"datasets: {as_yaml(dataset)}")
    front += [f"{key}: {as_yaml(value)}" for key, value in (front_matter or {}).items() if value]
    front += ["tags:", *(f"- {as_yaml(tag)}" for tag in sorted(tags | {"generated_from_trainer"}))]
    origin = "This is a fine-tuned language model"
    if base:
        origin = f"This model is a fine-tuned version of [{as_markdown(base)}](https://huggingface.co/{quote(base)})"
    origin += f", trained on {as_markdown(dataset)}." if dataset else "."
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("transformers", "torch", "accelerate")]
    return TEMPLATE.format(
        front_matter="\n".join(front),
        name=as_markdown(name),
        origin=origin,
        rloom=__version__,
        repository=json.dumps(printable(repository), ensure_ascii=False),
        options="\n".join(f"| `{option}` | {as_markdown(getattr(args, option))} |" for option in SHOWN),
        versions=", ".join(versions),
        citation=CITATION,
    )
