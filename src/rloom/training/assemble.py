"""Builds a trainer's parts from its options: rewards, reference, engine and the rest. `policy.py` loads its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from rloom import rewards as ready_made
from rloom.config import RLOOConfig
from rloom.config.topic import parsed
from rloom.data import datasets
from rloom.data.batching import Batcher
from rloom.data.images import IMAGE_COLUMNS, ImageSources
from rloom.data.loader import make_schedule
from rloom.data.model_inputs import placeholder_ids
from rloom.data.prompts import PromptEncoder
from rloom.errors import ConfigError, RewardError
from rloom.generation.base import Engine, Sampling
from rloom.generation.choose import choose_engine
from rloom.generation.images import ImageRouter
from rloom.generation.vllm.options import VllmOptions
from rloom.models import load as loading
from rloom.models.fused import FusedLayers
from rloom.models.model_checks import check_head, proves_packed_images, proves_packing
from rloom.models.reference import (
    AdapterReference,
    Reference,
    make_reference,
)
from rloom.models.triton_support import runs_kernels
from rloom.observe.clock import PhaseClock
from rloom.observe.completions import TABLE_COLUMNS, CompletionLog
from rloom.observe.journal import Journal
from rloom.observe.metrics import Metrics, check_loggable
from rloom.observe.store import RunStore
from rloom.observe.token_values import TokenValues
from rloom.printable import get_logger
from rloom.rewards.base import unique_names
from rloom.rewards.build import build_reward, is_url, load_reward_model, reward_tokenizer
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.compose import Composition, Term
from rloom.training import tuning
from rloom.training.assigner import CreditAssigner
from rloom.training.budget import TokenBudget
from rloom.training.collector import Collector
from rloom.training.credit import Credit, Shaper
from rloom.training.in_step import InStep
from rloom.training.learner import Learner
from rloom.training.passes import Passes
from rloom.training.placement import loads_without_data
from rloom.training.policy import Policy
from rloom.training.same_everywhere import check_same_rewards
from rloom.training.sharding_options import generates_by_servers, others_loaded_whole
from rloom.training.warmup import compile_kernels
from rloom.types import Rollout

logger = get_logger(__name__)

PROMPT_COLUMNS = ("prompt", *IMAGE_COLUMNS)
"""Columns that reward functions see with `remove_unused_columns=True`."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts that a training step uses."""

    rewards: RewardSet
    reward_classes: list[Any]
    reference: Reference | None
    credit: Credit
    shaper: Shaper
    metrics: Metrics
    clock: PhaseClock
    journal: Journal
    collector: Collector
    assigner: CreditAssigner
    learner: Learner


