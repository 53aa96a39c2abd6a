"""Engines: from prompts to groups of completions, behind one protocol."""

from rloom.generation.base import Engine, Sampling
from rloom.generation.fake import FakeEngine
from rloom.generation.transformers import TransformersEngine

__all__ = ["Engine", "FakeEngine", "Sampling", "TransformersEngine"]
