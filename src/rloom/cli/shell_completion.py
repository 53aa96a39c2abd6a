"""`rloom completion SHELL`: a script that completes verbs and flags. It holds the names, so completing is instant."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Mapping, Sequence

from rloom.cli.parser import Parser
from rloom.errors import MissingExtraError

SUMMARY = "a script that completes verbs and flags in your shell"


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help='eval "$(rloom completion bash)"')


def run(options: Namespace) -> int:
    """Print the script."""
    print(script(options.shell, all_flags()), end="")
    return 0


def all_flags() -> dict[str, list[str]]:
    """The flags of every verb."""
    from rloom.cli.main import VERBS, parser_of

    flags: dict[str, list[str]] = {}
    for verb in VERBS:
        flags[verb] = []
        # Of a verb that needs a package which is not installed, the flags are not known.
        with contextlib.suppress(MissingExtraError):
            flags[verb] = parser_of(verb).flags()
    return flags


def script(shell: str, flags: Mapping[str, Sequence[str]]) -> str:
    """The script for a shell, given the flags of each verb.

    >>> "--steps" in script("bash", {"demo": ["--steps"]})
    True
    """
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags)


def _bash(flags: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f'    {verb}) words="{" ".join(names)}" ;;' for verb, names in flags.items())
    return f"""# eval "$(rloom completion bash)"
_rloom() {{
  local words="{" ".join(flags)}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}")); fi
}}
complete -F _rloom rloom
"""


def _zsh(flags: Mapping[str, Sequence[str]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(flags).replace("bash)", "zsh)", 1)


def _fish(flags: Mapping[str, Sequence[str]]) -> str:
    lines = [
        "# rloom completion fish | source",
        "complete -c rloom -n __fish_use_subcommand -f -a '" + " ".join(flags) + "'",
    ]
    for verb, names in flags.items():
        for name in names:
            if name.startswith("--"):
                lines.append(f"complete -c rloom -n '__fish_seen_subcommand_from {verb}' -l {name[2:]}")
    return "\n".join(lines) + "\n"