def build(
    trainer: Any,
    policy: Policy,
    functions: list[Any],
    terms: list[Term],
    reward_classes: list[Any],
    reference_path: str | None,
    engine: Engine | None,
) -> Parts:
    """Build everything that the step uses, from the trainer's options and from its model on its device."""
    args = trainer.args
    compile_kernels(trainer.processes.without_gradient(trainer.model), args)
    with others_loaded_whole():
        rewards, classes, composition = _rewards(trainer, functions, terms, reward_classes, args)
        check_same_rewards(trainer.processes, rewards, composition)
        reference = _reference(trainer, policy, reference_path, args) if args.beta != 0.0 else None
    metrics, clock, processes = Metrics(), PhaseClock(), trainer.processes
    journal = Journal(
        CompletionLog(args.generation_batch_size),
        RunStore(args.output_dir, texts=args.store_completions),
        images=policy.vision and args.log_multimodal,
        tokens=_token_values(policy, args),
    )
    credit, shaper = Credit(args, processes), Shaper(args, rewards.weights, composition)
    encoder = _encoder(policy, args)
    if not datasets.is_iterable(trainer.train_dataset):
        encoder.check_early(trainer.train_dataset)
    passes = _passes(trainer, policy, reference, encoder, args)
    assigner = CreditAssigner(args, passes=passes, credit=credit, metrics=metrics, clock=clock, processes=processes)
    learner = Learner(
        args,
        passes=passes,
        assigner=assigner,
        metrics=metrics,
        aux_loss_weight=_aux_loss_weight(trainer.model, args.router_aux_loss_coef),
        processes=processes,
    )
    engine = engine or _engine(trainer, policy, encoder, args)
    if generates_by_servers(args):
        # Servers may name the very weights of an earlier run, while the main process sends them others to prove them.
        processes.wait()
    processes.uses_copy(getattr(engine, "release", None), in_updates=_reference_runs_in_updates(reference, assigner))
    collector = Collector(
        encoder=encoder,
        engine=engine,
        score=lambda *inputs: trainer._calculate_rewards(*inputs),
        state=lambda: trainer.state,
        rewards=rewards,
        shaper=shaper,
        decode=lambda ids: policy.processing_class.batch_decode(ids, skip_special_tokens=True),
        truncation=args.truncation,
        metrics=metrics,
        clock=clock,
        table=journal.table,
        # With dynamic sampling, groups may be replaced. The reference pass for them would be wasted.
        meanwhile=assigner.begin if reference is not None and not args.dynamic_sampling else None,
        processes=processes,
    )
    _hint_dropout(trainer.model, args)
    return Parts(
        rewards=rewards,
        reward_classes=classes,
        reference=reference,
        credit=credit,
        shaper=shaper,
        metrics=metrics,
        clock=clock,
        journal=journal,
        collector=collector,
        assigner=assigner,
        learner=learner,
    )


def _reference_runs_in_updates(reference: Reference | None, assigner: CreditAssigner) -> bool:
    """Whether a reference that is the policy with other adapters is run beside the training forward."""
    return isinstance(reference, AdapterReference) and assigner.estimator.needs_distributions


def _token_values(policy: Policy, args: RLOOConfig) -> TokenValues | None:
    if not args.store_token_values or not args.store_completions:
        return None
    assert args.generation_batch_size is not None
    groups = args.generation_batch_size // args.num_generations
    decode = policy.processing_class.batch_decode
    return TokenValues(
        args.store_token_values,
        args.seed,
        groups,
        lambda ids: decode([[token] for token in ids]),
        make_schedule(args).places(),
    )


def _passes(
    trainer: Any, policy: Policy, reference: Reference | None, encoder: PromptEncoder, args: RLOOConfig
) -> Passes:
    """How models are run on micro-batches. Options of speed and memory that are unset are decided here."""
    model, device = trainer.model, args.device
    trained = args.num_generations * args.max_completion_length
    group = encoder.longest + trained
    in_float32 = trainer.precision.in_float32
    tokens = args.max_tokens_per_micro_batch or tuning.micro_batch_tokens(
        model, device, group=group, checkpointed=args.gradient_checkpointing, in_float32=in_float32
    )
    keep = args.keep_logits
    if keep is None:
        keep = tuning.keeps_logits(model, device, tokens=tokens, trained_share=trained / group, in_float32=in_float32)
    batcher, fused = _batcher(trainer, policy, args)
    return Passes(
        policy=model,
        without_gradient=trainer.processes.without_gradient(model),
        reference=reference,
        batcher=batcher,
        budget=TokenBudget(tokens),
        temperature=args.temperature,
        compiled=bool(args.compile_layers),
        fused=fused,
        keep_logits=keep,
        in_step_with=trainer.processes if trainer.processes.is_layered else None,
    )


