"""`rloom train`, from nothing to a model that transformers loads; the commands of older documents as they stand."""

from __future__ import annotations

import json
import re
import resource
import shlex
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloom.cli.main import main
from rloom.cli.spec import find_reward
from rloom.cli.train import make_plan, next_command
from rloom.errors import DiskError, RewardError
from rloom.training.checkpoint import writing
from tests.standins import ROOT, prompts, run, save_jsonl, save_llama, save_pythia, save_reward_model

REWARD = """
def ends_well(completions, answer):
    return [float(text.endswith(a)) for text, a in zip(completions, answer)]
"""
QUICK = ["--max_completion_length", "6", "--per_device_train_batch_size", "4", "--max_steps", "2", "--use_cpu",
         "--logging_steps", "1", "--no_gradient_checkpointing", "--save_strategy", "no"]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_file_of_prompts_and_a_file_with_a_reward_to_a_saved_model(here):
    save_llama(here / "model")
    save_jsonl(here / "prompts.jsonl", prompts(8))
    (here / "my_reward.py").write_text(REWARD)
    (here / "recipe.yaml").write_text("learning_rate: 1e-3\nmax_steps: 99\nnum_generations: 2\n")
    run(["-m", "rloom.cli.main", "train", "--config", "recipe.yaml", "--model", "model", "--data", "prompts.jsonl",
         "--reward", "my_reward.py:ends_well", "length(maximum=4)", "--output_dir", "out", *QUICK], here)  # fmt: skip
    log = json.loads((here / "out" / "trainer_state.json").read_text())["log_history"]
    assert {"rewards/ends_well/mean", "rewards/length/mean"} <= set(log[0])
    assert max(entry["step"] for entry in log) == 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
    written = model.generate(**tokenizer("post 1.", return_tensors="pt", return_token_type_ids=False), max_new_tokens=4)
    assert written.shape[1] > 7


def test_the_next_command_measures_what_was_trained(here):
    given = {"model_name_or_path": "model", "dataset_name": "p.jsonl", "reward_funcs": ["length(maximum=4)"],
             "output_dir": "out", "max_completion_length": 6, "use_cpu": True, "report_to": "none"}  # fmt: skip
    assert next_command(make_plan(given)) == (
        "rloom eval --model out --data p.jsonl --split train --reward 'length(maximum=4)' --max_completion_length 6 "
        "--reference_model model"
    )
    held_out = make_plan({**given, "dataset_train_split": "train[4:]", "dataset_test_split": "train[:4]"})
    assert "--split 'train[:4]'" in next_command(held_out)
    assert "--data held.jsonl --split train " in next_command(make_plan({**given, "eval_data": "held.jsonl"}))


