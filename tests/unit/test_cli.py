"""The command line: short help, exit codes, near misses."""

from __future__ import annotations

import pytest

from rloom.cli.main import main


def test_help_is_short(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["demo", "--stepz", "3"], "did you mean '--steps'?"), (["dmo"], "did you mean 'demo'?"), ([], "required: VERB")],
)
def test_wrong_usage_leaves_with_2_and_a_hint(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
