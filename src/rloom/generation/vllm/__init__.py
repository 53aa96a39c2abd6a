"""Generation by vLLM, in this process or behind a server. vLLM itself is imported where it is used."""

from rloom.generation.vllm.colocated import VllmEngine
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.server import VllmServerEngine

__all__ = ["VllmEngine", "VllmOptions", "VllmServerEngine"]
