"""What a run writes to its output folder beside checkpoints: the model, its card, the state of the loop, metrics."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import Trainer

from rloom.data.plan import Schedule
from rloom.data.vision import is_vision
from rloom.errors import DiskError
from rloom.models.load import is_peft_model
from rloom.models.reference import without_reference_adapter
from rloom.printable import get_logger
from rloom.rewards.calling.reward_set import RewardSet
from rloom.training import checkpoint
from rloom.training.card import ModelFacts, model_card
from rloom.training.folder import OutputFolder
from rloom.training.precision import Precision
from rloom.training.results import RunResults

logger = get_logger(__name__)


class OutputTrainer(Trainer):
    """Writes models and what stands beside them. The parts below are set by the constructor of [`RLOOTrainer`]."""

    schedule: Schedule
    rewards: RewardSet
    precision: Precision
    folder: OutputFolder
    chat: bool = False  # prompts are messages
    _tag_names = ("rloom", "rloo")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the options as the user gave them, not as the loop sees them."""
        seen, self.args.gradient_accumulation_steps = (
            self.args.gradient_accumulation_steps,
            self.schedule.parts_per_update,
        )
        where = output_dir or self.args.output_dir
        with self.folder.writing(where), checkpoint.writing(where, "the model"):
            try:
                with without_reference_adapter(self.model), self._as_float32():
                    super()._save(output_dir, state_dict)
            finally:
                self.args.gradient_accumulation_steps = seen
            # peft has written an empty card, which ours replaces.
            if self.args.should_save:
                self._write_card(Path(where))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **front_matter: str | None,
    ) -> None:
        """Write a model card to the output folder. `language`, `license` and `tasks` go into its front matter."""
        self._write_card(Path(self.args.output_dir), model_name, dataset_name, tags, **front_matter)

    def _write_card(
        self,
        folder: Path,
        name: str | None = None,
        dataset: str | None = None,
        tags: str | list[str] | None = None,
        *,
        language: str | None = None,
        license: str | None = None,
        tasks: str | None = None,
        finetuned_from: str | None = None,
    ) -> None:
        if not self.is_world_process_zero():
            return
        given = {tags} if isinstance(tags, str) else set(tags or ())
        card = model_card(
            self.args,
            model=self._facts_for_card(finetuned_from),
            results=RunResults(
                rewards=list(zip(self.rewards.names, self.rewards.weights.tolist(), strict=True)),
                logs=self.state.log_history,
            ),
            name=name or Path(self.args.output_dir).name,
            repository=self.hub_model_id or str(folder),
            dataset=dataset,
            tags=given | set(self._tag_names),
            front_matter={"language": language, "license": license, "pipeline_tag": tasks},
        )
        with self.folder.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "README.md").write_text(card)

    def _facts_for_card(self, finetuned_from: str | None) -> ModelFacts:
        adapter, active = is_peft_model(self.model), getattr(self.model, "active_adapter", None)
        config = self.model.peft_config[active] if adapter else None
        return ModelFacts(
            base=finetuned_from
            or getattr(config, "base_model_name_or_path", None)
            or getattr(self.model.config, "_name_or_path", None),
            adapter=str(getattr(config.peft_type, "value", config.peft_type)).lower() if config is not None else None,
            chat=self.chat and bool(getattr(self.processing_class, "chat_template", None)),
            vision=is_vision(self.processing_class),
        )

    def _save_last_state(self) -> None:
        """`trainer_state.json` at the end of a run, also of one without checkpoints: its log is the run's curve."""
        try:
            with checkpoint.writing(self.args.output_dir, "trainer_state.json"):
                self.save_state()
        except DiskError as error:
            # The model is trained: it may still be saved elsewhere.
            logger.warning("%s", error)

    def save_state(self) -> None:
        """As in transformers: `trainer_state.json` in the output folder."""
        with self.folder.writing():
            super().save_state()

    def save_metrics(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers: `train_results.json` and the like in the output folder."""
        with self.folder.writing():
            super().save_metrics(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # transformers copies the checkpoint's model into the output folder.
        with self.folder.writing():
            super()._push_from_checkpoint(checkpoint_folder)

    def _as_float32(self, *, loading: bool = False) -> Any:
        """Hold the split weights as float32 inside the block, for saving and loading. With an adapter, whose own
        weights are never split, these are the embeddings and other trained weights (biases)."""
        split, only = self.precision.split, None
        if split is None:
            return nullcontext()
        if is_peft_model(self.model):
            ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
            only = [p for p in split.params if p.requires_grad]
            only += [p for module in ends if module is not None for p in module.parameters()]
        return split.as_float32(only, loading=loading)
