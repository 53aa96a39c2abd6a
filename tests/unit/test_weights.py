"""Checkpoints whose weights bear other names than the model's."""

from __future__ import annotations

import pytest
import torch

from rloom.training.weights import are_renamed, load_renamed
from tests import architectures, vision_models
from tests.conftest import make_model


@pytest.mark.parametrize("shard", ["1GB", "8KB"])
@pytest.mark.parametrize(
    "make",
    [lambda: architectures.make("mixtral"), lambda: vision_models.make("gemma3")[0]],
    ids=["experts", "vision"],
)
def test_names_of_a_publisher(make, shard, tmp_path):
    model, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert are_renamed(tmp_path, other)
    load_renamed(tmp_path, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_names_of_the_model(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    assert not are_renamed(tmp_path, model)
    assert not are_renamed(tmp_path / "of-an-adapter", model)
