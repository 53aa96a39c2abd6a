"""The frozen anchor of the KL: a copy of the policy as it was given, or the policy with its adapters switched."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from rloom.models.following import FollowingWeights
from rloom.models.load import is_peft_model
from rloom.models.precision import Value, as_they_are

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

    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """reference ← α·policy + (1−α)·reference; `value` tells what the policy's parameters stand for."""
        ...

    def begin_with(self, policy: Any, rests: Mapping[Tensor, Tensor]) -> None:
        """Begin with the bits that the policy's weights drop."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The weights, from a checkpoint."""
        ...


class FrozenReference:
    """A model of its own, never trained. One that `follows` can be synced."""

    def __init__(self, model: nn.Module, *, offload: bool = False, follows: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.offload = offload
        if offload:
            self.model.to("cpu")
        self.weights = FollowingWeights(dict(self.model.named_parameters()), moves=follows)
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

    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """Move the copy towards the policy."""
        self.weights.move(policy.parameters(), alpha, value)

    def begin_with(self, policy: Any, rests: Mapping[Tensor, Tensor]) -> None:
        """Begin with the bits that the policy's weights drop, of which this is a copy."""
        self.weights.begin_with([rests.get(p) for p in policy.parameters()])

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters by name (buffers never change)."""
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in."""
        self.weights.load_state_dict(state)


class AdapterReference:
    """The policy itself, with its adapters off or a frozen copy of the adapter on. One that `follows` can be synced.

    What is trained but no adapter's own (biases with peft's `bias=`, or what else a user chose of the base model) would
    be the policy's under any adapter: it is kept as it was given (`shared`), and put in its place meanwhile.
    """

    def __init__(self, policy: Any, *, adapter: str | None, follows: bool = False) -> None:
        self.adapter = adapter
        self.shared = {name: parameter.detach().clone() for name, parameter in _shared_parameters(policy).items()}
        frozen = {} if adapter is None else _parameters_of(policy, adapter)
        self.weights = FollowingWeights(frozen | self.shared, moves=follows)

    @contextmanager
    def use(self, policy: Any) -> Iterator[Any]:
        """Yields the policy itself, with its adapters switched."""
        # The shared ones first: with an adapter off, some kinds have no place for theirs.
        with _trainable_as_before(policy), self._shared_in_place(policy), self._switched(policy):
            yield policy

    use_head = use

    def staying(self) -> Any:
        """It is the policy's own: there is nothing to bring."""
        return nullcontext()

    @contextmanager
    def _switched(self, policy: Any) -> Iterator[None]:
        if self.adapter is None:
            with ExitStack() as off:
                with _without_biases(policy.peft_config[policy.active_adapter]):  # it would warn: ours are in place
                    off.enter_context(policy.disable_adapter())
                yield
            return
        active = policy.active_adapter
        policy.set_adapter(self.adapter)
        try:
            yield
        finally:
            policy.set_adapter(active)

    @contextmanager
    def _shared_in_place(self, policy: Any) -> Iterator[None]:
        trained = [(policy.get_parameter(name), kept) for name, kept in self.shared.items()]
        home = [parameter.data for parameter, _ in trained]
        for parameter, kept in trained:
            parameter.data = kept.to(parameter)  # DeepSpeed places and casts the policy only when training begins
        try:
            yield
        finally:
            for (parameter, _), data in zip(trained, home, strict=True):
                parameter.data = data

    def sync(self, policy: Any, alpha: float, value: Value = as_they_are) -> None:
        """Move the frozen adapter towards the trained one, and what they share with it."""
        trained = policy.active_adapter
        twins = (policy.get_parameter(_renamed(name, REF_ADAPTER, trained)) for name in self.weights.weights)
        self.weights.move(twins, alpha, value)

    def begin_with(self, policy: Any, rests: Mapping[Tensor, Tensor]) -> None:
        """An adapter's weights drop no bits."""

    def state_dict(self) -> dict[str, Tensor]:
        """The frozen adapter's parameters by name, and the shared ones."""
        return self.weights.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the parameters in. Older checkpoints have no shared ones: these stay as they were given."""
        self.weights.load_state_dict({**self.shared, **state})


def make_reference(
    policy: Any, *, new_adapter: bool, follows: bool, other: nn.Module | None, offload: bool = False
) -> Reference:
    """The reference for a policy as it was given.

    `other` is a model to use instead of a copy. A PeftModel whose adapter was there before training, or whose
    reference shall follow the policy, keeps a frozen copy of the adapter. A fresh one is simply switched off, unless it
    began as a part of the base weights: without it, the model would not be the one that was given.
    """
    if other is not None:
        return FrozenReference(other, offload=offload, follows=follows)
    if not is_peft_model(policy):
        return FrozenReference(copy.deepcopy(policy), offload=offload, follows=follows)
    if new_adapter and not follows and not _is_taken_from_base(policy):
        return AdapterReference(policy, adapter=None)
    with _trainable_as_before(policy):
        _copy_active_adapter(policy)
    return AdapterReference(policy, adapter=REF_ADAPTER, follows=follows)


BESIDE = ("gaussian", "orthogonal", "eva")
"""Ways to begin an adapter, by peft's names, that leave the base weights alone. True and False are others."""


def _is_taken_from_base(policy: Any) -> bool:
    """Whether the adapter began as a part of the base weights, which are others since (PiSSA, OLoRA, CorDA, LoftQ)."""
    begun = getattr(policy.peft_config[policy.active_adapter], "init_lora_weights", True)
    return isinstance(begun, str) and begun.lower() not in BESIDE


def _copy_active_adapter(policy: Any) -> None:
    active = policy.active_adapter
    if REF_ADAPTER in policy.peft_config:  # an earlier trainer's
        policy.delete_adapter(REF_ADAPTER)
    config = copy.copy(policy.peft_config[active])
    if hasattr(config, "bias"):
        config.bias = "none"  # peft allows only one adapter that trains biases, since they are not its own
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # others would take their part out of the base weights a second time
    policy.add_adapter(REF_ADAPTER, config)
    for name, frozen in _parameters_of(policy, REF_ADAPTER).items():
        # peft makes every new adapter float32; the copy of a bfloat16 one has to compute as that does.
        frozen.data = policy.get_parameter(_renamed(name, REF_ADAPTER, active)).detach().clone()
    policy.set_adapter(active)
    for frozen in _parameters_of(policy, REF_ADAPTER).values():
        frozen.requires_grad_(False)


@contextmanager
def _without_biases(config: Any) -> Iterator[None]:
    """An adapter's config as if it trained no biases, for a while."""
    before = getattr(config, "bias", "none")
    if before != "none":
        config.bias = "none"
    try:
        yield
    finally:
        if before != "none":
            config.bias = before


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


def _parameters_of(policy: Any, *adapters: str) -> dict[str, Tensor]:
    """The parameters of adapters: `…lora_A.NAME.weight`, `…lora_embedding_A.NAME`."""
    found: dict[str, Tensor] = {}
    for path, module in policy.named_modules():
        if isinstance(module, nn.ModuleDict | nn.ParameterDict):  # peft keeps adapters in these, by name
            for name, parameter in module.named_parameters(path):
                if name[len(path) + 1 :].split(".")[0] in adapters and all(parameter is not p for p in found.values()):
                    found[name] = parameter
    return found


def adapter_parameters(policy: Any) -> dict[str, Tensor]:
    """The parameters of all adapters, by name."""
    return _parameters_of(policy, *policy.peft_config)


def _shared_parameters(policy: Any) -> dict[str, Tensor]:
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
    save = policy.save_pretrained
    chosen = [name for name in adapters if name != REF_ADAPTER]
    policy.save_pretrained = functools.partial(save, selected_adapters=chosen)
    try:
        yield
    finally:
        del policy.save_pretrained  # uncovers the class' own
