"""The notebook's cells run top to bottom, each on what those before it left."""

from __future__ import annotations

import ast
import json

from transformers import AutoModelForCausalLM

from tests.standins import ROOT


def run_cell(source: str, names: dict) -> object:
    """As a notebook does: the value of a last line that is an expression is the cell's."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def test_quickstart_runs_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLOOM_NOTEBOOK_STEPS", "10")
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    names: dict = {}
    shown = [run_cell("".join(cell["source"]), names) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"])  # kept without outputs
    assert ([1.0], [0.0]) in shown
    assert "before" in shown[-1]
    out = capsys.readouterr().out
    assert "advantage" in out
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "notebook")
