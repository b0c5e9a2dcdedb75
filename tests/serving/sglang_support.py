"""SGLang's own layers on this machine's CPU, without its compiled part: import this before anything of SGLang."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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

import qao.integrations.sglang  # noqa: E402

qao.integrations.sglang.register()  # as its entry point does: before anything of SGLang is imported

import sglang.srt.layers.linear as layers  # noqa: E402
from loaded import ATTENTION, HEAD, MLP, K, Layer, N  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from torch import Tensor  # noqa: E402


@contextmanager
def shard(rank: int, size: int) -> Iterator[None]:
    """Layers that are made here are those of one of ``size`` processes."""
    group = SimpleNamespace(rank_in_group=rank, world_size=size)
    with (
        mock.patch.object(layers, "_resolve_linear_group", lambda parallel_group: group),
        get_parallel().override(tp_group=group),
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
        super().__init__(_MAKE[kind], shard, kind, config, states, rank, size)
