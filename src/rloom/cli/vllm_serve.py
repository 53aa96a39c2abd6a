"""`rloom vllm-serve MODEL`: a vLLM server that a trainer can send weights to."""

from __future__ import annotations

import os
import shlex
from argparse import REMAINDER, Namespace

from rloom.cli.parser import Parser, count

SUMMARY = "start a vLLM server for vllm_mode='server'"
TRANSFERS = ("folder", "ipc", "nccl", "gloo")


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="the model that is trained: a name or a folder")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1); whoever reaches it can replace "
        "the server's weights")  # fmt: skip
    add("--port", type=int, default=8000, help="port (default 8000)")
    add("--dtype", help="what it computes in (default: bfloat16 on a GPU, else float32)")
    add("--transfer", choices=TRANSFERS, default="folder", help="how weights reach it: through a folder that trainer "
        "and server see (default), ipc on one GPU, nccl between GPUs, gloo between CPUs")  # fmt: skip
    add("--max-lora-rank", type=count, metavar="RANK", help="take LoRA adapters alone, of up to this rank")
    add("--max-model-len", type=count, metavar="N", help="tokens of prompt and completion (default: the model's)")
    add("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory, without a GPU of the "
        "host's (default: vLLM's, 0.92; without a GPU 0.3)")  # fmt: skip
    add("--tensor-parallel-size", type=count, metavar="N", help="GPUs that share the model (default 1)")
    add("--vllm-flags", nargs=REMAINDER, default=[], metavar="FLAG", help="all that follows goes to vLLM as it is")


def run(options: Namespace) -> int:
    """Become the server."""
    from rloom.generation.vllm.serving import Serve, server_command

    # As it is before vLLM is imported, which adds to it.
    environment = dict(os.environ)
    given = {name: value for name, value in vars(options).items() if value is not None}
    command, variables = server_command(Serve(**{**given, "vllm_flags": tuple(options.vllm_flags)}))
    typed = shlex.join([*(f"{name}={value}" for name, value in variables.items()), "python", *command[1:]])
    print(f"rloom: for RLOOConfig(use_vllm=True, vllm_mode='server', vllm_server_base_url='http://{options.host}:"
          f"{options.port}'); starting {typed}", flush=True)  # fmt: skip
    os.execve(command[0], command, environment | variables)
