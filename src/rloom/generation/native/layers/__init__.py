"""Layers that run otherwise in decode steps than in the model: merged, fused and compiled ones."""
