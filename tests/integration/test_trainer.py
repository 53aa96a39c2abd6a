"""The trainer as users meet it: formats, rewards, adapters, evaluation, saving, older names."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification, TrainerCallback

from rloom import FakeEngine, RLOOTrainer
from tests.conftest import LETTERS, make_model, make_tokenizer

CHAT = [[{"role": "user", "content": text}] for text in ("hi there", "why is it so.", "x", "2+2=")]


def length(completions, **kwargs):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


def weights(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def train(args, rows, reward=length, model=None, **options):
    trainer = RLOOTrainer(model or make_model(), reward, args, rows, processing_class=make_tokenizer(), **options)
    before = weights(trainer.model)
    trainer.train()
    return trainer, before


@pytest.fixture
def reward_model(tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 4, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path / "reward-model"
    LlamaForSequenceClassification(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


# -- data


def test_chat_prompts_reach_rewards_as_messages(config):
    seen = []

    def reward(prompts, completions, completion_ids, topic):
        seen.append((prompts[0], completions[0], completion_ids[0], topic[0]))
        return length(completions)

    rows = [{"prompt": prompt, "topic": str(i)} for i, prompt in enumerate(CHAT)]
    train(config(max_steps=1, shuffle_dataset=False), rows, reward)
    prompt, completion, ids, topic = seen[0]
    assert prompt == CHAT[0]
    assert completion[0]["role"] == "assistant"
    assert completion[0]["content"] == make_tokenizer().decode(ids, skip_special_tokens=True)
    assert topic == "0"


def test_remove_unused_columns_hides_them(config, rows):
    names = set()

    def reward(completions, **kwargs):
        names.update(kwargs)
        return length(completions)

    train(config(max_steps=1, remove_unused_columns=True), rows, reward)
    assert "target" not in names
    train(config(max_steps=1), rows, reward)
    assert "target" in names


def test_each_epoch_sees_each_prompt_once_per_group(config, rows):
    counts = []

    def reward(prompts, completions):
        counts.extend(prompts)
        return length(completions)

    trainer, _ = train(config(num_train_epochs=2), rows, reward)
    assert trainer.state.global_step == 6
    assert sorted(counts) == sorted(row["prompt"] for row in rows for _ in range(2 * 2))
    assert counts[:12] != counts[12:]  # another order in the second epoch


def test_prompts_that_fill_no_rollout_are_counted(config, rows, caplog):
    train(config(max_steps=1), rows[:5])
    assert "1 of the 5 prompts do not fill a rollout" in caplog.text


def test_iterable_data(config, rows):
    from datasets import Dataset

    seen = []

    def reward(prompts, completions):
        seen.extend(dict.fromkeys(prompts))
        return length(completions)

    stream = Dataset.from_list(rows).to_iterable_dataset()
    trainer, _ = train(config(max_steps=5, shuffle_dataset=False), stream, reward)  # the stream holds 3 rollouts
    assert trainer.state.global_step == 5
    assert seen == [rows[i % 6]["prompt"] for i in range(10)]


# -- rewards


def test_reward_model_by_path_instance_and_mixed(config, rows, reward_model):
    trainer, _ = train(config(max_steps=2), rows, [str(reward_model), length])
    log = trainer.state.log_history[0]
    assert {"rewards/reward-model/mean", "rewards/length/mean"} <= set(log)
    model = LlamaForSequenceClassification.from_pretrained(reward_model)
    text = rows[0]["prompt"] + "abc"
    inputs = make_tokenizer()(text, return_tensors="pt", add_special_tokens=False)
    expected = model.eval()(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits[0, 0].item()
    from rloom.rewards import ModelReward, RewardBatch

    reward = ModelReward(model, make_tokenizer(), name="m", template_kwargs={})
    batch = RewardBatch(prompts=["x", rows[0]["prompt"]], completions=["a", "abc"], completion_ids=[[], []])
    assert reward.score(batch)[1] == pytest.approx(expected, abs=1e-5)


def test_a_completion_without_a_score_shrinks_its_group(config, rows):
    def picky(completions, completion_ids):
        return [None if i % 3 == 0 else float(len(c)) for i, c in enumerate(completions)]

    trainer, _ = train(config(max_steps=2, beta=0.0), rows, picky)
    logs = trainer.completion_log.table(0)
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for prompt, score, advantage in zip(logs["prompt"], logs["picky"], logs["advantage"], strict=True):
        by_prompt.setdefault(prompt, []).append((score, advantage))
    for pairs in by_prompt.values():
        if any(score != score for score, _ in pairs):  # of two completions one has no score: nothing to compare
            assert all(advantage == 0.0 for _, advantage in pairs)
    assert any("completions/unscored_ratio" in entry for entry in trainer.state.log_history)


def test_log_extra_and_log_metric(config, rows):
    def reward(completions, log_extra, log_metric):
        log_extra("first", [c[:1] for c in completions])
        log_metric("share", 0.25)
        return length(completions)

    trainer, _ = train(config(max_steps=1), rows, reward)
    assert trainer.state.log_history[0]["share"] == 0.25
    assert len(trainer.completion_log.table(1)["first"]) == 4


def test_groups_of_unequal_size_and_empty_completions(config, rows):
    lengths = {0: 0, 1: 1, 2: 3, 3: 6}

    def script(prompt, sample, seed):
        return None if (sample == 3 and prompt.content == "x") else [5] * lengths[sample]

    engine = FakeEngine(script, eos_token_ids=[2])
    args = config(num_generations=4, per_device_train_batch_size=8, learning_rate=1e-2)
    trainer, before = train(args, rows, engine=engine)
    assert trainer.state.log_history[0]["completions/min_length"] == 0
    after = weights(trainer.model)
    assert all(torch.isfinite(p).all() for p in after.values())
    assert any(not torch.equal(before[n], p) for n, p in after.items())


def test_secondary_end_tokens_are_no_truncation(config, rows):
    model = make_model()
    model.generation_config.eos_token_id = [2, 7]
    engine = FakeEngine(lambda prompt, k, seed: [5, 7, 9] if k else [5, 6, 2], eos_token_ids=[2, 7])
    trainer, _ = train(config(max_steps=1), rows, model=model, engine=engine)
    assert trainer.eos_token_ids == [2, 7]
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0.0


def test_pad_may_equal_eos(config, rows):
    tokenizer = make_tokenizer(pad_token="<eos>")
    trainer = RLOOTrainer(make_model(), length, config(max_steps=1), rows, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["completions/max_length"] <= 6
    assert not any("<eos>" in c for c in trainer.completion_log.table(1)["completion"])


# -- models


def test_lora_trains_the_adapter_alone_and_saves_it_in_pefts_format(config, rows, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer, before = train(config(learning_rate=1e-2), rows, peft_config=lora)
    after = weights(trainer.model)
    moved = {n for n in after if not torch.equal(before[n], after[n])}
    assert moved
    assert all("lora_" in n for n in moved)
    trainer.save_model(str(tmp_path / "adapter"))
    assert [p for p in (tmp_path / "adapter").iterdir() if p.is_dir()] == []
    again = peft.PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(ids).logits, trainer.model.eval()(ids).logits)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "embed_tokens"], ["q_proj", "lm_head"]])
def test_an_adapter_that_was_there_is_its_own_reference(config, rows, tmp_path, targets):
    """The KL is measured from the adapter as it was given, not from the base model."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    model = peft.get_peft_model(make_model(), lora)
    trainer, _ = train(config(max_steps=5), rows, model=model)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert any(abs(entry.get("kl", 0.0)) > 1e-4 for entry in trainer.state.log_history)
    assert not any("reference" in n and p.requires_grad for n, p in trainer.model.named_parameters())
    trainer.save_model(str(tmp_path / "adapter"))
    assert [p for p in (tmp_path / "adapter").iterdir() if p.is_dir()] == []


