"""A stand-in for vLLM, so that what is ours is tested where it is not installed: in this process, and over HTTP.

It really samples, from a transformers model of its own that gets weights only as vLLM gets them.
"""

from __future__ import annotations

import gc
import json
import random
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaForCausalLM

from rloom.generation.vllm.transfer import GlooGroup


class Model:
    """A llama that is given weights, and draws tokens one by one."""

    def __init__(self, config, *, deaf_to=()):
        torch.manual_seed(99)
        self.inner, self.deaf_to = LlamaForCausalLM(config).eval(), deaf_to

    def named_parameters(self):
        return self.inner.named_parameters()

    def load_weights(self, weights):
        state = {name: tensor.clone() for name, tensor in weights if name not in self.deaf_to}
        self.inner.load_state_dict(state, strict=False)
        return set(state)

    @torch.no_grad()
    def draw(self, prompt, *, n, temperature, max_tokens, stop_token_ids, seed=None, **_):
        """Tokens, log-probabilities and the reason for the end, n times."""
        found = []
        for index in range(n):
            noise = None if seed is None else torch.Generator().manual_seed((seed + index) % 2**63)
            tokens, logprobs = [], []
            while len(tokens) < max_tokens and (not tokens or tokens[-1] not in stop_token_ids):
                logits = self.inner(input_ids=torch.tensor([prompt + tokens])).logits[0, -1] / (temperature or 1.0)
                scores = logits.log_softmax(-1)
                pick = scores.argmax() if temperature == 0 else torch.multinomial(scores.exp(), 1, generator=noise)[0]
                tokens.append(int(pick))
                logprobs.append(float(scores[pick]))
            found.append((tokens, logprobs, "stop" if tokens[-1] in stop_token_ids else "length"))
        return found


# -- in this process


class LLM:
    """As much of vLLM's class as the engine uses."""

    made: ClassVar[list[LLM]] = []
    deaf_to: ClassVar[tuple[str, ...]] = ()
    can_reset: ClassVar[bool] = True
    ended: ClassVar[int] = 0

    def __init__(self, model, **options):
        config = AutoConfig.from_pretrained(model)
        self.options, self.model, self.waiting, self.asleep, self.resets = options, Model(config), {}, False, 0
        self.model.deaf_to = LLM.deaf_to
        torch.rand(5), random.random(), np.random.rand()  # vLLM moves the process' random state
        torch.set_float32_matmul_precision("highest")
        gc.freeze()
        sys.excepthook = lambda *_: None
        limit = options["max_model_len"] or config.max_position_embeddings
        core = SimpleNamespace(shutdown=self._shut_down)
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=limit), engine_core=core, add_request=self._add,
            step=self._step, abort_request=self._abort, has_unfinished_requests=lambda: bool(self.waiting),
        )  # fmt: skip
        LLM.made.append(self)

    def collective_rpc(self, function, args=()):
        worker = SimpleNamespace(
            get_model=lambda: self.model,
            reload_weights=lambda weights_iterator: self.model.load_weights(weights_iterator),
        )
        return [function(worker, *args)]

    def _shut_down(self):
        LLM.ended += 1
        clean_up()

    def reset_prefix_cache(self):
        self.resets += 1
        return LLM.can_reset and not self.waiting

    def sleep(self, level):
        assert not self.waiting
        self.asleep = True
        self.model.inner.model.embed_tokens.weight.data.zero_()

    def wake_up(self):
        self.asleep = False

    def _add(self, name, prompt, params, lora_request=None):
        assert not self.asleep
        self.waiting[name] = (prompt["prompt_token_ids"], params)

    def _abort(self, names):
        for name in names:
            del self.waiting[name]

    def _step(self):
        name, (prompt, params) = self.waiting.popitem()  # the last first
        outputs = [
            SimpleNamespace(
                index=index, token_ids=tokens, finish_reason=reason,
                logprobs=[{t: SimpleNamespace(logprob=p)} for t, p in zip(tokens, logprobs, strict=True)],
            )
            for index, (tokens, logprobs, reason) in enumerate(self.model.draw(prompt, **vars(params)))
        ]  # fmt: skip
        return [SimpleNamespace(request_id=name, finished=True, outputs=outputs[::-1])]


