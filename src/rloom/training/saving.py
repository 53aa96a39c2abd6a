"""A transformers Trainer whose checkpoints hold the whole state of a run.

A run that was killed and resumed ends with the same bits as one that was not. `checkpoint.py` defines the files of a
checkpoint, `identity.py` which run it belongs to, `folder.py` guards the output folder, and `model_files.py` writes
what else goes there.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from rloom.errors import ConfigError, DiskError, DivergedError
from rloom.models.load import base_of
from rloom.models.reference import Reference
from rloom.observe.clock import PhaseClock
from rloom.observe.completions import CompletionLog
from rloom.observe.metrics import Metrics
from rloom.observe.store import RunStore
from rloom.printable import get_logger
from rloom.training import checkpoint, sharded_checkpoint, weights, zero_checkpoint
from rloom.training.buffer import RolloutBuffer
from rloom.training.credit import Credit, Shaper
from rloom.training.finite import FiniteUpdates, check_finite
from rloom.training.identity import check_same_run, facts_of
from rloom.training.identity import write as write_facts
from rloom.training.interrupts import Interrupts
from rloom.training.learner import Learner
from rloom.training.model_files import OutputTrainer
from rloom.training.processes import Processes
from rloom.training.report import RunReport

logger = get_logger(__name__)


class LoopState:
    """The loop's state that transformers does not save: its running loss, and our counts."""

    def __init__(self, loop: CheckpointedTrainer) -> None:
        self.loop = loop

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers."""
        loop = self.loop
        return {
            "loss": [float(loop._tr_loss), loop._total_loss_scalar],
            # Trainers before transformers 5.19 have no `_initial_global_step`; they count all steps.
            "steps": [loop._globalstep_last_logged, getattr(loop, "_initial_global_step", 0)],
            "episodes": loop._episodes,
            "elapsed": loop._elapsed + time.time() - loop._train_began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts. The running loss follows with the first epoch: the Trainer zeroes it before."""
        self.loop._episodes, self.loop._elapsed = state["episodes"], state["elapsed"]
        self.loop._resumed = state


