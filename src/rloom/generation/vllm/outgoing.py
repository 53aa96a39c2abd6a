"""Weights on their way to vLLM servers through a folder: written once for all, gone when they are read."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rloom.generation.vllm.lora import write_adapter
from rloom.generation.vllm.weights import Whole

NAME = "rloom-"
"""What names of weights and adapters begin with."""

OTHER = "-other"
"""What the name of numbers ends with that prove something, and are none of the policy's."""


class Outgoing:
    """The policy's weights at one moment. Files are written when the first server asks for them.

    A context: on leaving it the files are removed.
    """

    def __init__(self, folder: Path, fingerprint: tuple[Any, ...]) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self._written: dict[Hashable, Path] = {}

    def __enter__(self) -> Outgoing:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._written.values():
            shutil.rmtree(path, ignore_errors=True)

    def version(self, other: bool = False) -> str:
        """The name of these weights. `other` are numbers that prove something and are none of the policy's."""
        return version_of(self.fingerprint) + (OTHER if other else "")

    def weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, names: Hashable, other: bool
    ) -> Path:
        """A folder with these weights as a checkpoint. Servers with the same `names` of weights share it."""
        key = (dtype, names, other)
        if key not in self._written:
            path = self._written[key] = self.folder / _new_name()
            _write(path, weights, dtype)
        return self._written[key]

    def adapter(self, model: Any, dtype: torch.dtype, shift: float, whole: Whole | None = None) -> tuple[str, Path]:
        """The adapter's name, and a folder with it. A `shift` of what it adds makes another adapter."""
        key = (dtype, shift)
        if key not in self._written:
            path = self._written[key] = self.folder / _new_name()
            write_adapter(model, path, dtype, shift, whole)
        return self.version(other=shift != 0), self._written[key]


def version_of(fingerprint: tuple[Any, ...]) -> str:
    """The name of weights with this fingerprint: the same in every process that has them.

    >>> version_of((1, 2)) == version_of((1, 2)), version_of((1, 2)) == version_of((1, 3))
    (True, False)
    """
    return NAME + hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:16]


def _new_name() -> str:
    return NAME + uuid.uuid4().hex[:12]


def _write(path: Path, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Weights as a checkpoint that is there whole or not at all."""
    making = path.with_name(path.name + ".part")
    try:
        making.mkdir(parents=True)
        save_file(_apart(weights, dtype), making / "model.safetensors", metadata={"format": "pt"})
        # Only its owner may read such a file, and the server may be another user's.
        os.chmod(making / "model.safetensors", making.stat().st_mode & 0o666)
        os.rename(making, path)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _apart(weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """On the host, as the server computes; none shares its memory with another, which a file cannot express."""
    found: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in weights:
        here = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        found[name] = here.clone() if here.data_ptr() in taken else here
        taken.add(here.data_ptr())
    return found