def clean_up():
    """Ends process groups, whoever made them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def install(monkeypatch, *, version=(0, 32, 0), deaf_to=(), can_reset=True):
    """Put the stand-in where `import vllm` finds it."""
    LLM.made, LLM.deaf_to, LLM.can_reset, LLM.ended = [], deaf_to, can_reset, 0
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.LLM, module.SamplingParams = LLM, lambda **options: SimpleNamespace(**options)
    module.__version_tuple__, module.__version__ = version, ".".join(map(str, version))
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    params.StructuredOutputsParams = lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    distributed = ModuleType("vllm.distributed")
    distributed.cleanup_dist_env_and_memory = clean_up
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)


# -- over HTTP


class Service:
    """What a vLLM server answers; a test may change any of it."""

    def __init__(self, config, **changes):
        self.model, self.version, self.calls = Model(config), "default", []
        self.folder = "org/model"  # by which it was started
        self.logprobs_mode, self.max_model_len, self.dtype = "processed_logprobs", 128, "torch.float32"
        self.missing, self.sick, self.sick_with, self.cut, self.deaf, self.address = (), (), 503, (), False, ""
        self.modes = set()  # of the files that were read
        self.backend, self.group = None, None  # how weights reach it, if not through a folder
        self.here = threading.local()  # the connection that is answered
        for name, value in changes.items():
            setattr(self, name, value)

    def answer(self, path, content):
        """The status and the answer to a request."""
        self.calls.append((path, content))
        name = name_of(path)
        if name in self.missing:
            return 404, {"error": "Not Found"}
        return self.sick_with if name in self.sick else 200, getattr(self, name)(content)

    def health(self, _):
        return None

    def v1_models(self, _):
        return {"data": [{"id": "served"}]}

    def server_info(self, _):
        found = {"logprobs_mode": self.logprobs_mode, "max_model_len": self.max_model_len, "dtype": self.dtype}
        found["model"] = self.folder
        transfer = None if self.backend is None else {"backend": self.backend}
        return {"vllm_config": {"model_config": found, "weight_transfer_config": transfer}}

    def get_world_size(self, _):
        return {"world_size": 1}

    def init_weight_transfer_engine(self, content):
        info = content["init_info"]
        place = info["master_address"], info["master_port"], info["rank_offset"], info["world_size"]
        self.group = GlooGroup(*place, seconds=10.0).join()

    def start_weight_update(self, _):
        return {}

    def update_weights(self, content):
        info, weights = content["update_info"], {}
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(weights[name])
        self.model.load_weights(weights.items())
        return {}

    def finish_weight_update(self, _):
        return {}

    def collective_rpc(self, content):
        if content["method"] == "reload_weights" and not self.deaf:
            folder = Path(content["kwargs"]["weights_path"])
            self.modes.add((folder / "model.safetensors").stat().st_mode & 0o777)
            self.model.load_weights(load_file(folder / "model.safetensors").items())
        return {"results": [None]}

    def reset_prefix_cache(self, _):
        return {"success": True}

    def update_weight_version(self, content):
        self.version = content["new_version"]
        return {"success": True}

    def weight_info(self, _):
        return {"weight_version": self.version}

    def weight_checker(self, _):
        return {"checksums": {name: str(p.double().sum().item()) for name, p in self.model.named_parameters()}}

    def v1_completions(self, content):
        prompt = content.pop("prompt")
        return {
            "choices": [
                {"index": i, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
                for i, (tokens, logprobs, reason) in enumerate(self.model.draw(prompt, **content))
            ][::-1]
        }


def name_of(path):
    return path.partition("?")[0].strip("/").replace("/", "_")


@contextmanager
def serving(config, port=0, **changes):
    """A stand-in server on the loopback."""
    service = Service(config, **changes)
    connections = set()

    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            connections.add(self.connection)
            # A test may have hung up.
            with suppress(OSError):
                super().handle()
            connections.discard(self.connection)

        def do_GET(self):
            self._reply(None)

        def do_POST(self):
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, content):
            service.here.connection = self.connection
            status, answer = service.answer(self.path, content)
            body = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:5] if name_of(self.path) in service.cut else body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    service.address = f"http://127.0.0.1:{server.server_address[1]}"
    service.stop = lambda: (server.shutdown(), server.server_close())
    service.port = server.server_address[1]

    def die():
        """As a killed process: it listens no more, and its connections break."""
        service.stop()
        for connection in list(connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    service.die = die
    try:
        yield service
    finally:
        service.stop()
