"""A reward that wants a column which is not there is refused before a model is loaded; others are let through."""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset, IterableDataset
from torch.utils.data import Dataset as TorchDataset

import rloom
from rloom import RLOOTrainer
from rloom.errors import RewardError
from rloom.training.arguments import check_reward_columns

ROWS = [{"prompt": text, "answer": text} for text in ("a", "b", "c", "d")]


def wants(completions, answers, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize("data", [ROWS, Dataset.from_list(ROWS)], ids=["list", "data set"])
def test_it_is_refused_before_the_model_is_looked_for(data, config):
    with pytest.raises(RewardError) as refused:
        RLOOTrainer("no/model", [wants], config(), data)
    for words in ("'answers'", "`train_dataset`", "did you mean 'answer'?", "wants(completions, answers, **kwargs)"):
        assert words in str(refused.value)


def test_also_for_an_evaluation_set(config):
    def exact(completions, answer):
        return [1.0] * len(completions)

    other = [{"prompt": "a"}] * 4
    with pytest.raises(RewardError, match=r"column of `eval_dataset\['hard'\]`"):
        RLOOTrainer("no/model", exact, config(), ROWS, {"easy": ROWS, "hard": other})
    with pytest.raises(RewardError, match="column of `eval_dataset`"):
        RLOOTrainer("no/model", exact, config(), ROWS, other)


def test_the_prompt_is_given_as_prompts(config):
    with pytest.raises(RewardError, match="did you mean 'prompts'"):
        RLOOTrainer("no/model", lambda prompt, completions: [], config(), ROWS)


class Scorer:
    """With arguments that are no columns."""

    def get_rewards(self, prompts, completions):
        return [0.0] * len(prompts)

    def __call__(self, nothing_that_is_there):
        return []


class Called:
    def __call__(self, completions, answer, level=3):
        return []


def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, /, level=1, *, n=2):
    return []


async def later(completions, **anything):
    return []


@pytest.mark.parametrize(
    "function",
    [everything, later, Called(), Scorer(), "org/reward-model", "http://127.0.0.1:1/score", max,
     functools.partial(wants, answers=[]), rloom.reward(lambda completions, answer: [], isolated=True),
     rloom.rewards.length(maximum=3)],
    ids=lambda f: getattr(f, "__name__", str(f)[:20]),
)  # fmt: skip
def test_what_can_be_called_is_let_through(function):
    check_reward_columns([function], Dataset.from_list(ROWS), None)


class Rows(TorchDataset):
    """Whose columns nobody knows before all rows have been read."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"prompt": "a"} if index == 0 else {"prompt": "b", "answers": "c"}


def test_what_is_not_known_is_not_refused():
    check_reward_columns([wants], IterableDataset.from_generator(lambda: iter(ROWS)), None)
    check_reward_columns([wants], Rows(), None)
    check_reward_columns([wants], rloom.data.datasets.RowList([{"prompt": "a"}, {"prompt": "b", "answers": "c"}]), None)
    added = Dataset.from_list(ROWS).with_transform(lambda rows: {**rows, "answers": rows["answer"]})
    check_reward_columns([wants], added, None)
    known = Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(RewardError, match="did you mean 'answer'"):
        check_reward_columns([wants], known, None)


def test_a_trainer_that_calls_rewards_itself_is_not_checked(config):
    class Own(RLOOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards([{**row, "answers": 1} for row in inputs], prompts, completions, [])

    with pytest.raises(OSError, match="no/model"):
        Own("no/model", wants, config(), ROWS)
