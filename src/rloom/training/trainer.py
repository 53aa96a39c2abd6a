"""RLOOTrainer: a transformers Trainer whose step samples, scores and updates.

`policy.py` loads its model, `assemble.py` builds its parts, `evaluating.py` evaluates, `loop.py` adapts transformers'
loop, and `saving.py` its checkpoints.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from rloom.config import RLOOConfig
from rloom.data.datasets import check_dataset, first_row, image_column, is_chat
from rloom.data.loader import as_is, eval_loader, make_schedule, train_loader
from rloom.data.plan import UpdatePlan
from rloom.data.prompt_checks import prompt_problems
from rloom.errors import NoCompletionError
from rloom.evaluation.opponents import choose_win_rate
from rloom.generation.base import Engine, abilities_of
from rloom.models.load import is_peft_model
from rloom.models.optimizers import warn_of_lost_bits
from rloom.printable import get_logger
from rloom.seeds import derive_seed
from rloom.training import arguments, assemble, launch
from rloom.training.advice import advise
from rloom.training.buffer import RolloutBuffer
from rloom.training.callbacks import Describe, Diagnose, EarlyStop, FitBudget, SampleTable, SyncReference, one_view
from rloom.training.choose_processes import processes_of
from rloom.training.dynamic_sampling import replace_degenerate
from rloom.training.evaluating import EvaluatingTrainer
from rloom.training.finite import FiniteUpdates
from rloom.training.folder import OutputFolder
from rloom.training.interrupts import Interrupts
from rloom.training.policy import check_images, make_policy, prepare_reference
from rloom.training.precision import choose_precision
from rloom.training.report import RunReport
from rloom.training.same_everywhere import check_same_everywhere
from rloom.training.sharding_options import check_layered, generates_by_servers
from rloom.types import MicroBatch, Rollout

logger = get_logger(__name__)


class RLOOTrainer(EvaluatingTrainer):
    """Trains a language model with REINFORCE Leave-One-Out. The constructor is TRL's.

    ```python
    from rloom import RLOOConfig, RLOOTrainer

    def brevity(completions, **kwargs):
        return [-float(len(text)) for text in completions]

    trainer = RLOOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=brevity,
        args=RLOOConfig("short", num_generations=8, per_device_train_batch_size=16),
        train_dataset=[{"prompt": "Why is the sky blue?"}, {"prompt": "What is a prime?"}],
    )
    trainer.train()
    ```

    Args:
        model: a name or path, a `PreTrainedModel`, or a `PeftModel`.
        reward_funcs: one or a list of: functions (sync or async), sequence-classification models or their names,
            objects with `get_rewards(prompts, completions)`, addresses of services, `rloom.term(…)` of any of these.
        args: the options; defaults of [`RLOOConfig`] if not given.
        train_dataset: rows with a `prompt` (text or messages) and, for a vision-language model, its `image` or
            `images`; further columns go to the reward functions. A `datasets.Dataset`, an `IterableDataset` (with
            `max_steps`), or a plain list of dicts.
        eval_dataset: the same, or a dict of several.
        processing_class: the tokenizer, or a vision model's processor; loaded by the model's name if not given.
        reward_processing_classes: tokenizers of reward models, in the order of `reward_funcs`.
        callbacks, optimizers: as in `transformers.Trainer`.
        quantization_config: how to quantize a model that is loaded by name.
        peft_config: an adapter to train instead of the whole model.
        reward_model: older name of `reward_funcs`.
        engine: what generates; chosen by `args.engine` if not given.
        eval_judge: who compares completions with others in evaluation, for a win rate: a pairwise
            `rloom.rewards.judge(…)`, or a function that is given a prompt twice, with our completion and the other, and
            returns the share that each wins. `args.eval_reference_column` or `args.eval_against` names the other.
    """

    _name = "RLOO"

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        reward_model: Any = None,
        engine: Engine | None = None,
        eval_judge: Any = None,
        **unknown: Any,
    ) -> None:
        arguments.refuse_arguments(args, unknown)
        args = args or arguments.default_config(model)
        launch.check_several(args)
        model, reference_path = arguments.choose_model(model, args)
        functions, terms, reward_classes = arguments.choose_rewards(
            reward_funcs, reward_model, reward_processing_classes, args
        )
        self.win_rate = choose_win_rate(args, eval_judge)
        train_dataset, eval_dataset = arguments.check_data(train_dataset, eval_dataset, args)
        # An override may give the functions more than the data set has.
        if type(self)._calculate_rewards is RLOOTrainer._calculate_rewards:
            arguments.check_reward_columns(functions, train_dataset, eval_dataset)
        # All arguments have been checked; models are loaded from here on. The seed is set first, since new adapters
        # have random weights.
        set_seed(args.seed)
        self.chat = is_chat(train_dataset)
        policy = make_policy(model, processing_class, args, quantization_config, peft_config, chat=self.chat)
        check_images(policy, image_column(train_dataset, eval_dataset), args)
        use_cache = getattr(policy.model.config, "use_cache", None)
        super().__init__(
            model=policy.model,
            args=args,
            data_collator=as_is,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=policy.processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if use_cache is not None and not args.use_cache:
            # The Trainer turns the cache off in the saved config too. Here each forward turns it off instead.
            self.model.config.use_cache = use_cache
        launch.check_devices(self)
        self.processes = processes_of(args, self.accelerator)
        check_same_everywhere(self.processes, args, policy, train_dataset, eval_dataset)
        self._keeps_table = self.processes.from_main(bool(args.log_completions or args.num_sample_generations))
        # The reference is a copy of these weights, so they are made equal before it.
        self.processes.share_weights(self.model)
        asked = args.model_init_kwargs if isinstance(model, str) else None
        self.precision = choose_precision(self, loaded_with=asked, own_optimizer=optimizers[0] is not None)
        if optimizers[0] is not None:
            warn_of_lost_bits(self.model)
        self.processes.choose_copy(self.model, args.device, by_servers=generates_by_servers(args))
        check_layered(self)
        copied = prepare_reference(policy, reference_path, args, sharded=self.processes.is_layered)
        self.processes.shard(self.model, with_reference=copied)
        parts = assemble.build(self, policy, functions, terms, reward_classes, reference_path, engine)
        # The checks have run the model.
        self.processes.after_forwards()
        self.report = RunReport(self, own_engine=engine is not None)
        self._keep_parts(parts, args)
        self._publish(policy, functions, parts)
        # Each process draws its own dropout. The engine draws completions from other seeds.
        set_seed(args.seed, device_specific=True)
        self._add_own_callbacks(args)

    def _keep_parts(self, parts: assemble.Parts, args: RLOOConfig) -> None:
        """What the step is made of, and the state of a run."""
        self.rewards, self.collector, self.learner = parts.rewards, parts.collector, parts.learner
        self.assigner, self.credit, self.shaper = parts.assigner, parts.credit, parts.shaper
        self.reference = parts.reference
        self.metrics, self.clock, self.journal = parts.metrics, parts.clock, parts.journal
        self.completion_log, self.store = parts.journal.table, parts.journal.store
        self.finite, self.interrupts = FiniteUpdates(self.metrics), Interrupts(self.processes)
        self.folder = OutputFolder(args.output_dir, main=self.processes.is_main)
        self.schedule = make_schedule(args)
        self.buffer = RolloutBuffer(self._make_rollout, self.schedule.parts * self.schedule.passes)
        self._batches = []

    def _add_own_callbacks(self, args: RLOOConfig) -> None:
        """Add the callbacks that the options ask for."""
        self.add_callback(self.interrupts)
        self.add_callback(Describe(self))
        most = self.schedule.most_together(args.num_generations)
        self.add_callback(FitBudget(self.learner, self.collector.encoder, most))
        if args.sync_ref_model:
            # The config refuses sync_ref_model without a KL.
            assert self.reference is not None
            self.add_callback(SyncReference(self.reference, self.processes))
        one_view(self)
        if args.diagnosis:
            self.add_callback(Diagnose(self.callback_handler.callbacks, self.store, self._prompt_problems))
        if args.early_stop_on:
            self.add_callback(EarlyStop(self.processes, self.report))
        if self.processes.is_main:
            advise(args, adapter=is_peft_model(self.model))
        if args.num_sample_generations:
            self.add_callback(
                SampleTable(self.completion_log, args.num_sample_generations, self.callback_handler.callbacks)
            )

    def _prompt_problems(self) -> list[str]:
        """What is wrong with how prompts are written for the model, seen in the first of them."""
        row = first_row(self.train_dataset)
        return prompt_problems(self.collector.encoder, row) if row is not None else []

    def chosen(self) -> str:
        """One line about what was chosen: the precision, how updates are run, and the engine."""
        engine = abilities_of(self.collector.engine)
        return f"{self.precision.words}; {self.learner.passes.words()}; {engine.words}"

    def _publish(self, policy: Any, functions: list[Any], parts: Any) -> None:
        """Set the attributes of TRL's trainer that scripts read."""
        self.reward_funcs, self.reward_func_names = functions, parts.rewards.names
        self.reward_processing_classes = parts.reward_classes
        self.reward_weights = parts.rewards.weights
        self.ref_model = getattr(parts.reference, "model", None)
        self.eos_token_ids = policy.eos_token_ids
        self.aux_loss_enabled = parts.learner.aux_loss_weight != 0.0
        self._metrics, self._logs = self.metrics.values, self.completion_log.columns
        if hasattr(self.model, "add_model_tags"):
            self.model.add_model_tags(list(self._tag_names))

    # -- the step

    def training_step(
        self, model: nn.Module, inputs: UpdatePlan, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One update: take (or collect) its rollouts, then forward and backward over micro-batches."""
        began = time.perf_counter()
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            # Schedule-free optimizers have a training mode.
            self.optimizer.train()
        shares = self.buffer.take(inputs)
        # The update ends with the optimizer's step, which the loop makes: `_maybe_log_save_evaluate` leaves it.
        self.clock.enter("update")
        # Generation has waited for the device, so reading the last update's flag costs nothing here.
        self.finite.begin(shares, self.state.global_step + 1)
        # An override of `compute_loss` may add a term of its own.
        own = getattr(self.compute_loss, "__func__", None) is not RLOOTrainer.compute_loss
        loss = self.learner.accumulate(
            model, shares, compute_loss=self.compute_loss, backward=self._backward, skip=not own
        )
        self._write_down([self._first_used([share.rollout for share in shares])])
        if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
            clear_device_cache()
        self.metrics.add("train", "step_time", time.perf_counter() - began)
        return loss

    def _make_rollout(self, plan: UpdatePlan, number: int) -> Rollout:
        """Collect a rollout. With `dynamic_sampling`, groups without signal are replaced."""
        self.processes.gather_weights()
        # All processes have the same seed.
        seed = derive_seed(self.args.seed, "train", *plan.key(number), 0)
        rows, places = plan.prompts[number], self.schedule.places()
        # Episodes are counted, not computed from the step, since an epoch's last update may have fewer parts.
        self._episodes += self.args.generation_batch_size
        rollout = self.collector.collect(rows, self.args.num_generations, seed=seed, mode="train", places=places)
        if self.args.dynamic_sampling:
            draw = functools.partial(self._draw_others, seed)
            rollout, replaced = replace_degenerate(rollout, draw, self.args.dynamic_sampling, self.processes)
            self.metrics.add("train", "completions/replaced_groups", float(*self.processes.total(replaced)))
        return rollout

    def _draw_others(self, seed: int, count: int, number: int) -> Rollout:
        """Collect `count` groups of other prompts for this process. Prompts are drawn for all processes together."""
        seed = derive_seed(seed, "others", number)
        counts = self.processes.gather(count)
        before = sum(counts[: self.processes.rank])
        order = torch.randint(len(self.train_dataset), (sum(counts),), generator=torch.Generator().manual_seed(seed))
        places = range(before, before + count)
        try:
            if not places:
                self.collector.idle_along(self.learner.passes.nothing())
                raise NoCompletionError("nothing is to be replaced here")
            rows = [self.train_dataset[index] for index in order[places.start : places.stop].tolist()]
            return self.collector.collect(rows, self.args.num_generations, seed=seed, mode="train", places=places)
        except NoCompletionError:
            self.collector.sit_out()
            raise

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """A micro-batch's share of the update's loss. Override it to add a term of your own. Groups without signal are
        then run too, since your term may have a gradient there."""
        if return_outputs:
            raise ValueError("The RLOOTrainer does not support returning outputs")
        with self.compute_loss_context_manager():
            return self.learner.loss(model, inputs)

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.processes.backward(self.accelerator, self.model_wrapped, loss, last=last)

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[Any],
    ) -> Tensor:
        """Scores (N, F), NaN for None. TRL's hook: override it to score in a way of your own."""
        return self.collector.score_rows(inputs, prompts, completions, completion_ids_list)

    # -- data

    def get_train_dataloader(self) -> DataLoader:
        """A loader whose batches are updates: an update's prompts, and the parts of rollouts that it trains on."""
        return train_loader(self.train_dataset, self.args, self.schedule)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """A loader of batches of prompts. Their completions fill `per_device_eval_batch_size`."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        return self._eval_loader(check_dataset(eval_dataset, "eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`."""
        return self._eval_loader(check_dataset(test_dataset, "test_dataset"))

    def _eval_loader(self, dataset: Any) -> DataLoader:
        return eval_loader(dataset, self.args, in_step=self.processes.is_layered)
