"""How completions are sampled, and by which engine."""

from __future__ import annotations

from dataclasses import dataclass

from rloom.config.topic import Topic, option
from rloom.errors import ConfigError, check_choice, in_words
from rloom.sampling_rules import ENGINES, RULES, check_sampling


@dataclass
class SamplingTopic(Topic):
    """Sampling and the engine."""

    temperature: float = option(1.0, "Sampling temperature, above 0; also that of all log-probabilities.")
    top_p: float = option(1.0, "Nucleus sampling: keep the smallest set of tokens with this probability.")
    top_k: int = option(0, "Keep the k likeliest tokens; 0: all.")
    min_p: float | None = option(None, "Keep tokens at least this likely, relative to the likeliest.")
    generation_kwargs: dict | str | None = option(None, "Further options of the generation engine.")
    chat_template_kwargs: dict | str | None = option(None, "Further arguments of the chat template.")
    repetition_penalty: float = option(1.0, "Above 1: discourage tokens that have appeared already.")
    cache_implementation: str | None = option(None, "The cache that `model.generate` uses.")
    engine: str | None = option(
        None,
        f"What generates: {in_words(f'{name} ({engine.note})' for name, engine in ENGINES.items())}. Unset: the first "
        "of the first three that proves right on the model.",
    )
    compile_generation: bool | None = option(
        None,
        "Compile the native engine's decode step with torch.compile, which takes about 20 seconds at the start; "
        "unset: no. Compile vLLM's model; unset: on a GPU.",
    )
    merge_generation: bool | None = option(
        None,
        "Let the native engine draw from copies of the weights into which a LoRA adapter is merged: faster, in more "
        "memory, and in half precision with what the adapter adds rounded. Unset: in float32, where there is room.",
    )

    def check_sampling(self) -> None:
        """What can be sampled with need not teach anything: a temperature of 0 is for evaluation alone."""
        check_sampling({name: getattr(self, name) for name in RULES})
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature must be above 0, not {self.temperature}: at 0 all completions of a prompt are the same "
                "and there is nothing to compare"
            )

    def resolve_engine(self) -> None:
        """`engine` from what TRL calls `use_vllm`, and options that only some engine reads."""
        if self.engine is not None:
            check_choice("engine", self.engine, ENGINES)
        self.resolve_vllm()
        if self.use_vllm:
            self.engine = "vllm"
        if self.merge_generation and self.engine not in (None, "native"):
            raise ConfigError(f"`merge_generation` has no effect with engine={self.engine!r}: leave one of them out")


@dataclass
class ContinuousBatchingTopic(Topic):
    """transformers' continuous batching, which rloom does not use."""

    use_transformers_continuous_batching: bool = option(False, "Generate with transformers' own engine.")
    transformers_continuous_batching_config: dict | str | None = option(None, "Options of that engine.")
    use_transformers_paged: bool = option(False, "Older name of `use_transformers_continuous_batching`.")

    def check_continuous_batching(self) -> None:
        """Refused: whoever asks for it is told what does the same here."""
        if self.use_transformers_continuous_batching or self.use_transformers_paged:
            raise ConfigError(
                "use_transformers_continuous_batching=True: rloom's own engine batches continuously; leave it False "
                "and set engine='native'"
            )