def test_reference_is_a_copy_of_the_weights_that_were_given(config, rows, tmp_path):
    """TRL loads it again by name: a model changed after loading would be compared with the wrong weights."""
    make_model().save_pretrained(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    trainer, _ = train(config(max_steps=1), rows, model=model)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["reference", "reward"]),  # a GPU works while rewards are awaited
        ({"dynamic_sampling": 1}, ["reward", "reference"]),  # not on groups that may be replaced
        ({"objective": "trl", "kl_estimator": "full"}, ["reward"]),  # it needs the policy's forward beside it
    ],
)
def test_the_reference_is_asked_once_and_before_rewards_are(config, rows, options, expected):
    order = []

    def noted(completions, **kwargs):
        order.append("reward")
        return [float(row % 2) for row in range(len(completions))]

    args = config(beta=0.1, max_steps=1, **options)
    trainer = RLOOTrainer(make_model(), noted, args, rows, processing_class=make_tokenizer())
    run = trainer.assigner._reference_pass
    trainer.assigner._reference_pass = lambda rollout: (order.append("reference"), run(rollout))
    trainer.train()
    assert order == expected


def test_without_a_kl_there_is_no_reference(config, rows):
    trainer, _ = train(config(beta=0.0, max_steps=1), rows)
    assert trainer.reference is None
    assert trainer.ref_model is None
    assert all("kl" not in entry for entry in trainer.state.log_history)


