"""The quickstart in a real kernel, top to bottom: its cells run, and what they show looks right."""

from __future__ import annotations

import re

import pytest
from transformers import AutoModelForCausalLM

from tests.standins import ROOT, environment

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ANSI = "\x1b["


def executed(cells, tmp_path, monkeypatch):
    """The notebook's code cells after a run in a kernel of their own."""
    for name, value in {**environment(tmp_path), "RLOOM_NOTEBOOK_STEPS": "10"}.items():
        monkeypatch.setenv(name, value)
    for name in ("config", "data", "runtime"):
        monkeypatch.setenv(f"JUPYTER_{name.upper()}_DIR", str(tmp_path / "jupyter" / name))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell, kind):
    return [output.data for output in cell.outputs if output.output_type == kind]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def quickstart():
    return nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4).cells


def test_quickstart_runs_top_to_bottom(tmp_path, monkeypatch):
    kept = [cell for cell in quickstart() if cell.cell_type == "code"]
    run = executed(quickstart(), tmp_path, monkeypatch)
    # People read it before they run it, so it has what its cells show: python docs/make_notebook.py
    kinds = [[o.output_type for o in cell.outputs if o.get("name") != "stderr"] for cell in run]
    assert [[o.output_type for o in cell.outputs] for cell in kept] == kinds
    _, _, reward, training, table, curve, last = run
    assert shown(reward, "execute_result")[0]["text/plain"] == "([1.0], [0.0])"
    (view,) = shown(training, "display_data")  # one display, whatever the number of updates and logs
    html = view["text/html"]
    assert '<progress value="10" max="10"' in html
    assert "update 10/10" in html
    assert re.search(r"reward</td><td>0\.\d{3}</td>", html)
    assert ANSI not in html
    assert not printed(training)  # no dicts of numbers beside it
    (completions,) = shown(table, "display_data")
    assert "advantage" in completions["text/html"]
    assert ANSI not in completions["text/html"]
    assert "reward" in printed(curve)
    assert ANSI not in printed(curve)
    assert "before" in shown(last, "execute_result")[0]["text/plain"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "notebook")


@pytest.mark.slow
def test_tables_and_a_live_view_that_was_asked_for(tmp_path, monkeypatch):
    """One display of progress and one table per log, with or without transformers' own bar."""
    code = [cell.source for cell in quickstart() if cell.cell_type == "code"][:4]
    changes = 'log_completions=True, num_completions_to_print=2, disable_tqdm=True, report_to="none"'
    code[3] = code[3].replace('report_to="none"', changes)
    code[3] = code[3].replace("processing_class=tokenizer)", "processing_class=tokenizer, callbacks=[LiveProgress()])")
    code[3] = "from rloom import LiveProgress\n" + code[3]
    cells = [nbformat.v4.new_code_cell(source) for source in code]
    training = executed(cells, tmp_path, monkeypatch)[3]
    pages = [data["text/html"] for data in shown(training, "display_data")]
    assert sum("<progress" in page for page in pages) == 1
    assert sum("Step 5" in page for page in pages) == 1
    assert sum("Step 10" in page for page in pages) == 1
    assert len(pages) == 3
    assert not printed(training)
