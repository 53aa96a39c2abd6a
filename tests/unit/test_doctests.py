"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import rloom

NEEDS_A_GPU = {"rloom.models.kernels"}
MODULES = [m.name for m in pkgutil.walk_packages(rloom.__path__, "rloom.") if m.name not in NEEDS_A_GPU]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0
