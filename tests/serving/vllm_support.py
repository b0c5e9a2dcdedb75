"""vLLM's own layers on this machine's CPU, without its compiled part: import this before anything of vLLM."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_ins

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
sys.path.insert(0, os.environ["QAO_TEST_ENGINE"])
stand_ins.install(
    *("zmq", "cachetools", "msgspec", "openai", "openai_harmony", "fastapi", "prometheus_client", "cbor2", "pybase64"),
    *("uvloop", "cpuinfo", "xgrammar", "partial_json_parser", "llguidance", "torchao"),
)

import torch  # noqa: E402
import vllm.model_executor.layers.linear as layers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor import parameter  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

# Of vLLM's compiled operators, the one that it joins matrices with that have a scale each.
_operators = torch.library.Library("_C", "FRAGMENT")
_operators.define(
    "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()"
)


@torch.library.impl(_operators, "static_scaled_fp8_quant", "CPU")
def _static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, shape: Any = None) -> None:
    result.copy_((input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


N, K = 256, 512  # of one matrix
HEAD = 64  # 8 heads for queries, 4 for keys and values


@contextmanager
def engine(dtype: torch.dtype) -> Iterator[None]:
    """What is there in a process of vLLM while it makes, loads and runs a model of ``dtype``."""
    config = VllmConfig()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            store = Path(tempfile.mkdtemp(), "store").as_uri()
            options = {"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo"}
            parallel_state.init_distributed_environment(**options, distributed_init_method=store)
            parallel_state.initialize_model_parallel(1)
        config.model_config = SimpleNamespace(dtype=dtype, quantization_config=None, is_moe=False)
        yield


@contextmanager
def shard(rank: int, size: int) -> Iterator[None]:
    """Layers that are made here are those of one of ``size`` processes."""
    with (
        mock.patch.object(layers, "get_tensor_model_parallel_rank", lambda: rank),
        mock.patch.object(layers, "get_tensor_model_parallel_world_size", lambda: size),
        mock.patch.object(parameter, "get_tensor_model_parallel_rank", lambda: rank),
        mock.patch.object(parameter, "get_tensor_model_parallel_world_size", lambda: size),
    ):
        yield


# A kind of layer: how vLLM makes it, and the matrices it joins: what a checkpoint calls them, their id, their rows.
Part = tuple[str, Any, int]
KINDS: dict[str, tuple[Callable[..., nn.Module], list[Part]]] = {
    "column": (
        lambda **options: layers.ColumnParallelLinear(K, N, prefix="model.layers.0.mlp.fc1", **options),
        [("model.layers.0.mlp.fc1", None, N)],
    ),
    "row": (
        lambda **options: layers.RowParallelLinear(
            K, N, prefix="model.layers.0.mlp.down_proj", reduce_results=False, **options
        ),
        [("model.layers.0.mlp.down_proj", None, N)],
    ),
    "qkv": (
        lambda **options: layers.QKVParallelLinear(
            K, HEAD, 8, 4, prefix="model.layers.0.self_attn.qkv_proj", **options
        ),
        [(f"model.layers.0.self_attn.{one}_proj", one, HEAD * (8 if one == "q" else 4)) for one in "qkv"],
    ),
    "gate_up": (
        lambda **options: layers.MergedColumnParallelLinear(
            K, [N, N], prefix="model.layers.0.mlp.gate_up_proj", **options
        ),
        [("model.layers.0.mlp.gate_proj", 0, N), ("model.layers.0.mlp.up_proj", 1, N)],
    ),
}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Loaded:
    """A layer of vLLM with the weights of a checkpoint, as one of ``size`` processes has it."""

    def __init__(self, kind: str, config: Any, states: list[dict[str, Tensor]], rank: int = 0, size: int = 1) -> None:
        make, parts = KINDS[kind]
        bias = "bias" in states[0]
        config.packed_modules_mapping = FUSED
        self.rank, self.size, self.kind = rank, size, kind
        dtype = get_current_vllm_config().model_config.dtype
        with shard(rank, size), set_default_torch_dtype(dtype):
            self.layer = make(quant_config=config, bias=bias)
            parameters = dict(self.layer.named_parameters())
            for (_, part, _), state in zip(parts, states, strict=True):
                for name, tensor in state.items():
                    target = parameters[name]
                    target.weight_loader(target, tensor, *([] if part is None else [part]))
            self.layer.quant_method.process_weights_after_loading(self.layer)

    @property
    def kernel(self) -> Any:
        """The linear kernel that vLLM chose."""
        owners = (self.layer.quant_method, getattr(self.layer, "scheme", None))
        names = ("kernel", "fp8_linear", "linear_kernel")
        return next(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))

    def columns(self) -> slice:
        """Of x, that this process multiplies."""
        share = K // self.size
        return slice(self.rank * share, (self.rank + 1) * share) if self.kind == "row" else slice(0, K)

    def __call__(self, x: Tensor) -> Tensor:
        with shard(self.rank, self.size), torch.no_grad():
            return self.layer(x[..., self.columns()].contiguous())[0]

    def part_of(self, matrices: list[Tensor]) -> Tensor:
        """The rows and columns of the joined matrices (or biases) that this process has."""
        parts = []
        for matrix, (_, _, rows) in zip(matrices, KINDS[self.kind][1], strict=True):
            if self.kind == "row":
                parts.append(matrix[:, self.columns()])
                continue
            share = rows // self.size
            parts.append(matrix[self.rank * share : (self.rank + 1) * share])
        return torch.cat(parts)
