"""Takes docs/page.png, docs/page-dark.png and docs/page-phone.png, the pictures of `rloom show`, of given runs.

python docs/make_page_pictures.py RUN…          needs Chromium
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import Browser

from rloom.observe.page.server import PageServer

HERE = Path(__file__).parent


def main(folders: list[str]) -> None:
    server = PageServer(folders)
    server.begin()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Browser() as browser:
        browser.resize(1200, 760)
        browser.prefer("light")
        browser.open(f"{server.url}#curves")
        browser.wait("document.querySelectorAll('.plot[data-drawn]').length >= 3")
        time.sleep(0.5)
        browser.picture(HERE / "page.png")
        browser.prefer("dark")
        browser.press("2")
        browser.wait("document.querySelectorAll('#rows .row').length === 50")
        show_tokens(browser)
        browser.picture(HERE / "page-dark.png")
        browser.resize(390, 780, mobile=True)
        browser.prefer("light")
        browser.press("1")
        time.sleep(1.0)
        browser.picture(HERE / "page-phone.png")


def show_tokens(browser: Browser) -> None:
    """Open a group whose tokens' values are stored, with one wrong completion at least."""
    browser.run("document.querySelector('[name=tokens]').click()")
    browser.run("document.querySelector('[name=advantage_max]').value = '-0.5'")
    browser.run("document.getElementById('filters').dispatchEvent(new Event('change'))")
    rows = "document.querySelectorAll('#rows .row')"
    browser.wait(f"[...{rows}].every((row) => row.querySelector('abbr'))")
    browser.run("document.querySelector('#rows .row').click()")
    browser.wait("document.querySelector('#group .tokens')")
    browser.run("document.getElementById('rows').style.maxHeight = '9rem'")
    browser.run("document.querySelector('#group').scrollIntoView({ block: 'end' })")
    browser.run("document.querySelectorAll('.own .token')[2].dispatchEvent(new MouseEvent('mouseenter'))")
    time.sleep(0.4)


if __name__ == "__main__":
    main(sys.argv[1:])
