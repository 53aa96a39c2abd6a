"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import rloom

LEFT_OUT = {"rloom.models.kernels"}
"""It needs a GPU."""
if importlib.util.find_spec("vllm") is None:
    LEFT_OUT.add("rloom.generation.vllm.gloo_worker")  # vLLM's worker imports it, in vLLM's own environment
MODULES = [m.name for m in pkgutil.walk_packages(rloom.__path__, "rloom.") if m.name not in LEFT_OUT]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0
