"""The soak in short: a run in trouble ends as the quiet one does. The hour-long one is `python bench/soak.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.mark.slow
def test_a_run_in_trouble_ends_as_a_quiet_one(tmp_path):
    short = ["--updates", "70", "--every", "3", "--pace", "0.2", "--settle", "20", "--flat", "1.1", "--hangs", "150"]
    line = [sys.executable, str(SCRIPT), *short, "--folder", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well: the same weights, the same completions, flat" in done.stdout
    assert int(re.search(r"the run was started (\d+) times", done.stdout)[1]) > 1, done.stdout
    assert len(set(re.findall(r"^  update \d+: (\w+ \w+ \w+)", done.stdout, re.MULTILINE))) > 1, done.stdout
