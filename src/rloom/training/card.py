"""The model card that is saved with checkpoints and pushed to the hub."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rloom.config import RLOOConfig
from rloom.printable import printable
from rloom.rewards.completion_text import without_surrogates
from rloom.training.results import RunResults, curve
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
{snippet}
```

{results}## Training

| option | value |
|---|---|
{options}

Versions: {versions}.

## Citation

```bibtex
{citation}
```
"""

SNIPPET = """\
{needs}from transformers import pipeline

generator = pipeline("{task}", model={repository})
prompt = {prompt}
print(generator({argument}, max_new_tokens=128, return_full_text=False)[0]["generated_text"])"""

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


@dataclass(slots=True, kw_only=True)
class ModelFacts:
    """What a card says of the model: what it was trained from, and how it is used."""

    base: str | None = None  # a hub id or a folder
    adapter: str | None = None  # the kind of adapter that was saved, such as "lora"
    chat: bool = False  # prompts are messages, and there is a template for them
    vision: bool = False

    @property
    def hub_base(self) -> str | None:
        """The base model where it has a name that others know."""
        return self.base if self.base and not os.path.isdir(self.base) else None


def model_card(
    args: RLOOConfig,
    *,
    model: ModelFacts,
    results: RunResults,
    name: str,
    repository: str,
    dataset: str | None,
    tags: set[str],
    front_matter: dict[str, str | None] | None = None,
) -> str:
    """The card as Markdown with front matter."""
    front = [f"library_name: {'peft' if model.adapter else 'transformers'}", f"model_name: {as_yaml(name)}"]
    if model.hub_base:
        front.append(f"base_model: {as_yaml(model.hub_base)}")
    if dataset:
        front.append(f"datasets: {as_yaml(dataset)}")
    front += [f"{key}: {as_yaml(value)}" for key, value in (front_matter or {}).items() if value]
    tags = tags | {"generated_from_trainer"} | ({model.adapter} if model.adapter else set())
    front += ["tags:", *(f"- {as_yaml(tag)}" for tag in sorted(tags))]
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("transformers", "torch", "accelerate")]
    return TEMPLATE.format(
        front_matter="\n".join(front),
        name=as_markdown(name),
        origin=_origin(model, dataset),
        rloom=__version__,
        snippet=_snippet(model, repository),
        results=_results(results),
        options="\n".join(f"| `{option}` | {as_markdown(getattr(args, option))} |" for option in SHOWN),
        versions=", ".join(versions),
        citation=CITATION,
    )


def _origin(model: ModelFacts, dataset: str | None) -> str:
    """One sentence: of what, and on what. Of a folder only the name is told: paths are nobody else's."""
    what = f"an adapter ({as_markdown(model.adapter)}) of" if model.adapter else "a fine-tuned version of"
    if model.hub_base:
        base = f"[{as_markdown(model.hub_base)}](https://huggingface.co/{quote(model.hub_base)})"
    else:
        base = as_markdown(os.path.basename((model.base or "").rstrip("/"))) or "a language model"
    return f"This model is {what} {base}" + (f", trained on {as_markdown(dataset)}." if dataset else ".")


def _snippet(model: ModelFacts, repository: str) -> str:
    """Code that runs: with messages where the model has a template for them and was trained so, else with a text."""
    text = '"What would you like to know?"'
    content = f'[{{"type": "text", "text": {text}}}]' if model.vision else text
    return SNIPPET.format(
        needs="# pip install peft: the adapter is loaded on its base model\n" if model.adapter else "",
        task="image-text-to-text" if model.vision else "text-generation",
        repository=json.dumps(printable(repository), ensure_ascii=False),
        prompt=f'[{{"role": "user", "content": {content}}}]' if model.chat else text,
        argument="text=prompt" if model.vision else "prompt",
    )


def _results(results: RunResults) -> str:
    """The section on rewards and what became of them; empty where there are none."""
    if not results.rewards:
        return ""
    named = [as_markdown(name) + ("" if weight == 1.0 else f" (weight {weight:g})") for name, weight in results.rewards]
    lines = ["## Results", "", f"Rewards: {', '.join(named)}.", ""]
    rows = [
        f"| {as_markdown(name)} | {first:.4g} | {last:.4g} | {max(values):.4g} | `{curve(values)}` |"
        for name, values in results.rows()
        for first, last in [results.ends(name, values)]
    ]
    if rows:
        head = ["| mean of | at first | at last | highest | curve |", "|---|---|---|---|---|"]
        lines += [f"After {results.last_step()} updates ({results.which_ends()}):", "", *head, *rows, ""]
    return "\n".join([*lines, ""])
