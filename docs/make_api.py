"""Writes docs/api.md: the public names with their signatures and docstrings, as Markdown that any reader shows.

python docs/make_api.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """# API

The public names of `rloom`, as `python docs/make_api.py` writes them. Options of `RLOOConfig` are on a page of their
own, [options](options.md); ready-made rewards too: [rewards](rewards.md).
"""
SECTIONS = {
    "Training": [
        "rloom.RLOOTrainer",
        "rloom.RLOOTrainer.train",
        "rloom.RLOOTrainer.evaluate",
        "rloom.RLOOTrainer.predict",
        "rloom.RLOOConfig",
    ],
    "Models": [
        "rloom.load_model",
        "rloom.add_lora",
        "rloom.FastLanguageModel",
        "rloom.is_bf16_supported",
        "rloom.models.adapters.save_merged",
        "rloom.models.export.save_pretrained_merged",
        "rloom.models.export.save_pretrained_gguf",
    ],
    "Rewards": ["rloom.reward", "rloom.term", "rloom.route"],
    "Generation": [
        "rloom.Engine",
        "rloom.Sampling",
        "rloom.NativeEngine",
        "rloom.FakeEngine",
        "rloom.Prompt",
        "rloom.Completion",
        "rloom.Group",
    ],
    "Looking into runs": [
        "rloom.LiveProgress",
        "rloom.observe.store.read_store",
        "rloom.observe.runs.RunReader",
        "rloom.observe.runs.RunReader.metrics",
        "rloom.observe.runs.RunReader.completions",
        "rloom.observe.runs.RunReader.group",
        "rloom.replay",
    ],
}
# Longer signatures have a line for each argument.
LONGEST = 100


def find(name: str) -> Any:
    """The object behind a dotted name: as much of it as is a module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def signature(name: str, found: Any) -> str:
    """How it is called, without annotations."""
    short = name if name.count(".") > 1 and "RLOOTrainer" not in name else name.removeprefix("rloom.")
    if getattr(found, "_is_protocol", False):
        return f"class {short}"
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(found).parameters.values()]
    kept = [p for p in parameters if p.name != "self" and p.name != "unknown"]
    call = f"{short}{inspect.Signature(kept)}"
    if len(call) <= LONGEST:
        return call
    lines = re.findall(r"(?:[^,(]|\([^)]*\))+", call.removeprefix(f"{short}(")[:-1])
    return f"{short}(\n" + "".join(f"    {line.strip()},\n" for line in lines) + ")"


def markdown(docstring: str) -> str:
    """A docstring's parts as Markdown: lists of arguments, examples, references to other names."""
    lines: list[str] = []
    for block in re.split(r"\n\n(?=\S)", docstring):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Attributes:", "Returns:", "Raises:"):
            lines += [f"**{head[:-1]}**", "", *listed(inspect.cleandoc(rest)), ""]
        elif block.startswith(">>>"):
            lines += ["```python", block, "```", ""]
        else:
            lines += [block, ""]
    return re.sub(r"\[(`[^`]+`)\](?!\()", r"\1", "\n".join(lines))


def listed(text: str) -> list[str]:
    """`name: what it is` as items of a list. What is indented belongs to the item above; a text of its own stays."""
    if not re.match(r"[\w, *`]+: ", text):
        return [text]
    lines = []
    for line in text.splitlines():
        names, _, what = line.partition(": ")
        own = not line.startswith(" ")
        lines.append(f"- {', '.join(f'`{n}`' for n in names.split(', '))}: {what}" if own else f"  {line.strip()}")
    return lines


def entry(name: str) -> str:
    """One name: heading, signature, docstring."""
    found = find(name)
    heading = name.removeprefix("rloom.").rpartition("models.")[2].rpartition("observe.")[2]
    return f"### `{heading}`\n\n```python\n{signature(name, found)}\n```\n\n{markdown(inspect.getdoc(found) or '')}"


def errors() -> str:
    """What rloom raises on purpose, a line each."""
    module = importlib.import_module("rloom.errors")
    classes = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    lines = [f"- `{v.__name__}`: {' '.join((inspect.getdoc(v) or '').split())}" for v in classes]
    return "## Errors\n\nAll in `rloom.errors`.\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts += [f"## {title}\n", *(entry(name) for name in names)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*parts, errors()]))


if __name__ == "__main__":
    PAGE.write_text(page())
