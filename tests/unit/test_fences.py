"""The program in a completion: fences by CommonMark's rules, and where models do not keep to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.rewards.library.code.extraction import program_of
from rloom.rewards.library.code.fences import fenced_blocks
from rloom.rewards.library.code.problems import names_called

PROGRAM = "def f(x):\n    if x:\n        return 1\n\n    return 2\n"
FENCED = f"```python\n{PROGRAM}```\n"


def indented(text: str, by: str) -> str:
    return "".join(by + line if line.strip() else line for line in text.splitlines(keepends=True))


DOCSTRING = '''def f(x):
    """Doubles.

    ```
    f(2)
    ```
    """
    return 2 * x
'''
MODULE_DOCSTRING = '"""Usage:\n\n```python\nf(1)\n```\n"""\n' + PROGRAM

COMPLETIONS = {
    "carriage returns": (f"Here:\n```python\n{PROGRAM}```\nDone.\n".replace("\n", "\r\n"), PROGRAM),
    "in a list item": (f"1. The code:\n\n{indented(FENCED, '   ')}\n2. Done.", PROGRAM),
    "in a list item of one digit more": (f"10. The code:\n\n{indented(FENCED, '    ')}", PROGRAM),
    "deeper than its item asks": (f"- The code:\n{indented(FENCED, '    ')}- Done.", PROGRAM),
    "in a list within a list": (f"- One\n  - two\n\n{indented(FENCED, '    ')}", PROGRAM),
    "beside the item's mark": ("- " + indented(FENCED, "  ").lstrip(), PROGRAM),
    "in a quote": (indented(FENCED, "> ").replace("\n\n", "\n>\n"), PROGRAM),
    "a fence in a docstring, fenced": (f"Here:\n\n```python\n{DOCSTRING}```\n", DOCSTRING),
    "a fence in a docstring, alone": (DOCSTRING, DOCSTRING),
    "a fence in the module's docstring": (MODULE_DOCSTRING, MODULE_DOCSTRING),
    "a longer fence around a shorter": (f"````python\n{MODULE_DOCSTRING}````\n", MODULE_DOCSTRING),
    "no end": (f"```python\n{PROGRAM}", PROGRAM),
    "tildes": (f"~~~python\n{PROGRAM}~~~\n", PROGRAM),
    "tabs stay": ("```python\ndef f(x):\n\treturn x\n```", "def f(x):\n\treturn x\n"),
    "the item is left in its middle": (f"1. The code:\n   ```python\n{PROGRAM}   ```\n2. Done.", PROGRAM),
    "indented under a paragraph": (f"The code:\n{indented(FENCED, '      ')}", PROGRAM),
    "an example of use after it": (f"```python\n{PROGRAM}```\nUse:\n```python\nprint(f(1))\n```", PROGRAM),
    "called something else": (f"```Python3\n{PROGRAM}```\n```bash\npython f.py\n```", PROGRAM),
}


@pytest.mark.parametrize(("completion", "program"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_the_program_in_a_completion(completion, program):
    assert program_of(completion, names=names_called(("assert f(1) == 1",))) == program


def test_a_function_in_a_fence_goes_on_with_the_prompt():
    prompt = 'def f(x):\n    """Doubles."""\n'
    assert program_of("```python\n    return 2 * x\n```", prompt, "f") == prompt + "    return 2 * x\n"


PIECES = [
    "```python", "```", "~~~", "    ```", "   ```py", "  def f():", "def f(x):", "    return x", "- item", "1. one",
    "  - nested", "   text", "", "> ```", "> x = 1", "> quote", "text", "1) ```python", "# head", "     deep", "- ```",
    "* * *", "      ```python", "\tx = 1", "\t```", "    four", "````", "`` ` ``", "> - ```", "- > a",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=10))
def test_blocks_are_those_that_a_reader_of_commonmark_finds(lines):
    markdown_it = pytest.importorskip("markdown_it")
    text = "\n".join(lines) + "\n"
    theirs = [t for t in markdown_it.MarkdownIt("commonmark").parse(text) if t.type == "fence"]
    ours = [(block.name, block.text.rstrip("\n")) for block in fenced_blocks(text)]
    assert ours == [(t.info.strip(), t.content.rstrip("\n")) for t in theirs]


def test_long_texts_full_of_fences_take_no_time():
    assert program_of("- " * 10_000 + "```\n" * 50_000, names={"f"})
    assert program_of("> " * 10_000 + "\n```python\nx = 1\n```\n" * 20_000, names={"f"}) == "x = 1\n"
