"""Checkpoints in parts: each process writes what it holds, by torch's distributed checkpoint (DCP).

Their folders have accelerate's names, so that `accelerate merge-weights` reads them. Weights are saved as they are
trained, in float32; `rloom_layout.pt` has the dtypes in which they were loaded, and what DCP does not keep of the
optimizer. Any number of processes goes on from such a checkpoint: those that hold parts read theirs, others read all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rloom.errors import DiskError
from rloom.models.load import base_of, is_peft_model
from rloom.training.whole_state import and_low_bits, as_loaded

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
LAYOUT_FILE = "rloom_layout.pt"


def is_in_parts(folder: str | Path) -> bool:
    """Whether a checkpoint's weights were saved in parts."""
    return (Path(folder) / WEIGHTS).is_dir()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what has failed in a process, in all of them: torch's error for it is no `Exception`, so that a full disk
    would not be told from an interrupt."""
    try:
        yield
    except CheckpointException as error:
        _, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
        raise failure from error


# -- saving


def save_weights(folder: Path, model: nn.Module, *, group: Any, main: bool) -> None:
    """Write this process' part of the weights."""
    with _plain_errors():
        dcp.save({"model": _weights(model)}, checkpoint_id=folder / WEIGHTS, process_group=group)
    if main:
        _check_parts(folder / WEIGHTS)


def save_optimizer(
    folder: Path, model: nn.Module, optimizer: Any, dtypes: dict[str, torch.dtype], *, group: Any, main: bool
) -> None:
    """Write this process' part of the optimizer's state, and in the main process what belongs to no part. `dtypes`:
    those in which weights were loaded."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [[names[id(p)] for p in one["params"]] for one in optimizer.param_groups]
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    tensors = {name: {field: v for field, v in of.items() if isinstance(v, Tensor)} for name, of in state.items()}
    with _plain_errors():
        dcp.save({"state": tensors}, checkpoint_id=folder / OPTIMIZER, process_group=group)
    if main:
        _check_parts(folder / OPTIMIZER)
        groups = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
        known = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        torch.save({"groups": groups, "order": order, "dtypes": known}, folder / LAYOUT_FILE)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a checkpoint needs, tied ones once. With an adapter: what is trained."""
    adapter = is_peft_model(model)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad or not adapter}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: b for name, b in model.state_dict().items() if name not in parameters}
    return weights | ({} if adapter else buffers)


def _check_parts(folder: Path) -> None:
    """Refuse a folder in which this process does not find the parts of all others."""
    metadata = FileSystemReader(folder).read_metadata()
    files = {info.relative_path for info in (metadata.storage_data or {}).values()}
    missing = sorted(name for name in files if not (folder / name).exists())
    if missing:
        raise DiskError(
            f"{folder} does not have {missing[0]}, which another process has written: output_dir must be a folder "
            "that all machines share, or leave fsdp_state_dict_type at FULL_STATE_DICT"
        )


@contextmanager
def without_weights(model: nn.Module) -> Iterator[None]:
    """Inside the block `save_pretrained` writes the configuration alone."""

    def save(folder: str, **options: Any) -> None:
        adapters = getattr(model, "peft_config", {})
        for name, config in adapters.items() if is_peft_model(model) else ():
            config.save_pretrained(folder if name == "default" else str(Path(folder) / name))
        base: PreTrainedModel = base_of(model)
        base.config.save_pretrained(folder)
        if base.can_generate() and base.generation_config is not None:
            base.generation_config.save_pretrained(folder)

    model.__dict__["save_pretrained"] = save
    try:
        yield
    finally:
        model.__dict__.pop("save_pretrained", None)


# -- loading by processes that hold parts


def load_weights(folder: Path, model: nn.Module, group: Any) -> None:
    """Read this process' part of the weights into the model, however many processes have written them."""
    with _plain_errors():
        dcp.load({"model": _weights(model)}, checkpoint_id=folder / WEIGHTS, process_group=group)


def load_optimizer(folder: Path, model: nn.Module, optimizer: Any, group: Any) -> None:
    """Read this process' part of the optimizer's state."""
    layout, parameters = _layout(folder), dict(model.named_parameters())
    saved = _saved_tensors(folder / OPTIMIZER)
    state: dict[str, dict[str, Tensor]] = {}
    for key, (shape, dtype) in saved.items():
        name, field = _split_key(key)
        p = parameters[name]
        like = isinstance(p, DTensor) and shape == p.shape
        value = torch.zeros_like(p, dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
        state.setdefault(name, {})[field] = value.detach()
    with _plain_errors():
        dcp.load({"state": state}, checkpoint_id=folder / OPTIMIZER, process_group=group)
    optimizer.load_state_dict(_numbered(state, layout))


# -- loading as a whole


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights, in the dtypes in which they were loaded: as `model.safetensors` has them."""
    dtypes = {name: getattr(torch, dtype) for name, dtype in _layout(folder)["dtypes"].items()}
    read = _read_all(folder / WEIGHTS)
    named = {key.removeprefix("model."): value for key, value in read.items()}
    return {name: as_loaded(value, dtypes.get(name, value.dtype)) for name, value in named.items()}


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's whole state, as `optimizer.pt` has it: with the bits that bfloat16 weights drop."""
    layout, state = _layout(folder), dict[str, dict[str, Tensor]]()
    for key, value in _read_all(folder / OPTIMIZER).items():
        name, field = _split_key(key)
        state.setdefault(name, {})[field] = value
    trained = [name for names in layout["order"] for name in names]
    halves = [name for name in trained if layout["dtypes"].get(name) == "bfloat16"]
    weights = _read_all(folder / WEIGHTS, [f"model.{name}" for name in halves])
    for name in halves:
        if values := and_low_bits(state.get(name, {}), weights[f"model.{name}"]):
            state[name] = values
    return _numbered(state, layout)


def _layout(folder: Path) -> dict[str, Any]:
    return torch.load(folder / LAYOUT_FILE, map_location="cpu", weights_only=True)


def _numbered(state: dict[str, dict[str, Tensor]], layout: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the numbers of its weights, as torch's `load_state_dict` takes it."""
    numbers = {name: number for number, name in enumerate(name for names in layout["order"] for name in names)}
    groups = [
        {**group, "params": [numbers[name] for name in names]}
        for group, names in zip(layout["groups"], layout["order"], strict=True)
    ]
    return {"state": {numbers[name]: values for name, values in state.items()}, "param_groups": groups}


def _split_key(key: str) -> tuple[str, str]:
    """The weight and the field of an entry of the optimizer's state.

    >>> _split_key("state.model.norm.weight.exp_avg")
    ('model.norm.weight', 'exp_avg')
    """
    name, _, field = key.removeprefix("state.").rpartition(".")
    return name, field


def _saved_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and dtypes of what lies in a folder."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {k: (v.size, v.properties.dtype) for k, v in found.items() if isinstance(v, TensorStorageMetadata)}


def _read_all(folder: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Whole tensors, read by this process alone."""
    saved = _saved_tensors(folder)
    chosen = saved if names is None else {name: saved[name] for name in names}
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in chosen.items()}
    with warnings.catch_warnings(), _plain_errors():
        # That a process reads by itself is what is wanted.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        if state:
            dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state