def test_model_by_path(config, rows, tmp_path):
    make_model().save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    trainer = RLOOTrainer(str(tmp_path / "m"), length, config(max_steps=1), rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


def test_mixed_precision(config, rows):
    """float32 weights under bfloat16 autocast, TRL's default on GPUs: proven and trained as it is run."""
    trainer, before = train(config(bf16=True, max_steps=3), rows)
    assert trainer.learner.batcher.packed
    assert any(not torch.equal(before[n], p) for n, p in weights(trainer.model).items())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_an_offloaded_reference_gives_the_same_weights(config, rows):
    options = {"max_steps": 3, "sync_ref_model": True, "ref_model_sync_steps": 1}
    plain, _ = train(config(**options), rows)
    offloaded, _ = train(config(**options, offload_reference=True), rows)
    assert all(torch.equal(p, offloaded.model.get_parameter(n)) for n, p in weights(plain.model).items())


@pytest.mark.parametrize(
    ("options", "trips", "heads"),
    [
        ({}, 1, 0),  # all micro-batches of the pass before the update
        ({"num_iterations": 2}, 1, 0),  # nor for the pass of the old policy
        ({"kl_estimator": "full"}, 3, 0),  # beside the training forward: once for each micro-batch
        ({"kl_estimator": "full", "kl_placement": "loss"}, 3, 3),  # its head again, in the backward
        ({"kl_estimator": "full", "normalize_advantages": True}, 1, 0),  # two passes
    ],
)
def test_an_offloaded_reference_travels_once_for_a_pass(config, options, trips, heads, monkeypatch):
    """The embedding's weight travels with the whole model, the output layer's with the head alone as well."""
    sizes = {"per_device_train_batch_size": 6, "max_tokens_per_micro_batch": 16, "max_steps": 1}
    args = config(**{**sizes, "beta": 0.1, "offload_reference": True, **options})
    rows = [{"prompt": "abcdef"}, {"prompt": "fedcba"}, {"prompt": "aabbcc"}]  # a group is a micro-batch
    engine = FakeEngine(lambda prompt, k, seed: [4 + k, 5, 6, 2], eos_token_ids=[2])
    trainer = RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer(), engine=engine)
    trainer.learner.budget.factor = 1  # several micro-batches in passes without gradient, too
    reference, came, to = trainer.reference.model, Counter(), torch.Tensor.to

    def counted(tensor, *args, **kwargs):
        if kwargs.get("non_blocking"):
            came["model"] += tensor.data_ptr() == reference.model.embed_tokens.weight.data_ptr()
            came["head"] += tensor.data_ptr() == reference.lm_head.weight.data_ptr()
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    trainer.train()
    assert (came["model"], came["head"] - came["model"]) == (trips, heads)


