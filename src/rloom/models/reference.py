"""The frozen anchor of the KL: a copy of the policy as it was given, or the policy with its adapters switched."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rloom.models.load import is_peft_model

REF_ADAPTER = "rloom_reference"


class Reference(Protocol):
    """A model to compare the policy with. `use(policy)` yields the module to run, in evaluation mode."""

    def use(self, policy: Any) -> Any:
        """A context manager that yields the module to call."""
        ...

    def use_head(self, policy: Any) -> Any:
        """The same where its output layer alone is called."""
        ...

    def staying(self) -> Any:
        """A context manager: what comes to the device meanwhile stays until its end, however often it is used."""
        ...

    def sync(self, policy: Any, alpha: float) -> None:
        """reference ← α·policy + (1−α)·reference"""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The weights, from a checkpoint."""
        ...


class FrozenReference:
    """A model of its own, never trained."""

    def __init__(self, model: nn.Module, *, offload: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.offload = offload
        if offload:
            self.model.to("cpu")
        self._stays = False
        self._home: dict[int, tuple[Tensor, Tensor]] = {}  # of what is on the device meanwhile: it, and its host's data

    @contextmanager
    def use(self, policy: Any) -> Iterator[Any]:
        """Yields the copy; one that is kept in the host's memory comes to the device meanwhile."""
        with self.staying():
            self._bring(self.model, policy)
            yield self.model

    @contextmanager
    def use_head(self, policy: Any) -> Iterator[Any]:
        """Yields the copy, of which the output layer alone has come."""
        with self.staying():
            self._bring(self.model.get_output_embeddings(), policy)  # type: ignore[operator]
            yield self.model

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Meanwhile what came to the device stays there. The outermost of these ends it."""
        outermost, self._stays = not self._stays, True
        try:
            yield
        finally:
            if outermost:
                self._stays = False
                self._go_home()

    def _bring(self, module: nn.Module, policy: Any) -> None:
        if not self.offload:
            return
        device = next(policy.parameters()).device
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in self._home:
                self._home[id(tensor)] = (tensor, tensor.data)
                tensor.data = tensor.data.to(device, non_blocking=True)

    def _go_home(self) -> None:
        """Nothing was changed: let go of the device's copies rather than copy them back."""
        for tensor, data in self._home.values():
            tensor.data = data
        self._home = {}

    @torch.no_grad()
    def sync(self, policy: Any, alpha: float) -> None:
        """Move the copy towards the policy."""
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.mul_(1 - alpha).add_(theirs.to(mine), alpha=alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters by name (buffers never change)."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state[name])


class AdapterReference:
    """The policy's own base weights: adapters off, or a frozen copy of the adapter."""

    def __init__(self, policy: Any, *, adapter: str | None) -> None:
        self.policy, self.adapter = policy, adapter

    @contextmanager
    def use(self, policy: Any) -> Iterator[Any]:
        """Yields the policy itself, with its adapters switched."""
        with _trainable_as_before(policy), self._switched(policy):
            yield policy

    use_head = use

    def staying(self) -> Any:
        """It is the policy's own: there is nothing to bring."""
        return nullcontext()

    @contextmanager
    def _switched(self, policy: Any) -> Iterator[None]:
        if self.adapter is None:
            with policy.disable_adapter():
                yield
            return
        active = policy.active_adapter
        policy.set_adapter(self.adapter)
        try:
            yield
        finally:
            policy.set_adapter(active)

    @torch.no_grad()
    def sync(self, policy: Any, alpha: float) -> None:
        """Move the frozen adapter towards the trained one."""
        for mine, theirs in _pairs(policy, policy.active_adapter, self.adapter):
            mine.mul_(1 - alpha).add_(theirs, alpha=alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """The frozen adapter's parameters by name; empty when adapters are simply switched off."""
        return {name: parameter.detach() for name, parameter in self._frozen()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in."""
        for name, parameter in self._frozen():
            parameter.copy_(state[name])

    def _frozen(self) -> list[tuple[str, Tensor]]:
        if self.adapter is None:
            return []
        return [(n, p) for n, p in self.policy.named_parameters() if _belongs(n, self.adapter)]


def make_reference(
    policy: Any, *, new_adapter: bool, follows: bool, other: nn.Module | None, offload: bool = False
) -> Reference:
    """The reference for a policy as it was given.

    `other` is a model to use instead of a copy. A PeftModel whose adapter was there before training, or whose
    reference shall follow the policy, keeps a frozen copy of the adapter; a fresh adapter is simply switched off.
    """
    if other is not None:
        return FrozenReference(other, offload=offload)
    if not is_peft_model(policy):
        return FrozenReference(copy.deepcopy(policy), offload=offload)
    if new_adapter and not follows:
        return AdapterReference(policy, adapter=None)
    with _trainable_as_before(policy):
        _copy_active_adapter(policy)
    return AdapterReference(policy, adapter=REF_ADAPTER)


def _copy_active_adapter(policy: Any) -> None:
    active = policy.active_adapter
    if REF_ADAPTER in policy.peft_config:  # an earlier trainer's
        policy.delete_adapter(REF_ADAPTER)
    policy.add_adapter(REF_ADAPTER, policy.peft_config[active])
    with torch.no_grad():
        for mine, theirs in _pairs(policy, active, REF_ADAPTER):
            mine.copy_(theirs)
    policy.set_adapter(active)
    _freeze(policy, REF_ADAPTER)


@contextmanager
def _trainable_as_before(policy: Any) -> Iterator[None]:
    """Undo what peft does to `requires_grad`: it makes all of an adapter trainable that it activates, and freezes the
    rest when it adds one, whatever a user chose. Where all is frozen (an adapter loaded without `is_trainable`) nobody
    chose what to train, and the adapter is."""
    before = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    if not any(trainable for _, trainable in before):
        before = []
    try:
        yield
    finally:
        for parameter, trainable in before:
            parameter.requires_grad_(trainable)


def _belongs(name: str, adapter: str) -> bool:
    """Whether a parameter is the adapter's: `…lora_A.NAME.weight`, `…lora_embedding_A.NAME`."""
    return adapter in name.split(".")


def _pairs(policy: Any, active: str, frozen: str | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(frozen, trained) parameters of two adapters."""
    for name, parameter in policy.named_parameters():
        if _belongs(name, active):
            twin = ".".join(str(frozen) if part == active else part for part in name.split("."))
            yield policy.get_parameter(twin), parameter


def _freeze(policy: Any, adapter: str) -> None:
    for name, parameter in policy.named_parameters():
        if _belongs(name, adapter):
            parameter.requires_grad_(False)


@contextmanager
def without_reference_adapter(policy: Any) -> Iterator[None]:
    """Keep peft from saving the reference's adapter: it belongs to the run, not to the model."""
    adapters = list(getattr(policy, "peft_config", {}))
    if REF_ADAPTER not in adapters:
        yield
        return
    save = policy.save_pretrained
    chosen = [name for name in adapters if name != REF_ADAPTER]
    policy.save_pretrained = functools.partial(save, selected_adapters=chosen)
    try:
        yield
    finally:
        del policy.save_pretrained  # uncovers the class' own