def test_lora_quantized_and_merged(here, capsys):
    save_llama(here / "model", hidden_size=64, intermediate_size=128)  # 4-bit weights come in blocks of 64
    save_jsonl(here / "prompts.jsonl", prompts(8))
    arguments = ["--model", "model", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", *QUICK]
    lora = ["--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj", "--merge_adapter"]
    assert main(["train", *arguments, *lora, "--output_dir", "adapter"]) == 0
    saved = json.loads((here / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], sorted(saved["target_modules"])) == (2, ["q_proj", "v_proj"])
    AutoModelForCausalLM.from_pretrained("adapter/merged")
    assert (
        main(["train", *arguments, "--use_peft", "--load_in_4bit", "--optim", "adamw_8bit", "--output_dir", "q"]) == 0
    )
    assert (here / "q" / "adapter_model.safetensors").exists()


FAILING = """
import json

def parsed(completions):
    return [number(text) for text in completions]

def number(text):
    return json.loads("x" + text)

def wants(completions, solution):
    return [0.0] * len(completions)
"""


def test_a_failing_reward_shows_its_own_frames(here, capsys):
    """In this process and in a worker's; and one that cannot be called is told before the model is looked for."""
    save_llama(here / "model")
    save_jsonl(here / "p.jsonl", prompts(8))
    (here / "failing.py").write_text(FAILING)
    arguments = ["train", "--model", "model", "--data", "p.jsonl", "--output_dir", "o", *QUICK]
    for more in ([], ["--isolate_rewards", "--reward_time_limit", "20"]):
        assert main([*arguments, "--reward", "failing.py:parsed", *more]) == 1
        err = capsys.readouterr().err
        assert 'return json.loads("x" + text)' in err
        assert "JSONDecodeError" in err
        assert "in a worker process" in err if more else "in the reward 'parsed'" in err
        for stranger in ("trainer.py", "scoring.py", "decoder.py", "worker.py"):
            assert stranger not in err
    arguments[2] = "no/model"
    assert main([*arguments, "--reward", "failing.py:wants"]) == 1
    assert "Its signature is wants(completions, solution)" in capsys.readouterr().err


def test_a_time_limit_without_isolation_is_refused(here, capsys):
    save_jsonl(here / "p.jsonl", prompts(8))
    arguments = ["train", "--model", "no/model", "--data", "p.jsonl", "--output_dir", "o", "--reward_time_limit", "2"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--reward", "length(maximum=4)"])
    assert stop.value.code == 2
    assert "--reward_time_limit has no effect on rewards that are not isolated" in capsys.readouterr().err


def test_a_file_has_no_splits_but_can_be_cut(here, capsys):
    save_llama(here / "model")
    save_jsonl(here / "p.jsonl", prompts(8))
    arguments = ["train", "--model", "model", "--data", "p.jsonl", "--reward", "length(maximum=4)", "--output_dir", "o",
                 "--eval_strategy", "steps", "--eval_steps", "1", *QUICK]  # fmt: skip
    assert main([*arguments, "--dataset_test_split", "validation"]) == 1
    assert "p.jsonl is one file without splits, so 'validation' would be what is trained on" in capsys.readouterr().err
    cut = ["--dataset_train_split", "train[4:]", "--dataset_test_split", "train[:4]"]
    assert main([*arguments, *cut]) == 0


def test_a_model_that_is_nowhere_is_named(here, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_jsonl(here / "p.jsonl", prompts(8))
    assert main(["train", "--model", "./nowhere", "--data", "p.jsonl", "--reward", "length", "--output_dir", "o"]) == 1
    assert "the model './nowhere' cannot be loaded" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_told_before_a_model_is_loaded(here, capsys):
    save_jsonl(here / "prompts.jsonl", prompts(8))
    for step in (1, 2, 10):
        (here / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (here / "out" / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (here / "out" / "checkpoint-11").mkdir()
    given = ["--model", "nowhere", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", *QUICK]
    assert main(["train", *given, "--output_dir", "out", "--resume_from_checkpoint", "nope"]) == 1
    assert capsys.readouterr().err == (
        "rloom: the checkpoint nope is no folder: name out/checkpoint-10, out/checkpoint-2 or out/checkpoint-1, or "
        '"auto", which goes on from the newest in output_dir that is whole, and begins anew where there is none\n'
    )
    assert main(["train", *given, "--output_dir", "out", "--resume_from_checkpoint", "out/checkpoint-11"]) == 1
    assert "rloom: the checkpoint out/checkpoint-11 is unfinished " in capsys.readouterr().err
    assert main(["train", *given, "--output_dir", "new", "--resume_from_checkpoint", "nope"]) == 1
    assert "is no folder: name another (new has none), or" in capsys.readouterr().err


def test_evaluation_split_and_resume(here, capsys):
    save_llama(here / "model")
    save_jsonl(here / "set" / "data" / "train-00000-of-00001.jsonl", prompts(8))
    save_jsonl(here / "set" / "data" / "validation-00000-of-00001.jsonl", prompts(2))
    arguments = ["--model", "model", "--data", "set", "--reward", "length(maximum=4)", "--output_dir", "out",
                 "--dataset_test_split", "validation", *QUICK[:-2], "--save_steps", "1"]  # fmt: skip
    assert main(["train", *arguments, "--eval_strategy", "steps", "--eval_steps", "1"]) == 0
    log = json.loads((here / "out" / "trainer_state.json").read_text())["log_history"]
    assert any("eval_reward" in entry for entry in log)
    never = ["--eval_strategy", "no", "--max_steps", "3", "--resume_from_checkpoint", "auto"]
    assert main(["train", *arguments, *never]) == 0
    assert "eval_strategy is no: they are not used" in capsys.readouterr().err
    state = json.loads((here / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 3
    assert not any("eval_reward" in entry for entry in state["log_history"] if entry["step"] == 3)


@pytest.mark.parametrize("prompts_from", ["split", "file"])
def test_evaluation_prompts_without_a_strategy_are_evaluated_once_at_the_end(prompts_from, here, capsys):
    save_llama(here / "model")
    save_jsonl(here / "set" / "data" / "train-00000-of-00001.jsonl", prompts(8))
    save_jsonl(here / "set" / "data" / "validation-00000-of-00001.jsonl", prompts(3))
    save_jsonl(here / "other.jsonl", prompts(3))
    given = {"split": ["--dataset_test_split", "validation"], "file": ["--eval_data", "other.jsonl"]}[prompts_from]
    arguments = ["train", "--model", "model", "--data", "set", "--reward", "length(maximum=4)", *QUICK[:-2]]
    saved = [*arguments, "--save_steps", "1", "--output_dir", "out"]
    assert main([*saved, *given]) == 0
    assert "they are evaluated once, after the last update" in capsys.readouterr().err
    for state in (here / "out", here / "out" / "checkpoint-2"):
        log = json.loads((state / "trainer_state.json").read_text())["log_history"]
        assert [entry["step"] for entry in log if "eval_reward" in entry] == [2]
    # The prompts were evaluated, not trained on: without them the run ends in the same weights.
    assert main([*arguments, "--output_dir", "without"]) == 0
    assert "evaluat" not in capsys.readouterr().err
    log = json.loads((here / "without" / "trainer_state.json").read_text())["log_history"]
    assert not any("eval_reward" in entry for entry in log)
    assert (here / "out/model.safetensors").read_bytes() == (here / "without/model.safetensors").read_bytes()


QUICK_START = """
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \
    --dataset_train_split descriptiveness \
    --learning_rate 3e-6 \
    --output_dir models/minimal/rloo \
    --per_device_train_batch_size 64 \
    --gradient_accumulation_steps 1 \
    --total_episodes 10000 \
    --model_name_or_path EleutherAI/pythia-14m \
    --reward_model_path EleutherAI/pythia-14m \
    --missing_eos_penalty 1.0
"""
TLDR = """
    --output_dir models/minimal/rloo_tldr \
    --dataset_name trl-internal-testing/tldr-preference-sft-trl-style \
    --dataset_test_split validation \
    --num_ppo_epochs 2 \
    --num_mini_batches 2 \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 16 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 16 \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    --kl_coef 0.03
"""
# What the quick start's page lists under "Explanation of the logged metrics", but for `val/clipfrac_avg`: there is no
# value function.
METRICS_OF_THE_PAGE = {
    "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
    "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg", "policy/entropy_avg",
    "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode",
}  # fmt: skip


def test_quick_start_of_the_older_document(here):
    save_pythia(here / "EleutherAI" / "pythia-14m", ends=40)
    folder = here / "trl-internal-testing" / "descriptiveness-sentiment-trl-style" / "data"
    save_jsonl(folder / "descriptiveness-00000-of-00001.jsonl", prompts(64))
    save_jsonl(folder / "sentiment-00000-of-00001.jsonl", prompts(1))
    done = run([str(ROOT / "examples/scripts/rloo/rloo.py"), *shlex.split(QUICK_START)], here)
    assert len(re.findall(r"^ +Step \d+ *$", done.stdout, re.MULTILINE)) == 10  # --num_sample_generations, by default
    state = json.loads((here / "models/minimal/rloo/trainer_state.json").read_text())
    assert state["global_step"] == 157  # ⌈10000 / 64⌉
    updates = [entry for entry in state["log_history"] if "loss" in entry]
    assert len(updates) == 15  # one in ten
    assert all(set(entry) >= METRICS_OF_THE_PAGE for entry in updates)
    AutoModelForCausalLM.from_pretrained("models/minimal/rloo")


@pytest.mark.slow
def test_the_example_script_s_metrics_of_older_documents_can_be_left_out(here):
    save_llama(here / "model")
    save_jsonl(here / "prompts.jsonl", prompts(8))
    line = ["--model", "model", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", "--output_dir", "out"]
    run([str(ROOT / "examples/scripts/rloo/rloo.py"), *line, *QUICK, "--log_older_metrics", "false"], here)
    log = json.loads((here / "out" / "trainer_state.json").read_text())["log_history"]
    assert "reward" in log[0]
    assert "objective/scores" not in log[0]


@pytest.mark.slow
def test_tldr_run_of_the_older_document_by_way_of_accelerate(here):
    """With fewer episodes than the document's million."""
    save_pythia(here / "EleutherAI" / "pythia-1b-deduped")
    save_pythia(here / "cleanrl" / "EleutherAI_pythia-1b-deduped__sft__tldr")
    save_reward_model(here / "cleanrl" / "EleutherAI_pythia-1b-deduped__reward__tldr")
    folder = here / "trl-internal-testing" / "tldr-preference-sft-trl-style" / "data"
    for split in ("train", "validation"):
        save_jsonl(folder / f"{split}-00000-of-00001.jsonl", prompts(300))
    # On a CPU and without DeepSpeed: what the document's configuration asks for is in unit/test_documents.
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    script = [str(ROOT / "examples/scripts/rloo/rloo.py"), *shlex.split(TLDR), "--total_episodes", "512"]
    done = run([*launch, *script], here)
    assert "`num_ppo_epochs` is an older name" in done.stderr
    state = json.loads((here / "models/minimal/rloo_tldr/trainer_state.json").read_text())
    assert state["global_step"] == 4  # one rollout of 2 × 16 × 16 completions, in 2 passes of 2 updates
    assert [entry["step"] for entry in state["log_history"] if "eval_reward" in entry] == [4]  # --dataset_test_split
    AutoModelForCausalLM.from_pretrained("models/minimal/rloo_tldr")


def test_rewards_by_name(here, monkeypatch):
    (here / "mine.py").write_text(REWARD)
    assert find_reward("mine.py:ends_well").__name__ == "ends_well"
    assert find_reward("mine:ends_well").__name__ == "ends_well"
    assert find_reward("mine.ends_well").__name__ == "ends_well"
    sys.modules.pop("mine")
    assert find_reward("org/reward-model") == "org/reward-model"
    assert find_reward("http://127.0.0.1:1/score") == "http://127.0.0.1:1/score"
    with pytest.raises(RewardError, match="did you mean 'sentiment'"):
        find_reward("sentimen")


# -- what the disk does not give or take


@pytest.fixture
def no_room():
    """A function after which no file grows beyond some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = """
import resource
calls = []
def filling(completions, **kwargs):
    calls.append(1)
    if len(calls) == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return [float(len(text)) for text in completions]
"""


def test_a_full_disk_is_a_sentence(here, capsys, no_room):
    save_llama(here / "model")
    save_jsonl(here / "prompts.jsonl", prompts(8))
    (here / "full_disk.py").write_text(FULL)
    line = ["train", "--model", "model", "--data", "prompts.jsonl", "--reward", "full_disk.py:filling",
            "--output_dir", "out", *QUICK[:-2], "--save_steps", "1"]  # fmt: skip
    assert main(line) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"rloom: the model cannot be written to out/checkpoint-2: .* GiB are free there", last)
    assert "The newest that is whole is out/checkpoint-1. Make room, and go on with" in last
    assert sorted(path.name for path in here.glob("out/checkpoint-*")) == ["checkpoint-1"]  # no half of another
    no_room(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert main([*line, "--resume_from_checkpoint", "auto"]) == 0
    no_room(20_000)
    told = r"the model cannot be written to .*/elsewhere: File too large"
    with pytest.raises(DiskError, match=told), writing(here / "elsewhere", "the model"):
        (here / "large").write_bytes(b"0" * 30_000)


def test_a_reward_file_that_is_no_python(here):
    (here / "latin.py").write_bytes(b"def f(completions): return 'caf\xe9'")
    with pytest.raises(RewardError, match=r"latin.py cannot be loaded: .*utf-8"):
        find_reward("latin.py:f")