def test_bfloat16_weights_keep_their_bits_and_resume(config, rows, tmp_path):
    def run(resume=None):
        args = config(
            max_steps=4, save_strategy="steps", save_steps=1, learning_rate=1e-5, lr_scheduler_type="constant"
        )
        trainer = RLOOTrainer(make_model().bfloat16(), length, args, rows, processing_class=make_tokenizer())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run()
    assert type(whole.optimizer.optimizer).__name__ == "SplitAdamW"
    rests = [s["rest"] for s in whole.optimizer.optimizer.state.values()]
    assert any(rest.any() for rest in rests)  # updates of 1e-5 live in the bits that bfloat16 drops
    expected = weights(whole.model)
    again = run(resume=str(tmp_path / "out" / "checkpoint-2"))
    assert all(torch.equal(p, again.model.get_parameter(n)) for n, p in expected.items())
    others = [s["rest"] for s in again.optimizer.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(rests, others, strict=True))


FOLLOWED = {
    "max_steps": 4, "sync_ref_model": True, "ref_model_sync_steps": 1, "save_strategy": "steps", "save_steps": 1
}  # fmt: skip


def test_a_reference_that_follows_bfloat16_weights_keeps_its_bits_and_resumes(config, rows, tmp_path):
    def run(resume=None, **options):
        args = config(**FOLLOWED, learning_rate=1e-3, **options)
        trainer = RLOOTrainer(make_model().bfloat16(), length, args, rows, processing_class=make_tokenizer())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(ref_model_mixup_alpha=0.01).reference.state_dict()
    assert any(part.any() for name, part in whole.items() if name.endswith(":rest"))
    resumed = run(resume=str(tmp_path / "out" / "checkpoint-2"), ref_model_mixup_alpha=0.01)
    assert all(torch.equal(part, resumed.reference.state_dict()[name]) for name, part in whole.items())
    copied = run(ref_model_mixup_alpha=1.0)  # then the reference is the policy, with all that its optimizer knows of it
    for name, parameter in copied.model.named_parameters():
        assert torch.equal(copied.reference.model.get_parameter(name), parameter)
        kept = copied.optimizer.optimizer.state[parameter]["rest"]
        assert torch.equal(copied.reference.state_dict()[name + ":rest"], kept)


def test_a_reference_follows_an_adapter_with_biases_and_resumes(config, rows, tmp_path):
    """peft keeps such biases in the base model, and allows no second adapter that trains them."""
    peft = pytest.importorskip("peft")

    def run(resume=None):
        args = config(**FOLLOWED, learning_rate=1e-2)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="lora_only")
        model = make_model(attention_bias=True)
        trainer = RLOOTrainer(model, length, args, rows, processing_class=make_tokenizer(), peft_config=lora)
        before = weights(trainer.model)
        trainer.train(resume_from_checkpoint=resume)
        return before, weights(trainer.model), trainer.reference.state_dict()

    before, after, reference = run()
    biases = [name for name in reference if name.endswith("base_layer.bias")]
    assert len(biases) == 4
    for name in biases:
        assert not torch.equal(before[name], after[name])
        assert not torch.equal(reference[name], before[name])
        assert not torch.equal(reference[name], after[name])
    _, again, moved = run(resume=str(tmp_path / "out" / "checkpoint-2"))
    assert all(torch.equal(part, again[name]) for name, part in after.items())
    assert all(torch.equal(part, moved[name]) for name, part in reference.items())


