"""`rloom show RUN…`: what a run has logged and written, as a page in the browser, a file or text."""

from __future__ import annotations

import sys
from argparse import Namespace

from rloom.cli.parser import Parser, UsageError, count
from rloom.errors import in_words

SUMMARY = "look at runs: curves, completions, tokens, time, options"
SWITCH_SECONDS = 0.0005
"""How long a thread of the server keeps Python's lock while others wait for it; a tenth of what is usual."""


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="output folders of runs, of rloom or TRL; they may still be going on")
    add("--text", action="store_true", help="print to the terminal, and leave")
    add("--export", metavar="FILE", help="write the page as one HTML file, and leave")
    add("--sample", type=count, help="completions of each run in the file (default 400, in whole groups)")
    add("--host", default="127.0.0.1", help="address to listen on; beyond this machine, a token is asked for")
    add("--port", type=int, default=0, help="port (default: a free one)")
    add("--open", action="store_true", help="open the page in the browser")


def run(options: Namespace) -> int:
    """Show the runs."""
    if options.text and options.export:
        raise UsageError("--text and --export are two forms: choose one")
    if options.sample is not None and not options.export:
        raise UsageError("--sample is for --export: the page itself has all completions")
    if options.text:
        from rloom.observe.page.terminal import show_text

        show_text(options.runs)
    elif options.export:
        _export(options)
    else:
        _serve(options)
    return 0


def _export(options: Namespace) -> None:
    from rloom.observe.page.export import SAMPLE, export
    from rloom.observe.runs import RunReader

    sample = options.sample or SAMPLE
    size = export(options.runs, options.export, sample=sample)
    start = f"{options.export} is written ({size / 1e6:.1f} MB): all curves"
    if any(RunReader(run).has_completions() for run in options.runs):
        print(
            f"{start}, and a sample of up to {sample:,} completions of each run. It holds prompts and completions: "
            "mind whom you send it to."
        )
    else:
        print(f"{start}. No completions are stored in {in_words(options.runs)}.")


def _serve(options: Namespace) -> None:
    from rloom.observe.page.server import PageServer

    try:
        server = PageServer(options.runs, options.host, options.port)
    except OverflowError:
        raise UsageError(f"--port is from 0 to 65535, not {options.port}") from None
    # A text search takes the lock back thousands of times, and would wait as often for whoever is being answered.
    sys.setswitchinterval(SWITCH_SECONDS)
    server.begin()
    print(f"The page is at {server.url} (Ctrl-C ends it)", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    finally:
        server.server_close()
