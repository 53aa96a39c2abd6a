"""The command line: short help, exit codes, near misses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rloom.cli.main import VERBS, main
from rloom.cli.parser import count


def test_help_is_short(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < len(VERBS) + 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["demo", "--stepz", "3"], "did you mean '--steps'?"), (["dmo"], "did you mean 'demo'?"), ([], "required: VERB")],
)
def test_wrong_usage_leaves_with_2_and_a_hint(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    """Each verb's module is imported for its summary, and none of them may take seconds."""
    code = "import sys, rloom.cli.main as m; [m._module(v) for v in m.VERBS]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_summary_flags_and_short_help(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < 60
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert verb in capsys.readouterr().out


def test_a_new_verb_is_a_module_and_a_row(monkeypatch, capsys):
    module = SimpleNamespace(
        SUMMARY="say a number",
        add_arguments=lambda parser: parser.add_argument("--number", type=count),
        run=lambda options: print(options.number) or 0,
    )
    monkeypatch.setitem(sys.modules, "say", module)
    monkeypatch.setitem(VERBS, "say", "say")
    assert main(["say", "--number", "3"]) == 0
    assert capsys.readouterr().out == "3\n"
    with pytest.raises(SystemExit):
        main(["say", "--number", "0"])
    assert "--number: must be at least 1, not 0" in capsys.readouterr().err


def test_of_bitsandbytes_one_message_is_kept_back(caplog):
    others = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = others.level
    others.setLevel(logging.WARNING)
    others.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    others.warning("something else")
    others.setLevel(before)
    assert caplog.messages == ["something else"]


def test_output_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rloom", "completion", "bash"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
