"""vLLM lives in the trainer's process, and must leave it as it was: random state, environment, threads, autocast."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """What vLLM draws does not move the trainer's noise; and the trainer's autocast is not vLLM's.

    It draws from torch alone. Python's and numpy's states are left: rewards may draw from them meanwhile, in threads of
    their own, and would draw the same again if they were put back.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.autocast(device.type, enabled=False):
        yield


class RolloutNoise:
    """The random state of one rollout, which begins with a seed and waits while others draw.

    vLLM could be given a seed for each request instead. It then draws row by row, which takes about as long as a decode
    step of a small model.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        self._generators = generators
        with own_randomness(device):
            self._states = [generator.manual_seed(seed % 2**63).get_state() for generator in generators]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While this is open, torch draws this rollout's numbers."""
        with own_randomness(self.device):
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            try:
                yield
            finally:
                self._states = [generator.get_state() for generator in self._generators]


@contextmanager
def starting_vllm() -> Iterator[None]:
    """For its import and its start: in this process, quietly, and with what it changes put back.

    Its import sets variables that child processes would inherit (LD_PRELOAD, threads of torch's compiler), and on a
    CPU its worker puts a function that does nothing in the place of `torch.set_num_threads`. Variables of its own
    (VLLM_…) stay: it reads them later. It seeds whatever there is, and freezes what the garbage collector knows of,
    so that no trainer that was made before would ever be freed.
    """
    before, numbers, arrays = dict(os.environ), random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    hook, frozen = sys.excepthook, gc.get_freeze_count()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with _keeping_precision():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(numbers)
        np.random.set_state(arrays)
        sys.excepthook = hook
        if not frozen:
            gc.unfreeze()
        _restore_environment(before)


@contextmanager
def _keeping_precision() -> Iterator[None]:
    """Keep TF32 as the trainer has it (`tf32`), by torch's older and its newer names: vLLM's worker switches it off."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    try:
        older = torch.get_float32_matmul_precision()
    # It was set by the newer names.
    except RuntimeError:
        older = None
    newer = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for backend, value in zip(backends, newer, strict=True):
            backend.fp32_precision = value


@contextmanager
def keeping_process_group(*, there: bool) -> Iterator[None]:
    """For vLLM's end, which destroys the default process group: one that was there before vLLM is not its own."""
    own = torch.distributed.destroy_process_group

    def destroy(group: Any = None) -> None:
        if group is not None:
            own(group)

    if there:
        torch.distributed.destroy_process_group = destroy
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = own


def _restore_environment(before: dict[str, str]) -> None:
    passing = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"}
    for name in [*os.environ, *before]:
        if name.startswith("VLLM_") and name not in passing:
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


REPLACED = ("__init__", "__call__")

Classes = dict[Any, tuple[tuple[type, ...], dict[str, Any]]]


def remember_classes(model: torch.nn.Module) -> Classes:
    """The classes of a model's parts, with what vLLM may put something else in the place of."""
    classes: list[Any] = list({type(module) for module in model.modules()})
    return {c: (c.__bases__, {n: c.__dict__[n] for n in REPLACED if n in c.__dict__}) for c in classes}


def restore_classes(before: Classes, theirs: torch.nn.Module | None) -> None:
    """Let the trainer's classes be as they were, and vLLM's modules have classes of their own.

    Where vLLM has no implementation of a model it runs transformers' (`vllm_model_impl="transformers"` always does),
    and changes the class of its decoder for the whole process: instances that it has not made could not be called.
    """
    for cls, (bases, own) in before.items():
        if cls.__bases__ == bases:
            continue
        changed = {name: cls.__dict__[name] for name in REPLACED if name in cls.__dict__}
        added = tuple(base for base in cls.__bases__ if base not in bases)
        for name in changed:
            if name in own:
                setattr(cls, name, own[name])
            else:
                delattr(cls, name)
        cls.__bases__ = bases
        another = type(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
        for module in theirs.modules() if theirs is not None else ():
            if type(module) is cls:
                module.__class__ = another


def temporary_folder(owner: Any) -> str:
    """A folder that is there as long as its owner."""
    path = tempfile.mkdtemp(prefix="rloom-vllm-")
    weakref.finalize(owner, shutil.rmtree, path, ignore_errors=True)
    return path