def test_a_users_optimizer_is_told_what_it_loses(config, rows, caplog):
    model = make_model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    RLOOTrainer(model, length, config(), rows, processing_class=make_tokenizer(), optimizers=(optimizer, None))
    assert "updates smaller than bfloat16 can hold" in caplog.text


def test_gradient_checkpointing_gives_the_same_weights(config, rows):
    plain, _ = train(config(max_steps=2), rows)
    recomputed, _ = train(config(max_steps=2, gradient_checkpointing=True), rows)
    for name, parameter in weights(plain.model).items():
        torch.testing.assert_close(parameter, recomputed.model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", ["trl", "paper", "openrlhf", "verl", "reinforce++"])
def test_every_objective_trains(config, rows, objective):
    trainer, before = train(config(objective=objective, num_iterations=2), rows)
    assert any(not torch.equal(before[n], p) for n, p in weights(trainer.model).items())
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


# -- evaluation, logs, cards


def test_evaluate_reports_rewards_and_repeats_itself(config, rows):
    args = config(per_device_eval_batch_size=4, num_generations_eval=2, learning_rate=0.0)
    trainer = RLOOTrainer(
        make_model(), length, args, rows, eval_dataset={"a": rows[:3], "b": rows[3:]}, processing_class=make_tokenizer()
    )
    first, second = trainer.evaluate(), trainer.evaluate()
    assert {"eval_a_reward", "eval_b_reward", "eval_a_kl", "eval_a_completions/mean_length"} <= set(first)
    assert first["eval_a_reward"] == second["eval_a_reward"]


def test_evaluation_does_not_disturb_training(config, rows):
    def run(**options):
        trainer = RLOOTrainer(
            make_model(), length, config(max_steps=4, **options), rows, rows[:2], processing_class=make_tokenizer()
        )
        trainer.train()
        return weights(trainer.model), trainer.state.log_history

    alone, _ = run()
    evaluated, history = run(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2)
    assert sum("eval_reward" in entry for entry in history) == 4
    assert all("eval_" not in k for e in history if "loss" in e for k in e)
    assert all(torch.equal(p, evaluated[n]) for n, p in alone.items())


def test_user_overrides(config, rows):
    """The places that TRL's users override: scoring, and the loss."""

    class Mine(RLOOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) * 0 + 3.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss + 0.1 * sum(p.square().sum() for p in model.parameters())

    trainer = Mine(make_model(), length, config(max_steps=1), rows, processing_class=make_tokenizer())
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 3.0
    assert trainer.state.log_history[0]["loss"] > 1.0


def test_a_loss_of_the_users_own_is_asked_about_groups_without_signal(config, rows):
    """Its term may have a gradient where ours has none."""
    asked = []

    class Mine(RLOOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            asked.extend(inputs.rows)
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss + 0.1 * sum(p.square().sum() for p in model.parameters())

    def equal(completions, **kwargs):
        return [1.0] * len(completions)

    trainer = Mine(make_model(), equal, config(max_steps=1, beta=0.0), rows, processing_class=make_tokenizer())
    before = weights(trainer.model)
    trainer.train()
    assert asked == [0, 1, 2, 3]
    assert "completions/skipped" not in trainer.state.log_history[0]
    assert all(not torch.equal(p, before[n]) for n, p in weights(trainer.model).items())


def test_callbacks_see_the_users_settings_and_updates(config, rows):
    class Count(TrainerCallback):
        steps = 0

        def on_train_begin(self, args, state, control, **kwargs):
            assert args.gradient_accumulation_steps == 3  # what trackers write down

        def on_step_end(self, args, state, control, **kwargs):
            assert args.gradient_accumulation_steps == 3
            self.steps += 1

    count = Count()
    args = config(gradient_accumulation_steps=3, num_train_epochs=1)
    trainer = RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer(), callbacks=[count])
    assert trainer.get_total_train_batch_size(args) == 12
    trainer.train()
    assert count.steps == trainer.state.global_step == 1
    assert args.gradient_accumulation_steps == 3


def test_card_and_saved_options(config, rows, tmp_path):
    args = config(save_strategy="steps", save_steps=1, max_steps=1, gradient_accumulation_steps=2)
    train(args, rows)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "rloom" in card
    assert "- rloo\n" in card  # the tag by which the hub finds it
    assert "| `num_generations` | 2 |" in card
    saved = torch.load(tmp_path / "out" / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.gradient_accumulation_steps == 2
    json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())


def test_tables_are_printed_when_asked(config, rows, capsys):
    train(config(max_steps=4, num_sample_generations=2, num_completions_to_print=2, logging_steps=10), rows)
    out = capsys.readouterr().out
    assert out.count("Step ") == 2
    assert "advantage" in out


def test_predict_reports_under_its_own_names(config, rows):
    trainer, _ = train(config(max_steps=1, per_device_eval_batch_size=4), rows)
    output = trainer.predict(rows[:3])
    assert {"test_reward", "test_kl", "test_completions/mean_length"} <= set(output.metrics)
    assert not trainer.metrics.values["train"]
    assert not trainer.metrics.values["eval"]


def test_saving_leaves_other_folders_alone(config, rows, tmp_path):
    trainer, _ = train(config(max_steps=1), rows)
    (tmp_path / "models" / "ref").mkdir(parents=True)
    trainer.save_model(str(tmp_path / "models"))
    assert (tmp_path / "models" / "ref").exists()


def test_the_chat_template_says_what_ends_a_reply(config):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}>{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}a>{% endif %}"
    )
    model = make_model(vocab_size=len(tokenizer))
    rows = [{"prompt": prompt} for prompt in CHAT]
    trainer = RLOOTrainer(model, length, config(max_steps=1), rows, processing_class=tokenizer)
    assert trainer.eos_token_ids == [2, tokenizer.convert_tokens_to_ids("<end>")]


