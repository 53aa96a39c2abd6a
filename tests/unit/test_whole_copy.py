"""Whether a whole copy of sharded weights stays in memory, what is said where it does not fit, and of lost parts."""

from __future__ import annotations

import logging
import resource
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from rloom import RLOOConfig
from rloom.errors import ConfigError, DiskError
from rloom.generation.base import Sampling
from rloom.generation.choose import choose_engine
from rloom.training import whole_copy
from rloom.training.checkpoint import writing
from rloom.training.passes import Passes
from rloom.training.sharded import check_ties
from rloom.training.sharded_checkpoint import _check_parts, load_weights, save_weights
from rloom.training.sharding_options import check_layered
from rloom.training.whole_copy import WholeCopy, check_room, fits_beside_update
from tests.conftest import make_model

CPU = torch.device("cpu")
GIB = 2**30


def has_memory(monkeypatch, *, free: float, total: float = 16.0) -> None:
    monkeypatch.setattr(whole_copy, "free_memory", lambda device: int(free * GIB))
    monkeypatch.setattr(whole_copy, "_total_memory", lambda device: int(total * GIB))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("free", "trained", "stays"), [(4.0, 0, True), (3.9, 0, False), (10.0, GIB // 2, True), (9.9, GIB // 2, False)]
)
def test_a_copy_stays_where_a_quarter_of_the_memory_is_left(monkeypatch, caplog, free, trained, stays):
    """4 GiB of 16 beside 12 bytes for each weight that is trained here; a line says what was decided and why."""
    copy = WholeCopy(make_model(), half=None, device=CPU)
    has_memory(monkeypatch, free=free)
    with caplog.at_level(logging.INFO, logger="rloom"):
        assert fits_beside_update(copy, trained, CPU) is stays
    assert ("stays in memory during" if stays else "is let go of before") in caplog.text
    assert f"{free - trained * 12 / GIB:.2f} GiB of 16.00" in caplog.text


def test_processes_on_one_host_share_its_memory(monkeypatch):
    has_memory(monkeypatch, free=3.0)
    check_room(2 * GIB, CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"takes 2\.00 GiB, and 1\.50 GiB are free: generate by vLLM servers"):
        check_room(2 * GIB, CPU)


def test_a_copy_is_refused_before_it_is_made(monkeypatch):
    """Also where it was let go of, and others have taken its memory since."""
    model = make_model()
    size = sum(p.nbytes for p in model.parameters())
    has_memory(monkeypatch, free=size / 2 / GIB)
    with pytest.raises(ConfigError, match="a whole copy of the weights takes"):
        WholeCopy(model, half=None, device=CPU)
    half, weights = WholeCopy(model, half=torch.bfloat16, device=CPU), dict(model.named_parameters())
    assert {p.dtype for p in half.module.parameters()} == {torch.bfloat16}
    half.fill(weights, weights.__getitem__)
    half.free()
    has_memory(monkeypatch, free=0.0)
    with pytest.raises(ConfigError, match="a whole copy of the weights takes"):
        half.fill([], dict(model.named_parameters()).__getitem__)


class Allocated(TorchDispatchMode):
    """Bytes of what operations return and did not get."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
            if made.untyped_storage().data_ptr() not in given:
                # Kept alive, so that no other gets its place.
                self.storages[made.untyped_storage().data_ptr()] = made
        return made

    @property
    def nbytes(self):
        return sum(made.untyped_storage().nbytes() for made in self.storages.values())


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_in_half_precision_takes_half_of_the_memory_from_the_start(tied):
    """What `check_room` counts: there is never a copy in the model's own dtype."""
    model = make_model(tie_word_embeddings=tied)
    size = sum(p.nbytes for p in model.parameters())
    with Allocated() as allocated:
        half, weights = WholeCopy(model, half=torch.bfloat16, device=CPU), dict(model.named_parameters())
        half.fill(weights, weights.__getitem__)
    assert size / 2 <= allocated.nbytes < 0.55 * size
    for name, p in model.named_parameters():
        assert torch.equal(half.module.get_parameter(name), p.bfloat16())
    assert (half.module.lm_head.weight is half.module.get_input_embeddings().weight) is tied


def test_what_only_the_copy_has_stays():
    """The adapter of a reference, say: no part of it is in the model."""
    copy = WholeCopy(make_model(), half=None, device=CPU)
    copy.module.register_parameter("own", torch.nn.Parameter(torch.ones(3)))
    copy.free()
    assert copy.module.own.tolist() == [1.0, 1.0, 1.0]
    assert copy.module.lm_head.weight.shape == make_model().lm_head.weight.shape


# -- layer by layer


def test_processes_agree_on_their_passes_before_the_first():
    """Layers are gathered from all processes in a pass: one that asks later would wait for another that is in it."""
    done = []

    class Stub:
        def rounds(self, count):
            done.append(f"asked with {count}")
            return 3

        def make(self, rollout, rows, device):
            done.append(f"rows {rows}")

    passes = object.__new__(Passes)
    passes.policy, passes.in_step_with, passes.batcher = torch.nn.Linear(1, 1), Stub(), Stub()
    passes.idle_batch = lambda: done.append("idle")
    assert len(list(passes._batches_in_step(None, [[0, 1]]))) == 3
    assert done == ["asked with 1", "rows [0, 1]", "idle", "idle"]


class Layered:
    is_layered = True


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1, "kl_placement": "loss", "kl_estimator": "full"},
        {"images": True},
    ],
)
def test_what_does_not_run_in_parts_is_refused(options, tmp_path):
    options = dict(options)
    rows = SimpleNamespace(column_names=["prompt", "image"] if options.pop("images", False) else ["prompt"])

    class Trainer:
        model, processes, train_dataset, eval_dataset = None, Layered(), rows, None
        args = RLOOConfig(str(tmp_path), ds3_gather_for_generation=False, use_cpu=True, report_to="none", **options)

    with pytest.raises(ConfigError, match="ds3_gather_for_generation=False"):
        check_layered(Trainer())


