"""The frozen anchor of the KL: a copy of the policy as it was given, or the policy with its adapters switched."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rloom.models.load import is_peft_model
from rloom.models.low_bits import Value, as_they_are
from rloom.models.moving_average import MovingAverage, Parts

REF_ADAPTER = "rloom_reference"


class Reference(ABC):
    """A model to compare the policy with, in evaluation mode. Those that follow the policy can be synced with it."""

    weights: MovingAverage

    @abstractmethod
    def use(self, policy: Any, *, head_only: bool = False) -> AbstractContextManager[Any]:
        """A context manager that yields the module to call; with `head_only` its output layer alone may be called."""

    def staying(self) -> AbstractContextManager[None]:
        """A context manager: what comes to the device meanwhile stays until its end, however often it is used."""
        return nullcontext()

    @abstractmethod
    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """reference ← α·policy + (1−α)·reference; `value` tells what the policy's parameters stand for."""

    # Not abstract: a reference that is made of adapters does nothing here.
    def begin_with(self, policy: Any, low_bits: Mapping[Tensor, Tensor]) -> None:  # noqa: B027
        """Begin with the low bits of the policy's weights. An adapter's weights have none."""

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters by name, for a checkpoint (buffers never change)."""
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in, from a checkpoint."""
        self.weights.load_state_dict(state)


