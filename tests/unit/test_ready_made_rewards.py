"""The rewards that come with rloom, against values worked out by hand, and against TRL's where TRL has them."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
import trl.rewards
from transformers import BertConfig, BertModel

import rloom.rewards
from rloom.errors import ConfigError, MissingExtraError, RewardError
from rloom.rewards import (
    bleu,
    choice_accuracy,
    format,
    get_repetition_penalty_reward,
    json_schema,
    language,
    length,
    math_accuracy,
    rouge,
    semantic_similarity,
    sentiment,
    think_format_reward,
)
from rloom.rewards.calling.call_options import call_options_of
from tests.conftest import LETTERS, make_tokenizer


def chat(text):
    return [{"role": "assistant", "content": text}]


# -- TRL's, by the same names


def test_every_name_of_trl_is_here():
    theirs = [name for names in trl.rewards._import_structure.values() for name in names]
    assert len(theirs) >= 6
    assert [name for name in theirs if not hasattr(rloom.rewards, name)] == []


TEXTS = [
    r"My answer is \boxed{\frac{1}{3}}",
    r"<think> \boxed{\frac{1}{3}}</think> It is \boxed{0.5}.",
    r"<think>x</think> \boxed{\frac{1}{3}}",
    "<think>\nfirst\n</think>\nthen",
    "<think>a<think>b</think>",
    "before <think>a</think>",
    "1/3",
    "",
]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"])
def test_functions_agree_with_trl(name):
    ours, theirs = getattr(rloom.rewards, name), getattr(trl.rewards, name)
    for solution in (r"\frac{1}{3}", "0.5", "no number at all"):
        arguments = {"completions": [chat(t) for t in TEXTS], "solution": [solution] * len(TEXTS)}
        seen, expected = {}, {}
        assert ours(**arguments, log_extra=seen.__setitem__) == theirs(**arguments, log_extra=expected.__setitem__)
        if name == "accuracy_reward":
            assert seen == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("get_soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 4}),
        ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -0.5}),
        ("get_repetition_penalty_reward", {}),
        ("get_cosine_scaled_reward", {"max_len": 8}),
    ],
)
def test_factories_agree_with_trl(name, options):
    ours, theirs = getattr(rloom.rewards, name)(**options), getattr(trl.rewards, name)(**options)
    ids = [[1] * n for n in range(14)] + [[1, 2, 3, 1, 2, 3], [1, 2, 3, 4]]
    texts = [chat(r"\boxed{2}" if len(i) % 2 else r"\boxed{3}") for i in ids]
    arguments = {"completions": texts, "completion_ids": ids, "solution": ["2"] * len(ids)}
    assert ours(**arguments) == pytest.approx(theirs(**arguments))
    assert ours.__name__ == theirs.__name__


def test_a_penalty_that_rewards_is_refused():
    with pytest.raises(ValueError, match="should not be positive"):
        get_repetition_penalty_reward(max_penalty=1.0)


# -- right answers


@pytest.mark.parametrize(
    ("text", "solution", "score"),
    [
        (r"Thus \boxed{18}.", "She makes 9 * 2 = $<<9*2=18>>18 #### 18", 1.0),
        ("The answer is 18.", "18", 1.0),
        (r"first \boxed{18}, no, \boxed{19}", "18", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        ("no idea", "18", 0.0),
        ("", "18", 0.0),
        ("18", None, None),
        ("18", "nothing that can be parsed", None),
        (r"\boxed{" + "9" * 10**6 + "}", "18", 0.0),
        ("\ud800 18", "18", 1.0),
    ],
)
def test_math_accuracy(text, solution, score):
    assert math_accuracy([text], solution=[solution]) == [score]
    assert math_accuracy([chat(text)], answer=[solution]) == [score]


def test_math_accuracy_without_solutions():
    with pytest.raises(RewardError, match="'solution' or 'answer'"):
        math_accuracy(["1"])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The answer is (B).", 1.0),
        ("**Answer:** B", 1.0),
        ("b is wrong. Answer: c", 0.0),
        (r"\boxed{\text{B}}", 1.0),
        ("B", 1.0),
        ("(B)", 1.0),
        ("A B C D", 0.0),
        ("A or B", 0.0),
        (r"\boxed{AB}", 0.0),
        ("", 0.0),
    ],
)
def test_choice_accuracy(text, score):
    assert choice_accuracy([text, "x"], answer=["(b)", None]) == [score, None]


# -- form


def test_format():
    assert format(r"a+b")(["aab", chat("ab"), "xab", "ab\n"]) == [1.0, 1.0, 0.0, 0.0]
    assert format(r"a+b", search=True)(["xabx"]) == [1.0]
    with pytest.raises(RewardError, match="no regular expression"):
        format("(")
    assert think_format_reward(["<think>" + "a" * 10**7]) == [0.0]


def test_json_schema():
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    texts = ['{"age": 3}', '```json\n{"age": 3}\n```', '{"age": "3"}', "{", '{"age": NaN}', "[" * 100000, ""]
    assert json_schema(schema)(texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    own = json_schema()
    assert own(['{"age": 3}', "3", "3"], schema=[schema, json.dumps({"type": "integer"}), None]) == [1.0, 1.0, None]
    with pytest.raises(RewardError, match="no JSON schema"):
        json_schema({"type": "nonsense"})
    with pytest.raises(RewardError, match="a column 'schema'"):
        own(["1"])


def test_length():
    assert length(maximum=4, margin=2)(completion_ids=[[], [1] * 4, [1] * 5, [1] * 9]) == [1.0, 1.0, 0.5, 0.0]
    with pytest.raises(RewardError, match="must hold"):
        length(minimum=3, maximum=2)


# -- text


def test_language():
    english, german = (
        "The weather was fine and they went for a walk.",
        "Das Wetter war schön, und sie gingen spazieren.",
    )
    scores = language("de")([english, german, "12 + 34 = 46", ""])
    assert scores[0] < 0.1 < 0.5 < scores[1]
    assert scores[2:] == [0.0, 0.0]
    assert language()([english, german, german], language=["en", "de", None])[2] is None
    with pytest.raises(ConfigError, match="`language` must be one of"):
        language("xx")


def test_sentiment():
    good, bad, none = sentiment(["I love it, it is great!", chat("I hate it, it is awful."), ""])
    assert bad < -0.5 < none == 0.0 < 0.5 < good


def test_rouge_and_bleu():
    assert rouge("rouge1")(["the cat sat", ""], reference=["the cat", None]) == [pytest.approx(0.8), None]
    assert rouge("rougeL")(["a b c d"], reference=[["x", "a c d"]]) == [pytest.approx(6 / 7)]
    same = "the quick brown fox jumps"
    assert bleu()([same, "nothing of that", same], reference=[same, same, [same, "other"]]) == [
        1.0,
        pytest.approx(0, abs=0.1),
        1.0,
    ]
    with pytest.raises(RewardError, match="needs a column 'reference'"):
        rouge()(["a"])
    with pytest.raises(ConfigError, match="did you mean 'rougeL'"):
        rouge("rougel")


@pytest.fixture
def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(LETTERS) + 4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return BertModel(config).eval()


def test_semantic_similarity(bert, tmp_path):
    tokenizer = make_tokenizer()
    near = semantic_similarity(bert, tokenizer)
    scores = near(["a house.", "hello there", "x"], reference=["a house.", "1+1=", None])
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    assert scores[1] < 0.999
    assert scores[2] is None
    assert near(["\ud800 x"], reference=["x"])[0] is not None
    # padding beside longer texts changes nothing, and the mean is over real tokens
    assert near(["hello there"], reference=["1+1="])[0] == pytest.approx(scores[1], abs=1e-5)
    inputs = tokenizer(["ab", "c"], return_tensors="pt", padding=True)
    hidden = bert(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    assert near(["ab"], reference=["c"])[0] == pytest.approx(
        torch.cosine_similarity(mean[0], mean[1], dim=0).item(), abs=1e-5
    )
    # by path, pooled as the folder says
    bert.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    settings = tmp_path / "1_Pooling" / "config.json"
    settings.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    tokenizer.padding_side = "right"  # the first token is then a real one
    tokenizer.save_pretrained(tmp_path)
    by_first = torch.cosine_similarity(*(bert(**tokenizer([t], return_tensors="pt", return_token_type_ids=False))
                                         .last_hidden_state[0, 0] for t in ("ab", "c")), dim=0)  # fmt: skip
    assert semantic_similarity(str(tmp_path))(["ab"], reference=["c"])[0] == pytest.approx(by_first.item(), abs=1e-5)
    settings.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(RewardError, match="pooling_mode_max_tokens"):
        semantic_similarity(str(tmp_path))(["ab"], reference=["ab"])


# -- all of them


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: math_accuracy(["1"], solution=["1"]), "math_verify", "math"),
        (lambda: json_schema({}), "jsonschema", "json"),
        (lambda: sentiment(["a"]), "vaderSentiment", "text"),
        (lambda: language("en"), "py3langid", "text"),
        (lambda: rouge(), "rouge_score", "text"),
        (lambda: bleu(), "sacrebleu", "text"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, make, package, extra):
    rloom.rewards.library.text._analyzer.cache_clear()
    rloom.rewards.library.text._identifier.cache_clear()
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf'pip install "rloom\[{extra}\]"'):
        make()


def test_built_in_rewards_are_scored_per_group():
    made = [format("x"), json_schema({}), length(), language("en"), rouge(), bleu(), semantic_similarity("none")]
    for function in (math_accuracy, choice_accuracy, think_format_reward, sentiment, *made):
        assert call_options_of(function).streaming, function.__name__


@pytest.mark.parametrize(
    "text", ["answer" + " " * 3_000 + ".", "answer " * 15_000, "answer" + " *" * 50_000, "(" * 100_000]
)
def test_choices_in_strange_texts_take_no_time(text):
    began = time.monotonic()
    assert choice_accuracy([text] * 8, answer=["B"] * 8) == [0.0] * 8
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("answer", [1, "2"])
def test_choices_that_are_numbers_are_told(answer):
    with pytest.raises(RewardError, match=r"is a number: make it a letter in the data set, as by 'ABCD'\[number\]"):
        choice_accuracy(["The answer is B."], answer=[answer])
