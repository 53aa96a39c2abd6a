"""The native engine: generation on the trained weights themselves. [`NativeEngine`] is its door."""

from rloom.generation.native.engine import NativeEngine

__all__ = ["NativeEngine"]
