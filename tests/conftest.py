"""Small models and tokenizers, made on the spot: nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rloom.cpu_bfloat16 import make_bfloat16_safe

if "PYTEST_XDIST_WORKER" not in os.environ:  # once: workers, and what tests start, inherit what it sets
    make_bfloat16_safe()

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,>=+"
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)


def make_tokenizer(**changes) -> PreTrainedTokenizerFast:
    """A character tokenizer with distinct pad, bos and eos tokens and a chat template."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    options = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **(options | changes))
    fast.chat_template = CHAT
    return fast


def make_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A llama of a few thousand parameters with weights large enough for a spread-out, peaky distribution."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(LETTERS) + 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(options | changes)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What rloom keeps between commands goes into no home."""
    os.environ["RLOOM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def rows():
    """Prompts of very different lengths, with a column for reward functions."""
    texts = ["ab", "hello there", "1+1=", "a long prompt, much longer than the others.", "x", "sort 3 1 2>"]
    return [{"prompt": text, "target": len(text)} for text in texts]


@pytest.fixture
def config(tmp_path):
    """A function that makes a config for quick runs on the CPU."""
    from rloom import RLOOConfig

    def make(**changes):
        options = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }
        return RLOOConfig(**(options | changes))

    return make


def pytest_addoption(parser):
    parser.addoption("--oracle", type=int, help="tests/parity/test_oracle.py: draw so many runs, in place of CI's 30")


def pytest_generate_tests(metafunc):
    if "oracle_draw" in metafunc.fixturenames:
        from tests.parity.draws import CI

        wanted = metafunc.config.getoption("--oracle")
        metafunc.parametrize("oracle_draw", CI if wanted is None else range(wanted))