def test_what_is_trained_beside_an_adapter_is_refused_in_parts(tmp_path):
    """The reference would need it as it was, and gathers what is trained."""

    class Trainer:
        processes, train_dataset, eval_dataset = Layered(), [{"prompt": "a"}], None
        model = get_peft_model(make_model(attention_bias=True), LoraConfig(target_modules=["q_proj"], bias="all"))
        args = RLOOConfig(str(tmp_path), ds3_gather_for_generation=False, use_cpu=True, report_to="none", beta=0.1)

    with pytest.raises(ConfigError, match="beside which other weights are trained does not go together"):
        check_layered(Trainer())
    Trainer.args.beta = 0.0
    check_layered(Trainer())


def test_a_weight_of_several_layers_is_refused():
    """Embedding and head may share one: both are around the layers."""
    model = make_model(tie_word_embeddings=True)
    check_ties(model)
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM uses one weight \(weight\) in several layers"):
        check_ties(model)


def test_another_engine_is_refused():
    sampling = Sampling(max_completion_length=2, eos_token_ids=(2,), pad_token_id=0)
    with pytest.raises(ConfigError, match="leave engine='native' out"):
        choose_engine(make_model, sampling, wanted="native", in_step=Layered())
    extra = Sampling(max_completion_length=2, eos_token_ids=(2,), pad_token_id=0, extra={"num_beams": 2})
    with pytest.raises(ConfigError, match="leave generation_kwargs num_beams out"):
        choose_engine(make_model, extra, in_step=Layered())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_that_lie_on_other_machines_are_missed(tmp_path):
    """A folder that machines do not share has the main process' part alone."""
    (tmp_path / "weights").mkdir()
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "weights", no_dist=True)
    _check_parts(tmp_path / "weights")
    (tmp_path / "weights" / "__0_0.distcp").unlink()
    with pytest.raises(DiskError, match=r"does not have __0_0.distcp, .* must be a folder that all machines share"):
        _check_parts(tmp_path / "weights")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_is_told_where_parts_are_written(tmp_path):
    """As it is for whole checkpoints, so that half of one is removed. torch's own error is no Exception."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = make_model()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(DiskError, match="checkpoint-1 cannot be written to"), writing(tmp_path, "checkpoint-1"):
            save_weights(tmp_path, model, group=None, main=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_that_cannot_be_read_is_an_exception(tmp_path):
    save_weights(tmp_path, make_model(), group=None, main=True)
    next((tmp_path / "pytorch_model_fsdp_0").glob("*.distcp")).unlink()
    with pytest.raises(FileNotFoundError, match="distcp"):
        load_weights(tmp_path, make_model(), None)
