"""SGLang's own layers on a CPU, without its compiled extension. Import this before SGLang."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_ins

sys.path.insert(0, os.environ["QAO_TEST_ENGINE"])
stand_ins.install(
    *("IPython", "cachetools", "cbor2", "fastapi", "llguidance", "openai", "openai_harmony", "orjson"),
    *("partial_json_parser", "prometheus_client", "pybase64", "sentencepiece", "torchao", "torchvision", "triton"),
    *("tvm_ffi", "uvloop", "xgrammar", "zmq"),
)

import transformers  # noqa: E402
import triton.runtime  # noqa: E402

# SGLang 0.5.16 asks for triton's device while it is imported, and registers models that newer transformers have.
triton.runtime.driver = None
transformers.AutoConfig.register = partial(transformers.AutoConfig.register, exist_ok=True)

import qao.integrations.sglang  # noqa: E402

qao.integrations.sglang.register()  # as its entry point does: before anything of SGLang is imported

import fused_support as fused  # noqa: E402
import pytest  # noqa: E402
import sglang.srt.layers.linear as layers  # noqa: E402
import torch  # noqa: E402
from loaded import ATTENTION, HEAD, MLP, K, Layer, N  # noqa: E402
from qao.integrations.sglang import method as qaos  # noqa: E402
from qao.integrations.sglang.adapter import settings  # noqa: E402
from qao.integrations.sglang.experts import QaoExpertsMethod  # noqa: E402
from sglang.srt.layers import quantization  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton import layer as moe_layer  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import standard  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.quantization import fp8, marlin_utils, moe_wna16  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args  # noqa: E402
from torch import Tensor  # noqa: E402


@contextmanager
def shard(rank: int, size: int) -> Iterator[None]:
    """Creates layers as in one of ``size`` processes."""
    group = SimpleNamespace(rank_in_group=rank, world_size=size)
    with ExitStack() as stack:
        if hasattr(layers, "_resolve_linear_group"):
            stack.enter_context(mock.patch.object(layers, "_resolve_linear_group", lambda parallel_group: group))
            stack.enter_context(get_parallel().override(tp_group=group))
        else:  # before SGLang 0.5.22
            stack.enter_context(get_parallel().override(tp_rank=rank, tp_size=size, tp_group=group))
            stack.enter_context(mock.patch.object(layers, "get_tp_group", lambda: group, create=True))
        yield


_READS_UE8M0 = hasattr(fp8.Fp8Config(True), "scale_fmt")
UE8M0 = pytest.mark.skipif(not _READS_UE8M0, reason="this version does not read the format of fp8 scales")

_MAKE: dict[str, Any] = {
    "column": lambda **options: layers.ColumnParallelLinear(K, N, prefix=f"{MLP}.fc1", **options),
    "row": lambda **options: layers.RowParallelLinear(K, N, prefix=f"{MLP}.down_proj", reduce_results=False, **options),
    "qkv": lambda **options: layers.QKVParallelLinear(K, HEAD, 8, 4, prefix=f"{ATTENTION}.qkv_proj", **options),
    "gate_up": lambda **options: layers.MergedColumnParallelLinear(K, [N, N], prefix=f"{MLP}.gate_up_proj", **options),
}


class Loaded(Layer):
    def __init__(self, kind: str, config: Any, states: list[dict[str, Tensor]], rank: int = 0, size: int = 1) -> None:
        super().__init__(_MAKE[kind], shard, kind, config, states, rank, size)

    @property
    def served(self) -> bool:
        """Whether qao's operators multiply it."""
        return type(self.layer.quant_method) is qaos.QaoLayoutMethod


