"""A reward named on the command line: `module:name`, `file.py:name`, or with options, `module:name(option=1)`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloom.errors import ConfigError, RewardError, did_you_mean


def load_reward(spec: str) -> Any:
    """The reward that a text names. A service's address is one already.

    >>> load_reward("rloom.rewards:think_format_reward").__name__
    'think_format_reward'
    >>> load_reward("rloom.rewards:length(maximum=3)").__name__
    'length'
    """
    if spec.startswith(("http://", "https://")):
        return spec
    where, separator, what = spec.partition(":")
    if not separator or not what:
        raise RewardError(f"{spec!r} names no reward: module:function, file.py:function, or http://host:port/score")
    module = _module(where)
    name, options = _parsed(what, spec)
    if not hasattr(module, name):
        known = [n for n in dir(module) if not n.startswith("_")]
        raise RewardError(f"{where} has no '{name}'{did_you_mean(name, known)}")
    found = getattr(module, name)
    return found if options is None else found(**options)


def _module(where: str) -> Any:
    sys.path.insert(0, os.getcwd())
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise RewardError(f"there is no file {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        # Worker processes find it by name.
        sys.path.insert(0, str(path.parent.resolve()))
        try:
            spec.loader.exec_module(module)
        except (SyntaxError, OSError) as error:
            raise RewardError(f"{where} cannot be loaded: {error}") from None
        return module
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise RewardError(f"there is no module {where}; a file is named with its .py") from None
        raise


def _parsed(what: str, spec: str) -> tuple[str, dict[str, Any] | None]:
    try:
        node = ast.parse(what, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            return node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
    except (SyntaxError, ValueError):
        pass
    raise RewardError(f"{spec!r}: after the colon stands a name, or a name with options: name(option=1)")


def find_rewards(specs: Sequence[str], *, isolate: bool = False) -> list[Any]:
    """The rewards that flags name. `isolate`: functions that would be called in this process get one of their own.

    >>> from rloom.rewards.calling.call_options import call_options_of
    >>> call_options_of(find_rewards(["length(maximum=3)"], isolate=True)[0]).isolated
    True
    """
    found = [find_reward(spec) for spec in specs]
    if not isolate or not found:
        return found
    from rloom.rewards.calling.call_options import call_options_of

    found = [_isolated(reward) for reward in found]
    if not any(call_options_of(reward).isolated for reward in found):
        raise ConfigError(
            "--isolate_rewards has no effect: models, services and async functions are called as they are"
        )
    return found


def _isolated(found: Any) -> Any:
    """Left as they are: models, services, objects, and functions that wait for others, in threads or async."""
    from rloom.rewards.calling.call_options import call_options_of, is_coroutine_function, reward

    if not callable(found) or hasattr(found, "get_rewards") or hasattr(found, "parameters"):
        return found
    options = call_options_of(found)
    return (
        found if options.isolated or options.threads or is_coroutine_function(found) else reward(found, isolated=True)
    )


def find_reward(spec: str) -> Any:
    """The reward that a flag names: what `load_reward` takes, a ready-made one by its name, a dotted path, or a model.

    >>> find_reward("length(maximum=3)").__name__, find_reward("rloom.rewards.think_format_reward").__name__
    ('length', 'think_format_reward')
    >>> find_reward("think_format_rewrd")
    Traceback (most recent call last):
        ...
    rloom.errors.RewardError: ...
    """
    # A service, or a reward model's folder.
    if spec.startswith(("http://", "https://")) or Path(spec).is_dir():
        return spec
    name, options = spec.partition("(")[::2]
    if ":" in name:
        return load_reward(spec)
    from rloom import rewards

    if name in rewards.__all__:
        return load_reward(f"rloom.rewards:{spec}")
    # A reward model on the hub.
    if "/" in name:
        return spec
    module, dot, last = name.rpartition(".")
    if dot and last != "py":
        return load_reward(f"{module}:{last}{'(' if options else ''}{options}")
    raise RewardError(
        f"{spec!r} names no reward{did_you_mean(name, rewards.__all__) or '.'} A reward is a ready-made name, "
        "file.py:function, module:function, an address, or a model by hub id or folder"
    )