class FrozenReference(Reference):
    """A model of its own, never trained. With `offload` it lies in the host's memory while it is not used. `parts`: how
    its weights are cut over processes; those that are cut are brought to the device by who has cut them."""

    def __init__(
        self, model: nn.Module, *, offload: bool = False, follows: bool = False, parts: Parts | None = None
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.offload = offload and not isinstance(model, FSDPModule)
        if self.offload:
            self.model.to("cpu")
        self.weights = MovingAverage(dict(self.model.named_parameters()), moves=follows, parts=parts)
        self._stays = False
        # What is on the device meanwhile, by id: the tensor, and its data in the host's memory.
        self._home: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def use(self, policy: Any, *, head_only: bool = False) -> Iterator[Any]:
        """Yields the copy; one that is kept in the host's memory comes to the device meanwhile."""
        with self.staying():
            self._bring(self.model.get_output_embeddings() if head_only else self.model, policy)  # type: ignore[operator]
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
                # Nothing was changed: the device's copies are let go rather than copied back.
                for tensor, data in self._home.values():
                    tensor.data = data
                self._home = {}

    def _bring(self, module: nn.Module, policy: Any) -> None:
        device = next(policy.parameters()).device
        for tensor in (*module.parameters(), *module.buffers()) if self.offload else ():
            if id(tensor) not in self._home:
                self._home[id(tensor)] = (tensor, tensor.data)
                tensor.data = tensor.data.to(device, non_blocking=True)

    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """Move the copy towards the policy."""
        self.weights.move(policy.parameters(), alpha, value)

    def begin_with(self, policy: Any, low_bits: Mapping[Tensor, Tensor]) -> None:
        """Begin with the low bits of the policy's weights, of which this is a copy."""
        self.weights.begin_with([low_bits.get(p) for p in policy.parameters()])


class AdapterReference(Reference):
    """The policy itself, with its adapters off or a frozen copy of the adapter on.

    What is trained but no adapter's own (biases with peft's `bias=`, or what else a user chose of the base model) would
    be the policy's under any adapter: it is kept as it was given (`shared`), and put in its place meanwhile.
    """

    def __init__(self, policy: Any, *, adapter: str | None, follows: bool = False, parts: Parts | None = None) -> None:
        self.adapter = adapter
        self.shared = {name: parameter.detach().clone() for name, parameter in trained_beside_adapter(policy).items()}
        frozen = {} if adapter is None else _parameters_of(policy, adapter)
        self.weights = MovingAverage(frozen | self.shared, moves=follows, parts=parts)

    @contextmanager
    def use(self, policy: Any, *, head_only: bool = False) -> Iterator[Any]:
        """Yields the policy itself, with its adapters switched."""
        trained = [(policy.get_parameter(name), kept) for name, kept in self.shared.items()]
        # DeepSpeed places and casts the policy only when training begins: hence `to`.
        shared = [(parameter, "data", kept.to(parameter)) for parameter, kept in trained]
        # The shared ones first: with an adapter off, some kinds have no place for theirs.
        with _trainable_as_before(policy), _attributes_set(shared), self._switched(policy):
            yield policy

    @contextmanager
    def _switched(self, policy: Any) -> Iterator[None]:
        active = policy.active_adapter
        if self.adapter is None:
            config = policy.peft_config[active]
            with ExitStack() as off:
                # peft would warn of biases that stay trained: ours are in place.
                with _attributes_set([(config, "bias", "none")] if hasattr(config, "bias") else []):
                    off.enter_context(policy.disable_adapter())
                yield
            return
        policy.set_adapter(self.adapter)
        try:
            yield
        finally:
            policy.set_adapter(active)

    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """Move the frozen adapter towards the trained one, and what they share with it."""
        trained = policy.active_adapter
        twins = (policy.get_parameter(_renamed(name, REF_ADAPTER, trained)) for name in self.weights.weights)
        self.weights.move(twins, alpha, value)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in. Older checkpoints have no shared ones: these stay as they were given."""
        super().load_state_dict({**self.shared, **state})


def needs_own_adapter(policy: Any, *, new_adapter: bool, follows: bool) -> bool:
    """Whether the reference is the policy with a frozen copy of its adapter.

    It is where the adapter was there before training, or the reference shall follow the policy. A fresh adapter is
    simply switched off, unless it began as a part of the base weights: without it, the model would not be the one that
    was given.
    """
    return is_peft_model(policy) and not (new_adapter and not follows and not _is_taken_from_base(policy))


def make_reference(
    policy: Any,
    *,
    new_adapter: bool,
    follows: bool,
    other: nn.Module | None,
    offload: bool = False,
    parts: Parts | None = None,
) -> Reference:
    """The reference for a policy as it was given. `other` is a model to use instead of a copy; `parts`: how weights are
    cut over processes."""
    if other is not None:
        return FrozenReference(other, offload=offload, follows=follows, parts=parts)
    if not is_peft_model(policy):
        return FrozenReference(copy.deepcopy(policy), offload=offload, follows=follows)
    if not needs_own_adapter(policy, new_adapter=new_adapter, follows=follows):
        return AdapterReference(policy, adapter=None)
    # Weights that are sharded were given their copy before.
    if not isinstance(policy, FSDPModule):
        add_reference_adapter(policy)
    return AdapterReference(policy, adapter=REF_ADAPTER, follows=follows, parts=parts)


BESIDE = ("gaussian", "orthogonal", "eva")
"""Ways to begin an adapter, by peft's names, that leave the base weights alone. True and False are others."""


def _is_taken_from_base(policy: Any) -> bool:
    """Whether the adapter began as a part of the base weights, which are others since (PiSSA, OLoRA, CorDA, LoftQ)."""
    begun = getattr(policy.peft_config[policy.active_adapter], "init_lora_weights", True)
    return isinstance(begun, str) and begun.lower() not in BESIDE


def add_reference_adapter(policy: Any) -> None:
    """Add a frozen copy of the policy's adapter. One that an earlier trainer added is replaced."""
    with _trainable_as_before(policy):
        _copy_active_adapter(policy)


def _copy_active_adapter(policy: Any) -> None:
    active = policy.active_adapter
    if REF_ADAPTER in policy.peft_config:
        policy.delete_adapter(REF_ADAPTER)
    config = copy.copy(policy.peft_config[active])
    # peft allows only one adapter that trains biases, since they are not its own.
    if hasattr(config, "bias"):
        config.bias = "none"
    # Others than the usual weights would be taken out of the base weights a second time.
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    policy.add_adapter(REF_ADAPTER, config)
    policy.set_adapter(active)
    for name, frozen in _parameters_of(policy, REF_ADAPTER).items():
        # peft makes every new adapter float32; the copy of a bfloat16 one has to compute as that does.
        frozen.data = policy.get_parameter(_renamed(name, REF_ADAPTER, active)).detach().clone()
        frozen.requires_grad_(False)


@contextmanager
def _attributes_set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Objects with other values of some attributes, for a while: (object, name, value) each."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _trainable_as_before(policy: Any) -> AbstractContextManager[None]:
    """Undo what peft does to `requires_grad` meanwhile.

    It makes all of an adapter trainable that it activates, and freezes the rest when it adds one, whatever a user
    chose. Where all is frozen (an adapter loaded without `is_trainable`) nobody chose what to train: the adapter is.
    """
    now = [(parameter, "requires_grad", parameter.requires_grad) for parameter in policy.parameters()]
    return _attributes_set(now if any(trainable for _, _, trainable in now) else [])


def _parameters_of(policy: Any, *adapters: str) -> dict[str, Tensor]:
    """The parameters of adapters: `…lora_A.NAME.weight`, `…lora_embedding_A.NAME`."""
    found: dict[str, Tensor] = {}
    for path, module in policy.named_modules():
        # peft keeps adapters in these, by name.
        if isinstance(module, nn.ModuleDict | nn.ParameterDict):
            for name, parameter in module.named_parameters(path):
                if name[len(path) + 1 :].split(".")[0] in adapters and all(parameter is not p for p in found.values()):
                    found[name] = parameter
    return found


def adapter_parameters(policy: Any) -> dict[str, Tensor]:
    """The parameters of all adapters, by name."""
    return _parameters_of(policy, *policy.peft_config)


def trained_beside_adapter(policy: Any) -> dict[str, Tensor]:
    """What is trained and belongs to no adapter."""
    own = {id(parameter) for parameter in adapter_parameters(policy).values()}
    return {n: p for n, p in policy.named_parameters() if p.requires_grad and id(p) not in own}


def _renamed(name: str, adapter: str, other: str) -> str:
    """The name that a parameter of one adapter has in another."""
    return ".".join(other if part == adapter else part for part in name.split("."))


@contextmanager
def without_reference_adapter(policy: Any) -> Iterator[None]:
    """Keep peft from saving the reference's adapter: it belongs to the run, not to the model."""
    adapters = list(getattr(policy, "peft_config", {}))
    if REF_ADAPTER not in adapters:
        yield
        return
    chosen = [name for name in adapters if name != REF_ADAPTER]
    policy.save_pretrained = functools.partial(policy.save_pretrained, selected_adapters=chosen)
    try:
        yield
    finally:
        # Uncovers the class' own.
        del policy.save_pretrained