def _batcher(trainer: Any, policy: Policy, args: RLOOConfig) -> tuple[Batcher, bool]:
    """The batcher, and whether our kernels run the layers. Rows are packed where the model's attention allows it, and
    padded otherwise."""
    # Of sharded weights the whole copy is tried out, if there is one.
    model, fused = trainer.processes.without_gradient(trainer.model), False

    def proves(layers: FusedLayers | None = None) -> bool:
        # Layer by layer processes run alike, so what one refuses is refused by all.
        return not trainer.processes.any(not proves_packing(model, layers))

    # Which checks are made is the same in all processes too.
    kernels = not trainer.processes.any(not runs_kernels(args.device))
    # The checks run under autocast, as training does.
    with trainer.accelerator.autocast():
        check_head(model)
        if args.packing is not False and not args.compile_layers and kernels:
            fused = proves(FusedLayers([loading.base_of(model)]))
        packed = fused or (args.packing is not False and proves())
    if args.packing and not packed:
        raise ConfigError(
            "packing=True: this model cannot be trained on packed rows (see above); leave `packing` unset"
        )

    def packs_images(rollout: Rollout) -> bool:
        with trainer.accelerator.autocast():
            return proves_packed_images(trainer.model, rollout)

    batcher = Batcher(
        packed=packed,
        pad_token_id=policy.tokenizer.pad_token_id,
        multiple=args.padding_multiple,
        packs_images=packs_images,
    )
    return batcher, fused


def _reward_model(name: str, args: RLOOConfig) -> nn.Module:
    """Load a reward model by name. The error names a ready-made reward function of that name."""
    init_kwargs = parsed(args.model_init_kwargs)
    try:
        return load_reward_model(name, trust_remote_code=args.trust_remote_code, init_kwargs=init_kwargs)
    except OSError as error:
        known = (
            f". The ready-made reward of that name is the function rloom.rewards.{name}"
            if name in ready_made.__all__
            else ""
        )
        raise RewardError(f"the reward model {name!r} cannot be loaded: {error}{known}") from error


def _rewards(
    trainer: Any, functions: list[Any], terms: list[Term], classes: list[Any], args: RLOOConfig
) -> tuple[RewardSet, list[Any], Composition]:
    """Load reward models, and build the set of rewards, their tokenizers and their composition."""
    classes = list(classes)
    revision = parsed(args.model_init_kwargs).get("revision")
    for index, function in enumerate(functions):
        by_name = isinstance(function, str) and not is_url(function)
        if by_name:
            functions[index] = _reward_model(function, args)
        if isinstance(functions[index], nn.Module):
            classes[index] = reward_tokenizer(
                functions[index],
                classes[index],
                revision=revision if by_name else None,
                trust_remote_code=args.trust_remote_code,
            )

    def place(model: nn.Module) -> nn.Module:
        with trainer.precision.for_other_models(trainer.accelerator):
            return trainer.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)

    built = [
        build_reward(function, tokenizer, place=place, template_kwargs=parsed(args.chat_template_kwargs))
        for function, tokenizer in zip(functions, classes, strict=True)
    ]
    composition = Composition(terms, unique_names([reward.name for reward in built]))
    rewards = RewardSet(
        built,
        args.reward_weights or composition.weights,
        when=[one.when for one in terms],
        on_error=args.instead_of_error,
        workers=args.reward_workers,
        time_limit=args.reward_time_limit,
        concurrency=args.reward_concurrency,
        table_columns=TABLE_COLUMNS,
        check_metric=check_loggable,
    )
    return rewards, classes, composition


def _reference(trainer: Any, policy: Policy, path: str | None, args: RLOOConfig) -> Reference:
    """Build the reference on the device, or offloaded: a copy of the policy, or the model at `path`."""
    other = trainer.processes.frozen_policy()
    if path is not None:
        in_parts = trainer.processes.is_layered
        runs = trainer.processes.without_gradient(trainer.model)
        other = loading.load_policy(
            path,
            {"dtype": (trainer.processes.half if in_parts else None) or getattr(runs, "dtype", None)},
            trust_remote_code=args.trust_remote_code,
            without_data=in_parts and loads_without_data(args),
        )
        other = trainer.processes.place_frozen(other, args.device)
    reference = make_reference(
        trainer.processes.without_gradient(trainer.model),
        new_adapter=policy.new_adapter,
        follows=args.sync_ref_model,
        other=other,
        offload=args.offload_reference,
        parts=trainer.processes,
    )
    if other is None and args.sync_ref_model and trainer.precision.split is not None:
        reference.begin_with(trainer.model, trainer.precision.split.low_bits)
    if hasattr(reference, "model"):
        if args.disable_dropout:
            loading.disable_dropout(reference.model)
        # One that is sharded is there already.
        stays = args.offload_reference or isinstance(reference.model, FSDPModule)
        placed = {"device_placement": False} if stays else {}
        reference.model = trainer.accelerator.prepare_model(reference.model, evaluation_mode=True, **placed)
    return reference