class CheckpointedTrainer(OutputTrainer):
    """Saves, finds and loads checkpoints.

    The parts below are set by the constructor of [`RLOOTrainer`].
    """

    is_deepspeed_enabled: bool
    processes: Processes
    buffer: RolloutBuffer
    learner: Learner
    credit: Credit
    shaper: Shaper
    metrics: Metrics
    clock: PhaseClock
    completion_log: CompletionLog
    store: RunStore
    finite: FiniteUpdates
    interrupts: Interrupts
    report: RunReport
    reference: Reference | None
    _resumed: dict[str, Any] | None = None  # the loop's state from a checkpoint, until the first epoch begins
    _facts: dict[str, Any] | None = None  # what identifies this run, from the start of its training
    _in_parts: Path | None = None  # the checkpoint that all processes are writing their parts of
    _using_rewards = 0  # how many of train, evaluate and predict are running
    _episodes = 0  # completions asked for so far, over all processes
    _elapsed = 0.0  # seconds of training before this call, when resumed
    _train_began = 0.0

    # -- where a run begins

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train. `resume_from_checkpoint=True` resumes from the newest checkpoint that is whole. `"auto"` does too, and
        starts anew where there is none, so that one script serves the first run and every restart. A checkpoint of
        another run is refused. Files of another run in the output folder are moved to `_previous` in it."""
        with self._folder_held():
            folder = self._where_it_begins(resume_from_checkpoint)
            self.report.resumed_from = folder if isinstance(folder, str) else None
            with self._rewards_open(), self.interrupts.listening():
                result = super().train(folder, *args, **kwargs)
            self._save_last_state()
        self.interrupts.leave(self.args.output_dir, self.state.global_step)
        return result

    @contextmanager
    def _folder_held(self) -> Iterator[None]:
        """The main process locks the output folder for all. If it cannot, all processes raise its error."""
        with ExitStack() as held:
            self._on_main(lambda: held.enter_context(self.folder.hold()))
            yield

    def _on_main(self, do: Callable[[], Any]) -> Any:
        """Run a function in the main process. All processes return its result, or raise its error."""
        found, wrong = None, None
        if self.processes.is_main:
            try:
                found = do()
            except (ValueError, OSError) as error:
                wrong = error
        found, wrong = self.processes.from_main((found, wrong))
        if wrong is not None:
            raise wrong
        return found

    def _where_it_begins(self, asked: Any) -> Any:
        """The checkpoint to resume from, if any. The output folder is prepared for the run."""
        if isinstance(asked, os.PathLike):
            asked = os.fspath(asked)
        self._facts = facts = facts_of(self)
        return self._on_main(lambda: self._made_ready(asked, facts))

    def _made_ready(self, asked: Any, facts: dict[str, Any]) -> Any:
        """In the main process: choose and check the checkpoint, and prepare the output folder."""
        folder = self._newest_checkpoint(must_be=asked is True) if asked is True or asked == "auto" else asked
        if not isinstance(folder, str):
            self._begin_here(delete=self.args.overwrite_output_dir and asked != "auto")
            return folder
        self._check_checkpoint(Path(folder))
        changed = check_same_run(folder, facts, anyway=self.args.resume_changed_run)
        step = checkpoint.step_of(Path(folder))
        # An unfinished checkpoint, which has none, has been refused.
        assert step is not None
        if Path(folder).resolve().parent != Path(self.args.output_dir).resolve():
            self._begin_here(folder, delete=self.args.overwrite_output_dir)
        else:
            self.folder.go_on(after=step)
            self.store.resume(step)
        words = f"; other options than before: {changed}" if changed else ""
        print(f"rloom: going on from {folder}, after update {step}{words}", file=sys.stderr, flush=True)
        return folder

    def _begin_here(self, checkpoint: str | None = None, *, delete: bool = False) -> None:
        """Begin a new run in the output folder. Files of an earlier run are moved, except those that this run needs."""
        args, own = self.args, [self.store.folder] if self.store.is_own else []
        named = [
            getattr(base_of(self.model).config, "_name_or_path", None),
            args.sft_model_path,
            args.reward_model_path,
            checkpoint,
        ]
        self.folder.begin(keep=[*own, *filter(None, named)], delete=delete)
        self.store.begin()

    def _check_checkpoint(self, folder: Path) -> None:
        """Refuse a checkpoint that is not there, is damaged or was written by DeepSpeed for other processes."""
        checkpoint.check_named(folder, self.args.output_dir)
        count = self.processes.count if self.processes.external_optimizer else 0
        zero_checkpoint.check_files(folder, count=count, by_deepspeed=self.processes.own_files)

    def _newest_checkpoint(self, *, must_be: bool) -> str | bool:
        """The path of the newest checkpoint that is whole; False where there is none."""
        found = checkpoint.newest_whole(self.args.output_dir)
        if found is None and must_be:
            raise ConfigError(
                f"No valid checkpoint found in output directory ({self.args.output_dir}): nothing to resume. "
                'On a first run leave it out, or pass resume_from_checkpoint="auto"'
            )
        return False if found is None else str(found)

    @contextmanager
    def _rewards_open(self) -> Iterator[None]:
        """Close the rewards' processes and threads when the outermost of these blocks ends, also with an error."""
        self._using_rewards += 1
        try:
            yield
        finally:
            self._using_rewards -= 1
            if not self._using_rewards:
                self.rewards.close()

    # -- saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self.finite.settle(self.state.global_step)
        self._check_finite(folder.name)
        name, there = self.args.hub_model_id or Path(self.args.output_dir).name, folder.exists()
        try:
            with self.clock.measuring("saving"), checkpoint.writing(folder.parent, folder.name):
                self.create_model_card(model_name=name.split("/")[-1])
                if not self.args.save_only_model:
                    self._save_own(folder)
                self.processes.check_same_weights(self.model)
                self._in_parts = folder if self.processes.saves_parts else None
                super()._save_checkpoint(model, trial)
                # No process may look for the checkpoint before it is complete.
                self.processes.wait()
                if self.processes.is_main and folder.exists() and not self.args.save_only_model:
                    checkpoint.seal(folder)
        except DiskError as error:
            if not there:
                # Half a checkpoint only takes up space.
                shutil.rmtree(folder, ignore_errors=True)
            whole = checkpoint.newest_whole(folder.parent)
            last = f"The newest that is whole is {whole}" if whole else "There is no other"
            raise DiskError(f'{error}. {last}. Make room, and go on with resume_from_checkpoint="auto"') from error
        finally:
            self._in_parts = None

    def _check_finite(self, where: str) -> None:
        """Refuse to save weights that are not finite, in all processes if one of them holds such a part."""
        wrong = None
        try:
            check_finite(((name, self.processes.own_part(p)) for name, p in self.model.named_parameters()), where)
        except DivergedError as error:
            wrong = error
        for found in self.processes.gather(wrong):
            if found is not None:
                raise found

    def _save_own(self, folder: Path) -> None:
        """Write rloom's part of a checkpoint."""
        moved = self.reference.state_dict() if self.reference and self.args.sync_ref_model else None
        state = checkpoint.state_of(self._components(), self._plan())
        checkpoint.save(folder, state, moved, rank=self.processes.rank)
        if self.processes.is_main:
            write_facts(folder, self._facts or facts_of(self))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a whole, from the main process. Call it in all processes: sharded weights are gathered."""
        if output_dir is not None and Path(output_dir) == self._in_parts:
            self.processes.save_weights(self._in_parts)
            with sharded_checkpoint.without_weights(self.model):
                super().save_model(output_dir, _internal_call)
            return
        with self._without_deepspeed(), self.processes.whole_weights(self.model):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if Path(output_dir) == self._in_parts:
            self.processes.save_optimizer(Path(output_dir), self.optimizer.optimizer)
            if self.processes.is_main:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
            return
        if self.processes.own_files:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        with self.processes.whole_optimizer(self.optimizer):
            if not self.processes.external_optimizer:
                super()._save_optimizer_and_scheduler(output_dir)
            elif self.processes.is_main:
                torch.save(self.optimizer.state_dict(), Path(output_dir) / OPTIMIZER_NAME)
                schedule = self.processes.schedule(self.lr_scheduler.state_dict())
                torch.save(schedule, Path(output_dir) / SCHEDULER_NAME)

    @contextmanager
    def _without_deepspeed(self) -> Iterator[None]:
        """Inside the block the Trainer saves and loads as without DeepSpeed, which would do it in parts."""
        told, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
        try:
            yield
        finally:
            self.is_deepspeed_enabled = told

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The file that marks a checkpoint as finished comes next. All processes must have written theirs.
        self.processes.wait()

    def _components(self) -> dict[str, checkpoint.Component]:
        """The parts of the run that the next update depends on and transformers does not save."""
        return {
            "buffer": self.buffer,
            "metrics": self.metrics,
            "table": self.completion_log,
            "shaper": self.shaper,
            "credit": self.credit,
            "budget": self.learner.budget,
            "loop": LoopState(self),
        }

    def _plan(self) -> dict[str, int]:
        """The numbers that decide which prompts a rollout holds and which updates use it."""
        plan = dataclasses.asdict(self.schedule)
        return {**plan, "num_generations": self.args.num_generations, "seed": self.args.seed}

    # -- loading

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Load a whole checkpoint after DeepSpeed has taken the model. The Trainer knows its own files alone."""
        folder, take = resume_from_checkpoint, super()._prepare_for_training
        if folder is None or not self.processes.external_optimizer or zero_checkpoint.processes_in(folder):
            return take(max_steps, train_dataloader, folder)
        prepared = take(max_steps, train_dataloader, None)
        self._load_from_checkpoint(folder, self.model)
        self._load_optimizer_and_scheduler(folder)
        self._load_scaler(folder)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        target = self.model if model is None else model
        if self._load_parts(Path(resume_from_checkpoint), target):
            return
        with self._as_float32(loading=True), self.processes.whole_weights(target, loading=True):
            if weights.are_renamed(resume_from_checkpoint, target):
                weights.load_renamed(resume_from_checkpoint, target)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_parts(self, folder: Path, target: nn.Module) -> bool:
        """Load weights that were saved in parts. Returns False where they were not."""
        if not sharded_checkpoint.is_in_parts(folder):
            return False
        if self.processes.is_sharded:
            self.processes.load_weights(folder)
        else:
            with self._as_float32(loading=True), self.processes.whole_weights(target, loading=True):
                target.load_state_dict(sharded_checkpoint.read_weights(folder), strict=False)
        return True

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._load_parts(Path(best), self.model):
            return
        with self._as_float32(loading=True), self.processes.whole_weights(self.model, loading=True):
            if weights.are_renamed(best, self.model):
                weights.load_renamed(best, self.model)
            else:
                with self._without_deepspeed():
                    super()._load_best_model()

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is not None and sharded_checkpoint.is_in_parts(folder):
            self._load_optimizer_in_parts(Path(folder))
        elif folder is not None and self._takes_whole_optimizer(folder):
            self._load_whole_optimizer(Path(folder))
        else:
            super()._load_optimizer_and_scheduler(folder)
        if folder is None:
            return
        state, reference = checkpoint.load(folder, rank=self.processes.rank)
        self._note_other_processes(state)
        # If one process has to sample its part of a rollout anew, all processes do.
        all_have_theirs = not self.processes.any(state is None or state["plan"] != self._plan())
        if reference is not None and self.reference is not None:
            self.reference.load_state_dict(reference)
        if state is None:
            logger.warning("%s has no rloom_state.pt: rollouts in use and running statistics start anew", folder)
            if self.args.sync_ref_model and reference is None:
                logger.warning("the reference, which had moved, starts anew as well")
            return
        components, rollouts = self._components(), state["components"]["buffer"]
        if not all_have_theirs:
            del components["buffer"]
            if rollouts:
                logger.warning(
                    "%d rollouts of the checkpoint are dropped and sampled anew: the options that shape a rollout have "
                    "changed (%s, now %s), or the rloom_state of a process is missing",
                    len(rollouts),
                    state["plan"],
                    self._plan(),
                )
        checkpoint.load_components(components, state)

    def _takes_whole_optimizer(self, folder: str) -> bool:
        """Whether the optimizer's state is whole in a checkpoint, and this process has to make something else of it."""
        by_deepspeed = self.processes.external_optimizer and not zero_checkpoint.processes_in(folder)
        return self.processes.is_sharded or by_deepspeed

    def _load_whole_optimizer(self, folder: Path) -> None:
        """Read the whole state from the disk as it is needed: transformers would read all of it to each GPU."""
        if not ((folder / OPTIMIZER_NAME).is_file() and (folder / SCHEDULER_NAME).is_file()):
            return
        state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        with self.processes.whole_optimizer(self.optimizer, loading=True):
            self.optimizer.load_state_dict(state)
        self._load_schedule(folder)

    def _load_schedule(self, folder: Path) -> None:
        state = torch.load(folder / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(self.processes.schedule(state, loading=True))

    def _load_optimizer_in_parts(self, folder: Path) -> None:
        """Load an optimizer's state that was saved in parts."""
        if self.processes.is_sharded:
            self.processes.load_optimizer(folder, self.optimizer.optimizer)
        else:
            with self.processes.whole_optimizer(self.optimizer, loading=True):
                self.optimizer.load_state_dict(sharded_checkpoint.read_optimizer(folder))
        self._load_schedule(folder)

    def _note_other_processes(self, state: dict[str, Any] | None) -> None:
        """Warn if the number of processes has changed: rollouts and random states of the checkpoint are dropped."""
        then = 1 if state is None else state["plan"].get("world_size", 1)
        if then != self.processes.count and state is not None and self.processes.is_main:
            logger.warning(
                "the checkpoint is of %d process(es), and this run has %d: it goes on with its weights, optimizer, "
                "schedule and statistics; rollouts in use are sampled anew, and dropout draws other noise",
                then,
                self.processes.count,
            )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Restore the running loss, which the Trainer zeroes when it resumes. A run that was complete stops here; the
        Trainer would make one more update."""
        if self._resumed is not None:
            loss, total = self._resumed["loss"]
            self._tr_loss.fill_(loss)
            self._total_loss_scalar = total
            self._globalstep_last_logged, self._initial_global_step = self._resumed["steps"]
            self._resumed = None
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        return super()._finalize_training(trial, num_train_samples, start_time - self._elapsed)