@contextmanager
def engine(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """A process of SGLang that makes, loads and runs a model of ``dtype``, which asks for the GPU: one of 9.0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda *args: (9, 0)),
            mock.patch.object(marlin_utils, "get_device_capability", lambda *args: (9, 0)),
            mock.patch.object(moe_wna16, "get_device_capability", lambda *args: (9, 0)),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def load(
    method: str,
    kind: str,
    config: dict[str, Any],
    states: list[dict[str, Tensor]],
    rank: int = 0,
    size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Loaded:
    """The layer that SGLang creates for ``--quantization method`` or for a checkpoint with that method."""
    try:
        with engine(dtype):
            own = quantization.QUANTIZATION_METHODS[method].from_config(config)
            return Loaded(kind, own, states, rank, size)
    except ImportError as error:
        if "is not supported now" in str(error):
            pytest.skip("this version rejects the checkpoint")
        raise


def make(method: str, config: dict[str, Any]) -> Loaded:
    """A layer that is created but not loaded."""
    with engine(), mock.patch.object(Loaded, "load", lambda self, states: None):
        return Loaded("column", quantization.QUANTIZATION_METHODS[method].from_config(config), [{}])


class Experts:
    """SGLang's fused experts, as one of ``ranks`` processes has them: each a part of all, or (``ep``) some of them."""

    def __init__(
        self, method: str, config: dict[str, Any], rank: int = 0, ranks: int = 1, ep: bool = False, **options: Any
    ) -> None:
        part, whole = (rank, ranks), (0, 1)
        names = {"moe_ep": part if ep else whole, "moe_tp": whole if ep else part, "tp": part, "attn_tp": part}
        self.parallel = {
            f"{name}_{what}": number
            for name, of in names.items()
            for what, number in zip(("rank", "size"), of, strict=True)
        }
        self.parallel["tp_group"] = SimpleNamespace(rank_in_group=rank, world_size=ranks, device="cpu")
        with self.process():
            own = quantization.QUANTIZATION_METHODS[method].from_config(config)
            options = {"top_k": fused.TOP, "prefix": fused.PREFIX} | options
            self.layer = FusedMoE(fused.E, fused.K, fused.WIDTH, 0, quant_config=own, **options)

    @contextmanager
    def process(self) -> Iterator[None]:
        arguments, parallel = get_context().override_server_args(device="cpu"), get_parallel().override(**self.parallel)
        device = mock.patch.object(standard, "get_device", lambda: "cpu")
        # Older versions ask functions for the group.
        group = {"get_tp_group": lambda: self.parallel["tp_group"], "create": True}
        groups = mock.patch.multiple(moe_layer, **group), mock.patch.multiple(moe_wna16, **group)
        with arguments, parallel, device, groups[0], groups[1], engine(fused.DTYPE), torch.no_grad():
            yield

    def load(self, states: list[fused.State]) -> None:
        """Loads the tensors of experts as models do."""
        mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", fused.E)
        parameters = {f"{fused.PREFIX}.{name}": one for name, one in self.layer.named_parameters()}
        with self.process():
            for begin, of, expert, matrix in mapping:
                for name, tensor in states[expert][matrix].items():
                    stored = f"{fused.PREFIX.removesuffix('experts')}{of}{name}"
                    target = parameters[stored.replace(of, begin)]
                    options = {"shard_id": matrix, "expert_id": expert}
                    target.weight_loader(target, tensor, stored.replace(of, begin), **options)
            self.layer.quant_method.process_weights_after_loading(self.layer)

    @property
    def served(self) -> bool:
        return isinstance(self.layer.quant_method, QaoExpertsMethod)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        with self.process():
            return self.layer(x, StandardTopKOutput(weights, ids, None))


def override(namespace: str, **values: Any) -> AbstractContextManager[Any]:
    """Other server arguments."""
    found = settings(namespace)
    if found is get_server_args():  # SGLang 0.5.16
        return get_context().override_server_args(device="cpu", **values)
    return found.override(**values)


@contextmanager
def no_triton() -> Iterator[None]:
    """A context for torch.compile, which would take types from the stand-in for triton."""
    from torch._dynamo import utils

    types = {one for one in utils.common_constant_types if isinstance(one, type)}
    with (
        mock.patch.object(torch.utils._triton, "has_triton_package", lambda: False),
        mock.patch("torch._dynamo.guards.common_constant_types", types),
    ):
        yield
