"""Engines: from prompts to groups of completions, behind one protocol."""

from rloom.generation.base import Engine, Sampling
from rloom.generation.choose import choose_engine
from rloom.generation.fake import FakeEngine
from rloom.generation.forked import ForkedEngine
from rloom.generation.native import NativeEngine
from rloom.generation.transformers import TransformersEngine
from rloom.generation.vllm import VllmEngine, VllmOptions, VllmServerEngine

__all__ = [
    "Engine",
    "FakeEngine",
    "ForkedEngine",
    "NativeEngine",
    "Sampling",
    "TransformersEngine",
    "VllmEngine",
    "VllmOptions",
    "VllmServerEngine",
    "choose_engine",
]
