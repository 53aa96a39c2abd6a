"""The docs are about this version: generated pages are up to date, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rloom
from rloom.cli.main import parser_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("maker", ["make_options", "make_api"])
def test_page_is_up_to_date(maker):
    spec = importlib.util.spec_from_file_location(maker, ROOT / "docs" / f"{maker}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), f"run: python docs/{maker}.py"


def test_api_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert not [name for name in rloom.__all__ if f"### `{name}`" not in page and name != "__version__"]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_lines_of_prose_end_at_120(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE).splitlines()
    assert not [line for line in prose if len(line) > 120 and not line.startswith(("|", "    "))]


def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "RLOOTrainer" in (tmp_path / "api" / "index.html").read_text()


def commands():
    """The `rloom …` lines in the code blocks of all pages, continued ones as one."""
    examples = (ROOT / "examples" / name / "README.md" for name in ("tldr", "smollm2"))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *examples):
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        blocks = [
            *re.findall(r"```bash\n(.*?)```", text, re.DOTALL),
            *re.findall(r"^    rloom .*$", text, re.MULTILINE),
        ]
        for line in "\n".join(blocks).splitlines():
            if line.strip().startswith("rloom "):
                yield pytest.param(line.strip(), id=f"{page.parent.name}/{page.name}: {line.strip()[:50]}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_of_the_pages_have_flags_that_exist(command, monkeypatch):
    """Parsed as they stand; that such commands run is shown in the tests of their verbs."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.replace("$QUICK", "--max_steps 150 --held_out 0.1"), comments=True)[1:]
    _, unknown = parser_of(words[0]).parse_known_args(words[1:])
    assert not unknown


def test_there_are_commands_to_try():
    assert len(list(commands())) >= 10
