"""What is said about a run at its start and at its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from rloom.generation.base import abilities_of
from rloom.models.load import base_of
from rloom.observe.numbers import GIB, RunNumbers, as_shares, counted, duration, in_shares, which_ends
from rloom.observe.view import Rows
from rloom.version import __version__


class RunReport:
    """Says what a trainer will do, and what it has done."""

    def __init__(self, trainer: Any, *, own_engine: bool) -> None:
        self.trainer, self.own_engine = trainer, own_engine
        # The command that comes after training, where the caller knows one.
        self.next_command: str | None = None
        # The checkpoint that the run goes on from.
        self.resumed_from: str | None = None
        # The diagnosis that has ended the run.
        self.stopped_because: str | None = None

    # -- the start

    def start(self) -> Rows:
        """What will happen."""
        args = self.trainer.args
        target = "" if args.kl_target is None else f" (adapted to a KL of {args.kl_target:g} per token)"
        options = f"objective={args.objective}, beta={args.beta:g}{target}, learning_rate={args.learning_rate:g}"
        return [
            ("rloom", f"RLOO by version {__version__} with {options}"),
            ("model", self._model()),
            ("dtype", self.trainer.precision.words),
            ("engine", self._engine()),
            ("training", self.trainer.learner.passes.words()),
            ("update", self._update()),
            ("run", self._run()),
            ("device", self._device()),
            ("rewards", self._rewards()),
            ("files", self._files()),
            ("begins", self._begins()),
        ]

    def _model(self) -> str:
        trained, whole = parameters_of(self.trainer.model)
        base = base_of(self.trainer.model)
        # Of sharded weights the class has another name, and the model's own as a base.
        own = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
        name = getattr(base.config, "_name_or_path", "") or own.__name__
        share = "all trained" if trained == whole else f"{trained:,} trained ({trained / max(whole, 1):.2%})"
        return f"{name}, {whole:,} parameters, {share}"

    def _engine(self) -> str:
        engine, asked = self.trainer.collector.engine, self.trainer.args.engine
        why = "your own" if self.own_engine else "as asked for" if asked else "the first that fits the model"
        words = abilities_of(engine).words.removeprefix("generation ")
        return f"{words} ({why})"

    def _update(self) -> str:
        trainer, args = self.trainer, self.trainer.args
        k, rollout, update = args.num_generations, args.generation_batch_size, trainer.get_total_train_batch_size(args)
        words = (
            f"{rollout // k:,} prompts × {k} completions = {rollout:,}, of up to {args.max_completion_length:,} tokens"
        )
        if rollout == update and args.num_iterations == 1:
            return words
        times = "" if args.num_iterations == 1 else f", each {args.num_iterations} times"
        return f"{update:,} completions of a rollout of {words}{times}"

    def _run(self) -> str:
        state, loader = self.trainer.state, self.trainer.callback_handler.train_dataloader
        words = counted(state.max_steps, "update")
        try:
            per_epoch = len(loader)
        except TypeError:
            return f"{words}, on a stream"
        return f"{words}, {per_epoch:,} per epoch: {counted(state.max_steps / max(per_epoch, 1), 'epoch')}"

    def _device(self) -> str:
        args, processes = self.trainer.args, self.trainer.processes
        several = f"{processes.count} process{'es' if processes.count > 1 else ''}{processes.how}, this one on "
        words = several if processes.count > 1 or processes.how else ""
        if args.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(args.device)
            used = f"{(whole - free) / GIB:.1f} of {whole / GIB:.0f} GiB in use"
            return f"{words}{torch.cuda.get_device_name(args.device)}, {used}"
        memory = psutil.virtual_memory()
        used = f"{(memory.total - memory.available) / GIB:.1f} of {memory.total / GIB:.0f} GiB in use"
        threads = torch.get_num_threads()
        return f"{words}{args.device.type}, {counted(threads, 'thread')}, {used}"

    def _rewards(self) -> str:
        rewards = self.trainer.rewards
        pairs = zip(rewards.names, rewards.weights.tolist(), strict=True)
        return ", ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in pairs)

    def _files(self) -> str:
        args = self.trainer.args
        kept = f", the last {args.save_total_limit} are kept" if args.save_total_limit else ""
        saving = {
            "no": "no checkpoints",
            "steps": f"checkpoints every {args.save_steps:g} updates{kept}",
            "epoch": f"a checkpoint per epoch{kept}",
        }.get(str(getattr(args.save_strategy, "value", args.save_strategy)), "the best checkpoint")
        trackers = [f"logs to {', '.join(args.report_to)}"] if args.report_to else []
        return "; ".join([args.output_dir, saving, "rollouts in _rollouts", *trackers])

    def _begins(self) -> str:
        step = self.trainer.state.global_step
        if step or self.resumed_from:
            return f"after update {step}, from {self.resumed_from}"
        return "at the first update, with the model's own weights; nothing is resumed"

    # -- the end

    def end(self, numbers: RunNumbers) -> Rows:
        """What has happened."""
        state = self.trainer.state
        why = f": {self.stopped_because}" if self.stopped_because else ""
        rows = [("rloom", "trained" if state.global_step >= state.max_steps else
                 f"stopped after update {state.global_step} of {state.max_steps}{why}")]  # fmt: skip
        if (ends := numbers.ends()) is not None:
            first, last, size = ends
            rows.append(("reward", f"{first:.3f} → {last:.3f} ({which_ends(size)})"))
        rows += [("evaluation", words) for words in self._evaluations(numbers)]
        rows += [("time", self._time(numbers)), ("files", self._written())]
        if self.stopped_because:
            rows.append(("weights", self._before_the_stop()))
        if state.global_step >= state.max_steps:
            rows.append(("next", self._next()))
        return rows

    def _before_the_stop(self) -> str:
        """What an early stop leaves: a policy that something is wrong with, and perhaps an earlier one."""
        state, output = self.trainer.state, Path(self.trainer.args.output_dir)
        steps = [int(path.name.split("-")[1]) for path in output.glob("checkpoint-[0-9]*")]
        earlier = max((step for step in steps if step < state.global_step), default=None)
        words = f"those of update {state.global_step}, as the diagnosis found them"
        if earlier is None:
            return f"{words}; there is no earlier checkpoint (save_steps)"
        return f"{words}; earlier ones are in {output / f'checkpoint-{earlier}'}"

    def _evaluations(self, numbers: RunNumbers) -> list[str]:
        found = []
        for prefix, values in numbers.evaluations.items():
            name = "" if prefix == "eval" else f"{prefix.removeprefix('eval_')}: "
            (before, first), (after, last) = values[0], values[-1]
            if before == after:
                hint = "" if before == 0 else "; eval_on_start=True evaluates before the first, too"
                found.append(f"{name}reward {last:.3f} after update {after}{hint}")
            else:
                found.append(f"{name}reward {first:.3f} → {last:.3f} (after updates {before} and {after})")
        return found

    def _time(self, numbers: RunNumbers) -> str:
        seconds, tokens = numbers.elapsed(), self.trainer.state.num_input_tokens_seen - numbers.tokens_before
        totals = {**self.trainer.clock.totals}
        totals["other"] = max(0.0, seconds - sum(totals.values()))
        speed = f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} per second"
        return f"{duration(seconds)}: {in_shares(as_shares(totals))}; {speed}"

    def _written(self) -> str:
        folder = Path(self.trainer.args.output_dir)
        names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")]
        found = [int(name[1]) for name in names if name]
        newest = [f"checkpoint-{max(found)}"] if found else []
        return f"{folder}: {', '.join([*newest, '_rollouts (what was written and scored)'])}"

    def _next(self) -> str:
        if self.next_command is not None:
            return self.next_command
        folder = self.trainer.args.output_dir
        return f"trainer.save_model(), then: rloom eval --model {folder} --data FILE --reward NAME"


def parameters_of(model: Any) -> tuple[int, int]:
    """How many weights are trained, and how many there are. Shards and packed 4-bit weights are counted as a whole."""
    if hasattr(model, "get_nb_trainable_parameters"):
        trained, whole = model.get_nb_trainable_parameters()
        return int(trained), int(whole)
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(count for count, learns in counts if learns), sum(count for count, _ in counts)
