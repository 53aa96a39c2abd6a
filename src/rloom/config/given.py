"""Which options were given, and which of those do not exist."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rloom.config.older_names import INIT_ONLY_NAMES, OlderNames
from rloom.errors import UnknownOptionError, did_you_mean

MEANT = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens", "max_response_length"), "max_completion_length"),
    **dict.fromkeys(("K", "k", "group_size", "n", "num_samples"), "num_generations"),
    **dict.fromkeys(("lr", "actor_lr"), "learning_rate"),
    **dict.fromkeys(("batch_size", "micro_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    **dict.fromkeys(("clip_range", "clip_ratio", "clip_eps"), "epsilon"),
    "loss_type": "loss_aggregation",
    "penalty_reward_value": "missing_eos_penalty",
}
MEANT = {name: f"did you mean '{option}'?" for name, option in MEANT.items()} | {
    "max_prompt_length": "prompts are not cut here: filter or shorten them in the data set, and set "
    "'max_seq_length' to bound prompt and completion together"
}
"""What is said about names that other trainers use and that do not look like ours."""

OLDER = frozenset(f.name for f in fields(OlderNames))


class Remembering(type):
    """Calls the constructor, after noting which options were given and refusing those that do not exist.

    A metaclass rather than a wrapped `__init__`, so that subclasses, whose constructors dataclasses write anew, have
    it too.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        options = {f.name: f.default for f in fields(cls) if f.init}  # type: ignore[arg-type]
        for name in kwargs:
            if name not in options and name not in INIT_ONLY_NAMES:
                present = [option for option in options if option not in OLDER]
                hint = f"; {MEANT[name]}" if name in MEANT else did_you_mean(name, present)
                raise UnknownOptionError(f"{cls.__name__} has no option '{name}'{hint}")
        values = dict(zip(options, args, strict=False)) | kwargs
        given = set(values)
        # A command-line parser passes every option: there, the given ones are those with other values.
        if given.issuperset(options):
            given = {name for name in given if name in INIT_ONLY_NAMES or values[name] != options[name]}
        config = cls.__new__(cls)  # type: ignore[call-overload]
        config._given = frozenset(given)
        config._init_only = {name: kwargs.pop(name) for name in INIT_ONLY_NAMES if name in kwargs}
        config.__init__(*args, **kwargs)
        return config
