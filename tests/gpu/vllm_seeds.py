"""A program for test_vllm_gpu: equal seeds, equal tokens, and numpy's state is left alone."""

from __future__ import annotations

import numpy as np

from rloom.generation.vllm import VllmEngine, VllmOptions
from tests.conftest import make_model, make_tokenizer
from tests.gpu.test_vllm_gpu import SIZES
from tests.vllm.conftest import in_order, prompts, sampling


def main() -> None:
    model = make_model(**SIZES).cuda()
    options = VllmOptions(compiled=False, gpu_memory_utilization=0.1)
    engine = VllmEngine(lambda: model, sampling(), tokenizer=make_tokenizer(), options=options)
    some = prompts("ab", "ab")
    before = np.random.get_state()[1].tolist()
    first, again, other = (
        [[c.token_ids for c in group] for group in in_order(engine, some, 4, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first[0] != first[1]  # equal prompts have noise of their own
    assert np.random.get_state()[1].tolist() == before


if __name__ == "__main__":
    main()