def _engine(trainer: Any, policy: Policy, encoder: PromptEncoder, args: RLOOConfig) -> Engine:
    """Choose the engine. For a vision model, transformers generates for prompts with images."""

    def choose(wanted: str | None) -> Engine:
        with trainer.accelerator.autocast():
            return choose_engine(
                lambda: trainer.processes.without_gradient(trainer.model),
                _sampling(policy, args),
                wanted=wanted,
                tokenizer=policy.tokenizer,
                compiled=bool(args.compile_generation),
                merged=args.merge_generation,
                group_size=args.num_generations,
                longest_prompt=encoder.longest,
                pad_to_multiple_of=args.padding_multiple,
                never=placeholder_ids(trainer.model.config) if policy.vision else (),
                vllm=VllmOptions.of(args) if wanted == "vllm" else None,
                in_step=InStep(trainer.model, trainer.processes) if trainer.processes.is_layered else None,
            )

    # Layer by layer one engine generates, which takes no images.
    if args.engine is not None or not policy.vision or trainer.processes.is_layered:
        return choose(args.engine)
    router = ImageRouter(lambda: choose(None), choose("transformers"))
    if datasets.image_column(trainer.train_dataset) is None:
        # The data has no images. Choosing the text engine now reports a wrong choice before training begins.
        _ = router.text
    return cast(Engine, router)


def _sampling(policy: Policy, args: RLOOConfig) -> Sampling:
    """The sampling options of the engine."""
    extra = dict(parsed(args.generation_kwargs))
    if args.cache_implementation is not None:
        extra["cache_implementation"] = args.cache_implementation
    if policy.tokenizer.bos_token_id is not None:
        extra.setdefault("bos_token_id", policy.tokenizer.bos_token_id)
    return Sampling(
        max_completion_length=args.max_completion_length,
        eos_token_ids=tuple(policy.eos_token_ids),
        pad_token_id=policy.tokenizer.pad_token_id,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        extra=extra,
    )


def _encoder(policy: Policy, args: RLOOConfig) -> PromptEncoder:
    """The encoder of prompts, with the context length of the model or of the options."""
    limit = args.max_seq_length or loading.max_seq_length(policy.model)
    own = loading.context_length(policy.model)
    return PromptEncoder(
        policy.processing_class,
        template_kwargs=parsed(args.chat_template_kwargs),
        context_length=min(filter(None, (limit, own)), default=None),
        max_completion_length=args.max_completion_length,
        hard_limit=limit is not None or loading.has_position_table(policy.model),
        columns=PROMPT_COLUMNS if args.remove_unused_columns else None,
        images=ImageSources(args.fetch_images, args.image_folder),
    )


def _aux_loss_weight(model: Any, wanted: float | None) -> float:
    """The weight of a mixture of experts' load-balancing loss; 0 for other models."""
    config = model.config.get_text_config()
    is_moe = hasattr(config, "output_router_logits")
    if wanted and not is_moe:
        raise ConfigError(
            f"router_aux_loss_coef={wanted}: {type(model).__name__} is not a mixture of experts that returns its "
            "router logits; leave the option unset"
        )
    if not is_moe:
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) if wanted is None else wanted)


def _hint_dropout(model: nn.Module, args: RLOOConfig) -> None:
    """Warn about dropout where a rollout is used for several updates."""
    several = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
    if several and not args.disable_dropout and loading.has_dropout(model):
        logger.warning(
            "the model has dropout: with several updates per rollout its noise enters the ratio to the old policy and "
            "gets clipped; disable_dropout=True is the better choice"
        )
