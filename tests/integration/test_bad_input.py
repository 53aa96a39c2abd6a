"""Mistakes are told before a model is loaded where that is possible, and in words that say what to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from rloom import FakeEngine, RLOOTrainer
from rloom.errors import ConfigError, DataError, RewardError
from rloom.training.launch import check_devices, check_parallelism, check_several
from tests.conftest import make_model, make_tokenizer

CHAT_ROWS = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": [{"role": "user", "content": "why."}]}]


def ones(completions):
    return [1.0] * len(completions)


def build(config, rows, *, model="no/such-model", reward=ones, **options):
    """A trainer whose model cannot be loaded: an error that comes later than the checks would name the model."""
    return RLOOTrainer(model, reward, config(), rows, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "`train_dataset` is required"),
        ([], "empty"),
        ([{"text": "a"}, {"text": "b"}], "no column 'prompt'; its columns are 'text'"),
        ([{"promt": "a"}, {"promt": "b"}], r"rename_column\('promt', 'prompt'\), or --columns prompt=promt"),
        ([{"prompts": "a"}, {"prompts": "b"}], r"rename_column\('prompts', 'prompt'\)"),
        ([{"prompt": "a"}, CHAT_ROWS[0]], "mixes prompt formats: row 0 is text, row 1 is messages"),
        ([{"prompt": "a"}, {"prompt": 3}], r"\[1\]: a prompt is text, or a list of messages"),
        ([{"prompt": "a"}], "has 1 prompts, and one rollout needs 2"),
    ],
)
def test_training_data(config, rows, message):
    with pytest.raises(DataError, match=message):
        build(config, rows)


def test_a_data_set_of_datasets(config):
    from datasets import Dataset

    with pytest.raises(DataError, match="no column 'prompt'"):
        build(config, Dataset.from_dict({"question": ["a", "b"]}))
    with pytest.raises(DataError, match="set `max_steps`"):
        build(config, Dataset.from_dict({"prompt": ["a", "b"]}).to_iterable_dataset())
    with pytest.raises(DataError, match=r"`train_dataset`\[0\]: a prompt is text, .* got int: '5'"):
        build(config, Dataset.from_dict({"prompt": [5, 7]}))
    rows = Dataset.from_dict({"prompt": ["a", None]})
    with pytest.raises(DataError, match=r"row 1 of the data: a prompt is text, .* got NoneType"):
        build(config, rows, model=make_model(), processing_class=make_tokenizer())


def test_splits_instead_of_a_data_set(config, rows):
    with pytest.raises(TypeError, match="pass one of them"):
        build(config, {"train": rows})


def test_evaluation_data(config, rows):
    with pytest.raises(DataError, match="mixed prompt formats"):
        build(config, rows, eval_dataset=CHAT_ROWS)
    with pytest.raises(DataError, match=r"eval_dataset\['a'\]` is empty"):
        build(config, rows, eval_dataset={"a": []})


def test_rewards_are_checked_before_loading(config, rows):
    with pytest.raises(RewardError, match="no reward function"):
        build(config, rows, reward=None)
    with pytest.raises(RewardError, match="a reward is a function"):
        build(config, rows, reward=3)
    with pytest.raises(RewardError, match="must match"):
        build(config, rows, reward=[ones, ones], reward_processing_classes=make_tokenizer())
    with pytest.raises(ConfigError, match=r"weights .1. must match number of reward functions .2."):
        RLOOTrainer("no/such-model", [ones, ones], config(reward_weights=[1.0]), rows)
    with pytest.raises(ConfigError, match="given twice"):
        build(config, rows, reward_model=ones)


def test_no_model(config, rows):
    with pytest.raises(ConfigError, match="no model"):
        build(config, rows, model=None)


def test_folders_without_a_model(config, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"the model 'empty' cannot be loaded: that folder has no config.json$"):
        build(config, rows, model="empty")
    make_model().save_pretrained(tmp_path / "empty" / "checkpoint-3")
    with pytest.raises(OSError, match=r"has no config.json; did you mean empty/checkpoint-3\?$"):
        build(config, rows, model="empty")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(OSError, match=r"has no config.json; it has an adapter: load its base model"):
        build(config, rows, model="adapter")
    (tmp_path / "empty" / "checkpoint-3").rename(tmp_path / "tiny")
    with pytest.raises(OSError, match=r"there is no folder tinny; did you mean tiny\? The hub says: "):
        build(config, rows, model="tinny")


def test_tokenizer_without_end_token(config, rows):
    model = make_model()
    model.generation_config.eos_token_id = None
    tokenizer = make_tokenizer(eos_token=None)
    with pytest.raises(ConfigError, match="end-of-sequence"):
        build(config, rows, model=model, processing_class=tokenizer)


def test_chat_prompts_without_a_template(config):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        build(config, CHAT_ROWS, model=make_model(), processing_class=tokenizer)


def test_prompt_longer_than_the_context(config):
    rows = [{"prompt": "a"}, {"prompt": "b" * 200}]
    with pytest.raises(DataError, match="200 tokens, and the model's context is 128"):
        build(config, rows, model=make_model(), processing_class=make_tokenizer())


def test_completions_beyond_a_table_of_positions(config, rows):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=46, n_positions=48, n_embd=16, n_layer=1, n_head=2, eos_token_id=2))
    with pytest.raises(DataError, match=r"exceed 48 tokens.*its positions.*set it to 5 or less"):
        build(config, rows, model=gpt2, processing_class=make_tokenizer())


def test_columns_that_would_be_shadowed_or_lost(config):
    with pytest.raises(DataError, match="under the same name from the trainer: 'completions'"):
        build(config, [{"prompt": "a", "completions": 1}, {"prompt": "b", "completions": 2}])
    with pytest.raises(
        DataError, match="a column 'image' and a column 'images': put all images, in order, into 'images'"
    ):
        build(config, [{"prompt": "a", "image": None}, {"prompt": "b", "images": None}])
    with pytest.raises(ConfigError, match=r"a column 'image', and .* is a tokenizer: pass a vision-language model"):
        build(
            config,
            [{"prompt": "a", "image": None}, {"prompt": "b", "image": None}],
            model=make_model(),
            processing_class=make_tokenizer(),
        )


def test_empty_prompt(config):
    rows = [{"prompt": "a"}, {"prompt": ""}]
    with pytest.raises(DataError, match="no tokens"):
        build(config, rows, model=make_model(), processing_class=make_tokenizer()).train()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda n: [1.0] * (n - 1), "'bad' returned 3 rewards, but 4 were expected"),
        (lambda n: "good", "'bad' returned str"),
        (lambda n: [1.0] * (n - 1) + [float("nan")], "'bad' returned NaN for sample 3"),
        (lambda n: [float("inf")] * n, "'bad' returned infinity for sample 0"),
        (lambda n: dict.fromkeys(range(n), 1.0), "'bad' returned dict"),
    ],
)
def test_reward_that_returns_nonsense(config, rows, returned, message):
    def bad(completions):
        return returned(len(completions))

    trainer = build(config, rows, model=make_model(), processing_class=make_tokenizer(), reward=bad)
    with pytest.raises(RewardError, match=message):
        trainer.train()


def test_stream_that_fills_no_rollout(config):
    from datasets import Dataset

    stream = Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()
    trainer = RLOOTrainer(make_model(), ones, config(max_steps=2), stream, processing_class=make_tokenizer())
    with pytest.raises(DataError, match="before it filled a rollout of 2 prompts"):
        trainer.train()


def test_arguments_of_other_trainers(config, rows):
    for name, hint in {
        "tokenizer": "processing_class",
        "ref_model": "a copy of the model",
        "engin": "'engine'",
    }.items():
        with pytest.raises(TypeError, match=hint):
            build(config, rows, **{name: 1})
    with pytest.raises(TypeError, match="must be an RLOOConfig, not dict"):
        RLOOTrainer("no/such-model", ones, {"beta": 0.1}, rows)


def test_fsdp_in_one_process_is_refused_before_loading(config, rows, monkeypatch):
    with pytest.raises(ConfigError, match=r"launch with `torchrun --nproc_per_node N .*, or leave fsdp out"):
        RLOOTrainer("no/such-model", ones, config(fsdp=True), rows)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were launched .* have not found each other"):
        check_several(SimpleNamespace(fsdp=True, world_size=1))
    # A launcher's one process is one too.
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"fsdp=True shards over several processes, and this is one"):
        check_several(SimpleNamespace(fsdp=True, world_size=1))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"\(FSDP\), and this is one: add --num_processes N"):
        check_several(SimpleNamespace(fsdp=None, world_size=1))


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    """Where accelerate does not notice them, as on a CPU without `use_cpu`."""
    lone = SimpleNamespace(args=SimpleNamespace(n_gpu=0), accelerator=SimpleNamespace(num_processes=1, state=None))
    check_devices(lone)
    lone.accelerator.state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2))
    for stage in (1, 2):
        lone.accelerator.state.deepspeed_plugin.zero_stage = stage
        check_devices(lone)
    for stage in (0, 3):
        lone.accelerator.state.deepspeed_plugin.zero_stage = stage
        with pytest.raises(ConfigError, match=rf"stage is {stage}: .*; set it to 2"):
            check_devices(lone)
    lone.accelerator.state = None
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were launched .* each would train alone. On a CPU: .*use_cpu"):
        check_devices(lone)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="told to start several processes, and has started one"):
        check_devices(lone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp_version 1: rloom shards by FSDP2"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "leave cpu_offload out"),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, "set gradient_checkpointing=True"),
        ({"fsdp": True, "optim": "adamw_8bit"}, "optim='adamw_8bit' does not work on sharded weights: use adamw_torch"),
        ({"fsdp": True, "precision": "fp16"}, "fp16 does not go together with FSDP yet"),
        ({"fsdp": True, "save_on_each_node": True}, "save_on_each_node=True does not go together with FSDP"),
        ({"kind": "TP"}, "TP with 2 processes"),
        ({"parallelism_config": SimpleNamespace(tp_size=2)}, "tp_size: weights that are spread over processes"),
    ],
)
def test_ways_of_sharding_a_model_are_refused(changes, message):
    kind = changes.pop("kind", "MULTI_GPU")
    precision = changes.pop("precision", "no")
    usual = {"n_gpu": 1, "fsdp": None, "fsdp_config": None, "optim": "adamw_torch", "split_weights": None}
    usual |= {"save_on_each_node": False, "parallelism_config": None}
    args = SimpleNamespace(**(usual | changes))
    accelerator = SimpleNamespace(num_processes=2, distributed_type=f"DistributedType.{kind}", state=None)
    accelerator.mixed_precision = precision
    several = SimpleNamespace(args=args, accelerator=accelerator, is_deepspeed_enabled=kind == "DEEPSPEED", model=None)
    several.optimizer = several.train_dataset = several.eval_dataset = None
    with pytest.raises(ConfigError, match=message):
        check_devices(several)


def test_an_exact_kl_is_refused_under_zero_3():
    choices = SimpleNamespace(kl_estimator="full")
    args = SimpleNamespace(
        n_gpu=1, fsdp=None, parallelism_config=None, beta=0.1, choices=choices, ds3_gather_for_generation=True
    )
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    accelerator = SimpleNamespace(num_processes=2, distributed_type="DistributedType.DEEPSPEED", state=state)
    with pytest.raises(ConfigError, match="kl_estimator='full' does not go together with ZeRO-3"):
        check_devices(SimpleNamespace(args=args, accelerator=accelerator, model=None))


def test_options_of_ddp_without_effect(caplog):
    args = SimpleNamespace(fsdp=None, parallelism_config=None, ddp_find_unused_parameters=False)
    accelerator = SimpleNamespace(num_processes=2, distributed_type="MULTI_GPU")
    check_parallelism(
        SimpleNamespace(
            args=args,
            accelerator=accelerator,
            is_deepspeed_enabled=False,
            model=None,
            is_world_process_zero=lambda: True,
        )
    )
    assert "ddp_find_unused_parameters has no effect" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda extra, metric: metric("reward", 5.0), "the trainer's own"),
        (lambda extra, metric: metric("mine", "abc"), "must be a number"),
        (lambda extra, metric: extra("x", [1]), "1 values for 4 completions"),
    ],
)
def test_what_rewards_may_log(config, rows, call, message):
    def reward(completions, log_extra, log_metric):
        call(log_extra, log_metric)
        return [1.0] * len(completions)

    trainer = build(config, rows, model=make_model(), processing_class=make_tokenizer(), reward=reward)
    with pytest.raises(RewardError, match=message) as caught:
        trainer.train()
    assert "in the reward 'reward', on 4 completions, which are texts" in caught.value.__notes__[0]


def test_reward_models_of_the_wrong_kind(config, rows):
    with pytest.raises(RewardError, match="a reward model is a …ForSequenceClassification"):
        build(config, rows, reward=make_model())
    with pytest.raises(RewardError, match="is not a folder"):
        build(config, rows, model=make_model(), processing_class=make_tokenizer(), reward="./nowhere/reward")


def test_router_loss_of_a_dense_model(config, rows):
    with pytest.raises(ConfigError, match="not a mixture of experts"):
        RLOOTrainer(make_model(), ones, config(router_aux_loss_coef=0.1), rows, processing_class=make_tokenizer())


def test_engine_that_returns_nothing(config, rows):
    engine = FakeEngine(lambda prompt, k, seed: None, eos_token_ids=[2])
    trainer = build(config, rows, model=make_model(), processing_class=make_tokenizer(), engine=engine)
    with pytest.raises(RuntimeError, match="no completion at all"):
        trainer.train()
