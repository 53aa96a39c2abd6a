"""What of a model is compiled for decode steps (`compile_generation`), and whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.generation.native.layers import Forwards
from rloom.generation.native.rows import Rows
from rloom.models.fused import forwards_replaced
from rloom.models.verify import difference
from rloom.printable import get_logger

logger = get_logger(__name__)

COMPARED_ROWS = 32
"""Rows whose logits a compiled step is judged by: those of a thousand, in float32, would take gigabytes."""


class CompiledLayers:
    """A model's layers with compiled forwards, for as long as they are `wanted`: asked for, and not found wrong."""

    def __init__(self, model: nn.Module, *, wanted: bool, on_gpu: bool) -> None:
        self.model, self.wanted, self.on_gpu = model, wanted, on_gpu
        self.forwards: Forwards = []
        self.proved: set[bool] = set()  # steps that were right: of a single row, of several

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the compiled forwards meanwhile, if they are wanted."""
        if self.wanted and not self.forwards:
            self.forwards = compiled_forwards(self.model, on_gpu=self.on_gpu)
        with forwards_replaced(self.forwards if self.wanted else []):
            yield

    def give_up(self, error: Exception) -> None:
        """Compile no more: there is no compiler here, or it does not take this architecture."""
        logger.warning("the decode step cannot be compiled, and runs without: %s", first_line(error))
        self.wanted = False

    def prove(self, rows: Rows, logits: Callable[[], Tensor], allowed: float) -> None:
        """Compare the logits of a compiled step with those of a plain one, and give up where they differ by more than
        `allowed`. Done once for a single row, which is compiled apart, and once for several.

        Both steps write keys and values to the same places, and the rows stay where they are.
        """
        is_single = len(rows) == 1
        if not self.wanted or is_single in self.proved:
            return
        living = rows.alive.nonzero()[:COMPARED_ROWS, 0]
        plain = logits()[living]
        try:
            with self.used():
                found = logits()[living]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.give_up(error)
            return
        worst = difference(found, plain)
        self.wanted = worst < allowed
        if self.wanted:
            self.proved.add(is_single)
        else:
            logger.warning(
                "the compiled decode step differs from the plain one by %.1e of the largest logit, and is not used",
                worst,
            )


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's name."""
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def compiled_forwards(model: nn.Module, *, on_gpu: bool) -> Forwards:
    """The layers, each with its forward compiled. On a GPU, where a launch takes longer than a small operation, also
    the small parts beside the layers."""
    parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if on_gpu:
        parts += beside(model)
    return [(part, torch.compile(part.forward, dynamic=True)) for part in parts]


def beside(model: nn.Module) -> list[nn.Module]:
    """What stands beside the layers and is a handful of small operations: the norm at the end, the rotations' angles.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=9))
    >>> [type(part).__name__ for part in beside(model)]
    ['LlamaRMSNorm', 'LlamaRotaryEmbedding']
    """
    is_stack = lambda m: isinstance(m, nn.ModuleList) and any(isinstance(x, GradientCheckpointingLayer) for x in m)  # noqa: E731
    around = [module for module in model.modules() if any(map(is_stack, module.children()))]
    # Stacks may share some: each is compiled once.
    parts = dict.fromkeys(part for module in around for part in module.children())
    return [part for part in parts if not isinstance(part, (nn.Embedding, nn.Linear)) and not list(part.children())]
