"""TRL's options for vLLM: which of them mean something together, and what they come to as `engine`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rloom.config.topic import Topic, idle, option
from rloom.errors import ConfigError, check_choice

COLOCATE, SERVER = "colocate", "server"

MOST_SECONDS = 7 * 24 * 3600.0

OF_ONE_MODE = {
    COLOCATE: (
        "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length",
        "vllm_tensor_parallel_size", "compile_generation",
    ),
    SERVER: (
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_weights_dir",
        "vllm_group_port",
    ),
}  # fmt: skip
"""Options that mean something in one mode of vLLM alone."""


@dataclass
class VllmTopic(Topic):
    """How vLLM is run, under TRL's names."""

    use_vllm: bool = option(False, 'Generate with vLLM; the same as `engine="vllm"`.')
    vllm_mode: str = option(COLOCATE, 'How vLLM runs: "colocate" (in this process) or "server".')
    vllm_model_impl: str = option("vllm", 'Model implementation inside vLLM: "vllm" or "transformers".')
    vllm_enable_sleep_mode: bool = option(False, "Let a colocated vLLM's GPU memory go while training.")
    vllm_structured_outputs_regex: str | None = option(None, "Completions must match this expression.")
    vllm_server_base_url: str | None = option(None, "Address of the vLLM server, or several with commas between.")
    vllm_server_host: str = option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the vLLM server.")
    vllm_group_port: int = option(
        51216, "Port of the trainer at which vLLM servers that take weights by NCCL or gloo meet it; 0: any free one."
    )
    vllm_weights_dir: str | None = option(
        None, "Folder that trainer and vLLM server both see, for weights on their way. Unset: in `output_dir`."
    )
    vllm_gpu_memory_utilization: float = option(0.3, "Share of the device's memory for a colocated vLLM.")
    vllm_max_model_length: int | None = option(None, "Context length of a colocated vLLM; unset: the model's.")
    vllm_tensor_parallel_size: int = option(1, "Tensor parallelism of a colocated vLLM: 1.")

    def resolve_vllm(self) -> None:
        """TRL's `use_vllm` and our `engine` say the same, or contradict each other."""
        if self.use_vllm and self.engine not in (None, "vllm"):
            raise ConfigError(f"use_vllm=True and engine={self.engine!r} contradict each other: leave one of them out")
        if "use_vllm" in self._given and not self.use_vllm and self.engine == "vllm":
            raise ConfigError("use_vllm=False and engine='vllm' contradict each other: leave one of them out")
        changed = [f.name for f in fields(self) if f.name.startswith("vllm_") and getattr(self, f.name) != f.default]
        if self.use_vllm or self.engine == "vllm":
            self.use_vllm = True
            self._check_vllm([*changed, *(["compile_generation"] if self.compile_generation is not None else [])])
        elif changed:
            raise idle(changed[0], "use_vllm=True")

    def _check_vllm(self, changed: list[str]) -> None:
        check_choice("vllm_mode", self.vllm_mode, OF_ONE_MODE)
        check_choice("vllm_model_impl", self.vllm_model_impl, ("vllm", "transformers"))
        for mode, names in OF_ONE_MODE.items():
            for name in names:
                if name in changed and mode != self.vllm_mode:
                    where = "a flag of the server" if self.vllm_mode == SERVER else "for vllm_mode='server'"
                    raise ConfigError(f"`{name}` has no effect with vllm_mode={self.vllm_mode!r}: it is {where}")
        if self.cache_implementation is not None:
            raise ConfigError(
                "`cache_implementation` is for `model.generate`: leave it out, or set engine='transformers'"
            )
        if self.vllm_tensor_parallel_size != 1:
            raise ConfigError(
                f"vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}: a colocated vLLM runs on this process' "
                "device alone; set it to 1, or vllm_mode='server', whose server may have as many as it likes"
            )
        if self.world_size > 1 and self.vllm_mode == COLOCATE:
            raise ConfigError(
                f"vllm_mode='colocate' generates for one process, and there are {self.world_size}: leave `engine` and "
                "`use_vllm` unset, or set vllm_mode='server'"
            )
        self.require("vllm_gpu_memory_utilization", 0 < self.vllm_gpu_memory_utilization <= 1, "in (0, 1]")
        self.require("vllm_server_timeout", 0 < self.vllm_server_timeout <= MOST_SECONDS, "above 0, a week at most")
        servers = self.vllm_servers()
        # Each server meets the trainer at a port of its own.
        last = 65536 - len(servers)
        self.require("vllm_group_port", 0 <= self.vllm_group_port <= last, f"from 0 to {last}")
        # As `Client` reads them.
        if len({one.removeprefix("http://").rstrip("/") for one in servers}) < len(servers):
            raise ConfigError(f"vllm_server_base_url={self.vllm_server_base_url!r} names a server twice")

    def vllm_servers(self) -> tuple[str, ...]:
        """The addresses of the vLLM servers.

        >>> from rloom import RLOOConfig
        >>> address = "http://a:8000, http://b:8000"
        >>> RLOOConfig("o", use_vllm=True, vllm_mode="server", vllm_server_base_url=address).vllm_servers()
        ('http://a:8000', 'http://b:8000')
        """
        named = [one.strip() for one in (self.vllm_server_base_url or "").split(",")]
        found = tuple(one for one in named if one)
        return found or (f"http://{self.vllm_server_host}:{self.vllm_server_port}",)
