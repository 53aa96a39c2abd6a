"""Speed and memory: how the same gradient is computed."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.config.topic import Topic, option


@dataclass
class SpeedTopic(Topic):
    """Speed and memory."""

    max_tokens_per_micro_batch: int | None = option(
        None,
        "Tokens run forward and backward at a time. Unset: so many that a GPU of this kind is busy with a layer for "
        "longer than the host takes to launch it.",
    )
    packing: bool | None = option(
        None, "Train with each prompt once per group. Unset: wherever the model proves to allow it; False: padded rows."
    )

    split_weights: bool | None = option(
        None,
        "Hold float32 weights as bfloat16, which is computed with, and the 16 bits that it drops, which the optimizer "
        "uses and `save_model` writes. Unset: under `bf16` on a GPU, unless `model_init_kwargs` asks for float32; "
        "False: float32 weights that are cast for each product, as torch's autocast does.",
    )
    dither_weights: bool = option(
        False,
        "Weight matrices of a bfloat16 checkpoint: draw the bits below bfloat16 at random, within rounding, before the "
        "first update of AdamW, so that what is computed with follows what is saved from the start.",
    )
    offload_reference: bool = option(
        False, "Keep the reference's weights in the host's memory, and on the device only while they are used."
    )
    keep_whole_copy: bool | None = option(
        None,
        "FSDP2 and ZeRO-3: keep the whole copy of the weights that generates in memory during updates; False: let go "
        "of it before each. The result is the same. Unset: keep it if a quarter of the memory is left beside it.",
    )
    dynamic_sampling: int = option(
        0,
        "Replace groups whose scores are all equal by groups of other prompts, in at most so many rounds per rollout.",
    )
    compile_layers: bool | None = option(
        None,
        "Compile the decoder layers for training, after half a minute at the start. Unset: no; our own kernels for "
        "what stands between a layer's products are there from the first update.",
    )
    keep_logits: bool | None = option(
        None,
        "Keep a micro-batch's logits for its backward instead of computing them again: a little faster with a wide "
        "vocabulary, for as many numbers as vocabulary times trained tokens. Unset: where they take less than 3 GiB.",
    )

    def check_speed(self) -> None:
        """Ranges."""
        self.require("dynamic_sampling", self.dynamic_sampling >= 0, "0 (off) or positive")
