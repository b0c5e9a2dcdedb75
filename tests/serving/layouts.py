"""Linear layers of checkpoints in third-party layouts, for any engine: tensors and expected results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accuracy import check_close
from loaded import KINDS, K, Layer
from ops_schemes import Activation
from test_checkpoints_compressed_tensors import CASES, compressed, config_of, decompressed, scheme_of
from test_checkpoints_gptq_awq import Weight
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYERS = [*((kind, size, "bf16") for kind in KINDS for size in (1, 2)), ("qkv", 2, "fp16"), ("row", 2, "fp16")]
FLOAT = Activation()
INT8, INT8_ASYM = Activation("int8"), Activation("int8", symmetric=False)
E4M3, E4M3_ALL, E4M3_STATIC = (
    Activation("fp8"),
    Activation("fp8", group_size=0),
    Activation("fp8", group_size=0, static_scale=0.25),
)
E4M3_BLOCK = Activation("fp8", group_size=128)


def states_of(
    case: str, kind: str, dtype: torch.dtype, one_scale: bool = False
) -> tuple[dict[str, Any], list[dict[str, Tensor]], list[Tensor]]:
    """The config of a compressed-tensors checkpoint, its tensors for each matrix, and their float64 values.

    ``one_scale``: joined e4m3 matrices share a scale, if they have one each.
    """
    scheme = scheme_of(CASES[case][0])
    scheme.targets = ["Linear"]
    if "packed" in case:
        scheme.format = "pack-quantized"
    states = [compressed(scheme, rows, K, dtype) for _, _, rows in KINDS[kind]]
    if one_scale and scheme.weights.type == "float" and scheme.weights.strategy == "tensor":
        for state in states:
            state["weight_scale"] = states[0]["weight_scale"]
    dense = [decompressed({**state, "weight_scale": state["weight_scale"].double()}, scheme) for state in states]
    return config_of({"group_0": scheme}, format=scheme.format), states, dense


def check(loaded: Layer, dense: list[Tensor], biases: list[Tensor], what: Activation, dtype: torch.dtype) -> None:
    part, bias = loaded.part_of(dense), loaded.part_of(biases) if biases else None
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, K, dtype=dtype)
        own = x[:, loaded.columns()].contiguous()
        check_close(loaded(x), own, part, bias, what.seen(own), what.slack(own, part))


def check_rows_alone(loaded: Layer) -> None:
    """A row has the same bits alone and among others."""
    x = torch.randn(40, K, dtype=torch.bfloat16)
    assert torch.equal(loaded(x)[7:8], loaded(x[7:8]))


def add_bias(kind: str, states: list[dict[str, Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Add a bias next to the weights of a layer that adds it before the reduction over ranks."""
    if kind == "row":
        return []
    biases = [torch.randn(rows, dtype=dtype) for _, _, rows in KINDS[kind]]
    for state, bias in zip(states, biases, strict=True):
        state["bias"] = bias
    return biases


class Checkpoint:
    """A GPTQ or AWQ weight for each matrix of a layer; ``zero`` None: each has its own zero points."""

    def __init__(self, kind: str, dtype: torch.dtype, group_size: int, **options: Any) -> None:
        self.weights = [Weight(rows, K, group_size, dtype=dtype, **options) for _, _, rows in KINDS[kind]]

    @property
    def dense(self) -> list[Tensor]:
        return [weight.dequantized.double() for weight in self.weights]  # exact in float32

    def states(self, names: tuple[str, ...], make: Callable[[Weight], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [{name: make(weight)[f"a.{name}"] for name in names} for weight in self.weights]


def fp8_checkpoint(
    kind: str, scheme: str, scales: tuple[float, ...] = (0.004,)
) -> tuple[dict[str, Any], list[dict[str, Tensor]], list[Tensor]]:
    """As ``states_of``, in the layouts of Hugging Face ("dynamic", "static") and DeepSeek ("block").

    ``scales``: of the matrices in turn, where they have one each.
    """
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if scheme == "static" else "dynamic"}
    if scheme == "block":
        config["weight_block_size"] = [128, 128]
    states, dense = [], []
    for index, (_, _, rows) in enumerate(KINDS[kind]):
        weight = torch.randn(rows, K).mul(60).to(torch.float8_e4m3fn)
        scale = torch.tensor(scales[index % len(scales)])
        if scheme == "block":
            scale = torch.rand(rows // 128, K // 128) * 0.01 + 0.001
        states.append({"weight": weight, "weight_scale_inv" if scheme == "block" else "weight_scale": scale})
        if scheme == "static":
            states[-1]["input_scale"] = torch.tensor(0.25 / (index + 1))  # the largest is that of all
        by_row = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1) if scheme == "block" else scale
        dense.append(weight.double() * by_row.double())
    return config, states, dense
