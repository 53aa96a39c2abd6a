"""Data loaders of a run: one batch per update in training, lists of rows in evaluation."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from rloom.data import datasets
from rloom.data.loader import Stream, Turns, as_is, dealt_loader, map_style_loader, stream_loader
from rloom.data.plan import PlanSampler, Schedule
from rloom.printable import get_logger

logger = get_logger(__name__)


def schedule(args: Any) -> Schedule:
    """How this run's rollouts are cut into updates."""
    prompts = args.generation_batch_size // args.num_generations // args.world_size
    return Schedule(
        prompts=prompts,
        parts=args.steps_per_generation,
        passes=args.num_iterations,
        parts_per_update=args.gradient_accumulation_steps,
        world_size=args.world_size,
        rank=args.process_index,
    )


def train_loader(dataset: Any, args: Any, plan: Schedule) -> DataLoader:
    """Loader whose batches are updates."""
    if datasets.is_iterable(dataset):
        if args.shuffle_dataset and hasattr(dataset, "shuffle"):
            dataset = dataset.shuffle(seed=args.seed)
        return stream_loader(dataset, plan)
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler = PlanSampler(plan, len(dataset), shuffle=bool(args.shuffle_dataset), seed=seed)
    if sampler.num_left_out and not args.process_index:
        logger.warning(
            "%d of the %d prompts do not fill a rollout and sit out each epoch%s",
            sampler.num_left_out,
            len(dataset),
            " (others each time)" if args.shuffle_dataset else "",
        )
    return map_style_loader(dataset, sampler, **_loader_options(args))


def eval_loader(dataset: Any, args: Any) -> DataLoader:
    """Loader whose batches are lists of rows."""
    prompts = max(1, args.eval_batch_size // (args.num_generations_eval or args.num_generations))
    options = _loader_options(args)
    if args.world_size > 1:  # whole batches are dealt out, so that each is the one that a single process would have
        turns = Turns(prompts, rank=args.process_index, count=args.world_size)
        return dealt_loader(dataset, turns, stream=datasets.is_iterable(dataset), **options)
    if datasets.is_iterable(dataset):
        dataset, options = Stream(dataset), {}
    return DataLoader(dataset, batch_size=prompts, collate_fn=as_is, **options)


def _loader_options(args: Any) -> dict[str, Any]:
    return {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
