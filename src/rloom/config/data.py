"""Prompts with their images, and how long they and their completions may be."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.config.topic import Topic, option


@dataclass
class ImageTopic(Topic):
    """Where images may come from."""

    fetch_images: bool = option(
        False,
        "Fetch images that the data names by address. Off, these are an error: who made the data chose them.",
    )
    image_folder: str | None = option(
        None,
        "Folder that images named by paths are read from, and no other. Unset: the working folder, or in commands the "
        "folder of local data elsewhere.",
    )


@dataclass
class DataTopic(Topic):
    """Prompts and lengths."""

    num_generations: int = option(2, "K, the number of completions per prompt; at least 2.")
    num_generations_eval: int | None = option(None, "Completions per prompt in evaluation; unset: K.")
    max_completion_length: int = option(512, "Longest completion, in tokens.")
    max_seq_length: int | None = option(
        None, "Most tokens of prompt and completion together. Unset: what `load_model` was told, else the model's own."
    )
    ds3_gather_for_generation: bool = option(
        True,
        "FSDP2 and ZeRO-3: gather a whole copy of the weights to generate. False: generate by vLLM's servers or, "
        "which is slow, layer by layer, for models of which no whole copy fits beside the rest.",
    )
    shuffle_dataset: bool | None = option(True, "Shuffle the training prompts, anew in each epoch.")
    pad_to_multiple_of: int | str | None = option("auto", "Pad prompts and completions to such a multiple.")

    def resolve_padding(self) -> None:
        """A number, or None for no padding beyond the longest."""
        if self.pad_to_multiple_of in ("auto", None, "none", "null"):
            self.pad_to_multiple_of = None
        else:
            self.pad_to_multiple_of = int(self.pad_to_multiple_of)

    @property
    def padding_multiple(self) -> int | None:
        """`pad_to_multiple_of`, resolved."""
        assert not isinstance(self.pad_to_multiple_of, str)
        return self.pad_to_multiple_of

    def check_lengths(self) -> None:
        """Prompt and completion together have room for both."""
        self.require(
            "max_seq_length",
            self.max_seq_length is None or self.max_seq_length > self.max_completion_length,
            f"above max_completion_length ({self.max_completion_length}), so that there is room for a prompt",
        )
