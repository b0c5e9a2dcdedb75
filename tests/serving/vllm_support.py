"""vLLM's own layers on a CPU, without its compiled extension. Import this before anything of vLLM."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import vllm_stand_ins  # noqa: F401  # first: it makes vLLM importable

# isort: split
import qao.integrations.vllm

if "vllm" not in sys.modules:
    qao.integrations.vllm.register()  # as its entry point does: before layers are imported

import torch  # noqa: E402
import vllm.model_executor.layers.linear as layers  # noqa: E402
from loaded import ATTENTION, HEAD, MLP, K, Layer, N  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor import parameter  # noqa: E402
from vllm.model_executor.kernels import linear  # noqa: E402, F401  # with which qao.integrations.vllm.kernels comes
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402

kernels: Any = sys.modules.get("qao.integrations.vllm.kernels")


# Compiled operators of vLLM that loading needs: one requantizes joined matrices that have a scale each, one arranges
# float weights for GEMMs that no test runs, and layers of vLLM 0.30 hold one without running it.
_operators = torch.library.Library("_C", "FRAGMENT")
_operators.define("silu_and_mul(Tensor(a!) result, Tensor input) -> ()")
_operators.define("static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, int[]? shape) -> ()")
_operators.define("convert_weight_packed(Tensor weight) -> Tensor")


@torch.library.impl(_operators, "static_scaled_fp8_quant", "CPU")
def _static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, shape: Any) -> None:
    result.copy_((input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


@torch.library.impl(_operators, "convert_weight_packed", "CPU")
def _convert_weight_packed(weight: Tensor) -> Tensor:
    return weight.clone()


@contextmanager
def log_lines() -> Iterator[list[logging.LogRecord]]:
    """Messages of qao's logger in vLLM from now on."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.qao")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def engine(dtype: torch.dtype) -> Iterator[None]:
    """The environment of a vLLM process while it creates, loads and runs a model of ``dtype``."""
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
    """Creates layers as in one of ``size`` processes."""
    with (
        mock.patch.object(layers, "get_tensor_model_parallel_rank", lambda: rank),
        mock.patch.object(layers, "get_tensor_model_parallel_world_size", lambda: size),
        mock.patch.object(parameter, "get_tensor_model_parallel_rank", lambda: rank),
        mock.patch.object(parameter, "get_tensor_model_parallel_world_size", lambda: size),
    ):
        yield


_MAKE: dict[str, Any] = {
    "column": lambda **options: layers.ColumnParallelLinear(K, N, prefix=f"{MLP}.fc1", **options),
    "row": lambda **options: layers.RowParallelLinear(K, N, prefix=f"{MLP}.down_proj", reduce_results=False, **options),
    "qkv": lambda **options: layers.QKVParallelLinear(K, HEAD, 8, 4, prefix=f"{ATTENTION}.qkv_proj", **options),
    "gate_up": lambda **options: layers.MergedColumnParallelLinear(K, [N, N], prefix=f"{MLP}.gate_up_proj", **options),
}


class Loaded(Layer):
    def __init__(self, kind: str, config: Any, states: list[dict[str, Tensor]], rank: int = 0, size: int = 1) -> None:
        with set_default_torch_dtype(get_current_vllm_config().model_config.dtype):
            super().__init__(_MAKE[kind], shard, kind, config, states, rank, size)

    @property
    def kernel(self) -> Any:
        """The linear kernel that vLLM chose."""
        owners = (self.layer.quant_method, getattr(self.layer, "scheme", None))
        names = ("kernel", "fp8_linear", "linear_kernel")
        return next(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))