# -- older names in the constructor


def test_reward_model_argument(config, rows):
    class Scorer:
        def get_rewards(self, prompts, completions):
            return length(completions)

    for reward in (length, Scorer()):
        trainer = RLOOTrainer(
            model=make_model(),
            args=config(max_steps=1),
            train_dataset=rows,
            processing_class=make_tokenizer(),
            reward_model=reward,
        )
        trainer.train()
        assert trainer.state.log_history[0]["reward"] > 0


def test_sft_and_reward_model_paths(config, rows, reward_model, tmp_path):
    make_model(seed=5).save_pretrained(tmp_path / "sft")
    make_tokenizer().save_pretrained(tmp_path / "sft")
    args = config(max_steps=1, sft_model_path=str(tmp_path / "sft"), reward_model_path=str(reward_model))
    trainer = RLOOTrainer(args=args, train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    # with a model of its own, the path names the reference
    trainer = RLOOTrainer(make_model(), args=args, train_dataset=rows, processing_class=make_tokenizer())
    other = make_model(seed=5)
    assert torch.equal(trainer.ref_model.lm_head.weight, other.lm_head.weight)
    trainer.train()
    assert abs(trainer.state.log_history[0]["kl"]) > 1e-3


def test_stop_token_id(config, rows):
    trainer, _ = train(config(max_steps=1, stop_token_id=9), rows)
    assert trainer.eos_token_ids == [2, 9]


def test_the_models_cache_stays_as_it_was(config, model, tokenizer, rows):
    """The Trainer would turn it off in the config, and in what is saved: whoever generates with that waits."""
    from rloom import RLOOTrainer

    assert model.config.use_cache
    trainer = RLOOTrainer(
        model, lambda completions, **kwargs: [0.0] * len(completions), config(), rows, processing_class=tokenizer
    )
    assert trainer.model.config.use_cache
