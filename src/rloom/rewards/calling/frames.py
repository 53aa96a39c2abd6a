"""Where a reward function failed: the frames of the user's own code, without those that called it."""

from __future__ import annotations

import os
import sysconfig
import traceback

import rloom

OURS = os.path.dirname(rloom.__file__) + os.sep
CALLERS = (OURS + os.path.join("rewards", "functions.py"), OURS + os.path.join("rewards", "calling") + os.sep)
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def reward_trace(error: BaseException) -> str | None:
    """The traceback of a reward's failure with the user's frames only; None for an error of another origin.

    >>> from rloom.rewards import FunctionReward, RewardBatch
    >>> try:
    ...     FunctionReward(lambda completions: 1 / 0).score(RewardBatch(prompts=[], completions=[], completion_ids=[]))
    ... except ZeroDivisionError as error:
    ...     trace = reward_trace(error)
    >>> "in <lambda>" in trace, "functions.py" in trace
    (True, False)
    """
    told = _cut(error)
    return None if told is None else "".join(told.format())


def reward_frames(error: BaseException) -> str:
    """The user's frames alone, the last four at most, each on lines of their own; empty where there are none."""
    told = _cut(error)
    return "" if told is None else "".join(traceback.StackSummary.from_list(told.stack[-4:]).format()).rstrip()


def _cut(error: BaseException) -> traceback.TracebackException | None:
    told = traceback.TracebackException.from_exception(error)
    last = max((i for i, frame in enumerate(told.stack) if frame.filename.startswith(CALLERS)), default=-1)
    below = told.stack[last + 1 :]
    if last < 0 or not below:
        return None
    told.stack = _own(below)
    for other in (told.__cause__, told.__context__):
        if other is not None:
            other.stack = _own(other.stack)
    return told


def _own(frames: list[traceback.FrameSummary]) -> traceback.StackSummary:
    """Those in files that are neither rloom's nor a library's; all, where there are no others."""
    own = [frame for frame in frames if not frame.filename.startswith((OURS, *LIBRARIES, "<frozen"))]
    return traceback.StackSummary.from_list(own or frames)
