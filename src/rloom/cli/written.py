"""What a model wrote on some rows, and what rewards say to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rloom.data.images import ImageSources, folder_of
from rloom.errors import DataError
from rloom.evaluation.writer import Writer
from rloom.models import load as loading
from rloom.rewards.base import RewardBatch
from rloom.rewards.build import build_reward, load_reward_model, reward_tokenizer
from rloom.rewards.build import check_rewards as check_kinds
from rloom.rewards.calling.reward_set import RewardSet
from rloom.training.rollouts import column_names


@dataclass(slots=True, kw_only=True)
class WrittenGroup:
    """A prompt's completions; `replies` as rewards see them."""

    prompt: Any
    prompt_ids: list[int]
    texts: list[str]
    replies: list[Any]
    token_ids: list[list[int]]
    truncated: list[bool]

    @property
    def lengths(self) -> list[int]:
        """In tokens."""
        return [len(ids) for ids in self.token_ids]


@dataclass(slots=True, kw_only=True)
class Written:
    """All groups, in the order of the rows, and the model that wrote them."""

    model: Any
    groups: list[WrittenGroup] = field(default_factory=list)


def write(options: Any, name: str, rows: list[dict[str, Any]], count: int | None = None) -> Written:
    """Completions of each row's prompt by a model."""
    chat = not isinstance(rows[0]["prompt"], str)
    writer = Writer(
        name,
        max_completion_length=options.max_completion_length,
        chat=chat,
        engine=options.engine,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        images=ImageSources(options.fetch_images, options.image_folder or folder_of(options.dataset_name)),
        temperature=options.temperature,
        top_p=options.top_p,
    )
    found: dict[int, WrittenGroup] = {}
    for index, group in writer.write(rows, count or options.num_generations, seed=options.seed):
        completions = group.completions
        texts = [c.text for c in completions]
        found[index] = WrittenGroup(
            prompt=group.prompt.content,
            prompt_ids=group.prompt.token_ids,
            texts=texts,
            replies=[[{"role": "assistant", "content": text}] if chat else text for text in texts],
            token_ids=[c.token_ids for c in completions],
            truncated=[c.truncated for c in completions],
        )
    if len(found) != len(rows):
        raise DataError(f"{name} completed {len(found)} of {len(rows)} prompts")
    return Written(model=writer.model, groups=[found[index] for index in range(len(rows))])


def score(functions: list[Any], rows: list[dict[str, Any]], written: Written) -> dict[str, list[list[float]]]:
    """Scores by reward's name, per group; NaN where a reward did not apply or failed."""
    check_kinds(functions, None)
    device = next(written.model.parameters()).device
    rewards = RewardSet([_built(function, device) for function in functions], None, on_error="none")
    flat = [(row, group, i) for row, group in zip(rows, written.groups, strict=True) for i in range(len(group.texts))]
    batch = RewardBatch(
        prompts=[group.prompt for _, group, _ in flat],
        completions=[group.replies[i] for _, group, i in flat],
        completion_ids=[group.token_ids[i] for _, group, i in flat],
        columns={name: [row.get(name) for row, _, _ in flat] for name in column_names(rows)},
    )
    try:
        scores = rewards.score(batch).scores
    finally:
        rewards.close()
    sizes = [len(group.texts) for group in written.groups]
    return {name: [part.tolist() for part in scores[:, index].split(sizes)] for index, name in enumerate(rewards.names)}


def _built(function: Any, device: Any) -> Any:
    tokenizer = None
    if isinstance(function, str) and not function.startswith(("http://", "https://")):
        function = load_reward_model(function, trust_remote_code=False, init_kwargs=None)
    if hasattr(function, "config"):
        tokenizer = reward_tokenizer(function, None, revision=None, trust_remote_code=False)
    return build_reward(function, tokenizer, place=lambda model: model.to(device), template_kwargs={})


def load_reference(options: Any, model: Any) -> Any:
    """The model to measure the KL from, beside the one that was measured."""
    reference = loading.load_for_inference(options.reference_model, dtype=model.dtype,
                                           trust_remote_code=options.trust_remote_code)  # fmt: skip
    return reference.to(next(model.parameters()).device)
