"""Tables of completions in the trackers: what each is sent; the real libraries take it, where they are installed."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from rloom import RLOOTrainer
from rloom.observe import trackers
from rloom.observe.completions import CompletionLog
from tests.conftest import make_model, make_tokenizer

CHAT = [{"role": "user", "content": "a|b\n*c*"}]


def filled(count: int = 2) -> CompletionLog:
    log = CompletionLog(64)
    log.count = count
    for i in range(count):
        log.columns["prompt"].append(CHAT)
        log.columns["completion"].append(f"<script>{i}")
        log.columns["rewards"]["length"].append(0.25 + i)
        log.columns["advantages"].append(-0.5)
    return log


def options(*report_to: str, **changes):
    defaults = {"log_unique_prompts": False, "log_multimodal": True, "num_completions_to_print": None}
    return SimpleNamespace(report_to=list(report_to), **(defaults | changes))


class Writer:
    def __init__(self):
        self.texts = []

    def add_text(self, tag, text_string, global_step=None, walltime=None):
        self.texts.append((tag, text_string, global_step))


def stand_in(monkeypatch, name, **content):
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def test_tensorboard_gets_a_markdown_table():
    writer, log = Writer(), filled()
    log.send(7, options("tensorboard"), writer)
    ((tag, text, step),) = writer.texts
    assert (tag, step) == ("completions", 7)
    assert text.splitlines() == [
        "| prompt | completion | length | advantage |",
        "|---|---|---|---|",
        "| user: a&#124;b<br>&#42;c&#42; | &lt;script&gt;0 | 0.25 | -0.50 |",
        "| user: a&#124;b<br>&#42;c&#42; | &lt;script&gt;1 | 1.25 | -0.50 |",
    ]
    log.send(8, options("tensorboard"), writer)
    assert len(writer.texts) == 1  # nothing new
    trackers.send(log.table(1), "tensorboard", step=1, images=None, writer=None)  # not opened: nothing to send to


def test_tensorboard_gets_a_sample_of_many_rows():
    writer = Writer()
    filled(50).send(1, options("tensorboard"), writer)
    lines = writer.texts[0][1].splitlines()
    assert len(lines) == 2 + trackers.ROWS_IN_TENSORBOARD
    assert "script&gt;0 " in lines[2]
    assert "script&gt;47" in lines[-1]


def test_mlflow_gets_plain_columns(monkeypatch):
    calls, active = [], [object()]

    def log_table(data, artifact_file, run_id=None):
        json.dumps(data)  # what MLflow does with it
        calls.append((data, artifact_file))

    stand_in(monkeypatch, "mlflow", active_run=lambda: active[0], log_table=log_table)
    filled().send(3, options("mlflow"))
    ((data, file),) = calls
    assert file == "completions.json"
    assert data["step"] == [3, 3]
    assert data["prompt"] == ["user: a|b\n*c*"] * 2
    assert data["length"] == [0.25, 1.25]
    active[0] = None
    filled().send(4, options("mlflow"))
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_get_a_frame_with_images(monkeypatch, name):
    logged = []
    tracker = {
        "run": object(),
        "log": logged.append,
        "Table": lambda dataframe: dataframe,
        "Image": lambda i: ("seen", i),
    }
    stand_in(monkeypatch, name, **tracker)
    log = filled()
    log.columns["images"].append(["picture"])  # of the last row; the first is from before a resume
    log.send(5, options(name))
    frame = logged[0]["completions"]
    assert list(frame.columns) == ["step", "prompt", "completion", "length", "advantage", "image"]
    assert frame["image"].tolist() == [[], [("seen", "picture")]]
    log = filled()
    log.send(6, options(name, log_unique_prompts=True))
    assert logged[1]["completions"]["completion"].tolist() == ["<script>0"]


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


class HoldsWriter(TrainerCallback):
    """As transformers' callback for TensorBoard."""

    def __init__(self):
        self.tb_writer = Writer()


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [
        ({"log_completions": True}, [1, 2, 3, 4]),
        ({"num_sample_generations": 2}, [2, 4]),
        ({"num_sample_generations": 4, "num_iterations": 2}, [1, 3]),  # a table for each rollout
    ],
)
def test_cadence_of_a_run(config, rows, cadence, steps, monkeypatch):
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda report_to: [])
    callback = HoldsWriter()
    args = config(max_steps=4, report_to="none", **cadence)
    args.report_to = ["tensorboard"]
    RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer(), callbacks=[callback]).train()
    assert [step for _, _, step in callback.tb_writer.texts] == steps
    assert all("| prompt | completion | length | advantage |" in text for _, text, _ in callback.tb_writer.texts)


# -- the libraries themselves


def test_the_real_tensorboard(config, rows, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    args = config(max_steps=2, report_to="tensorboard", log_completions=True)
    RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer()).train()
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    sent = events.Tensors("completions/text_summary")
    assert [event.step for event in sent] == [1, 2]
    shown = markdown_to_safe_html(sent[0].tensor_proto.string_val[0])
    assert shown.count("<tr>") == 5  # a head and four completions
    assert "train/reward" in events.Tags()["scalars"]


def test_the_real_mlflow(config, rows, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    args = config(max_steps=2, report_to="mlflow", log_completions=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/runs")
    RLOOTrainer(make_model(), length, args, rows, processing_class=make_tokenizer()).train()
    (file,) = tmp_path.rglob("completions.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["step", "prompt", "completion", "length", "advantage"]
    assert [row[0] for row in table["data"]] == [1] * 4 + [2] * 4
