"""The quantization_config of compressed-tensors: groups, target layers, and the scheme of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...schemes import (
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Fp4WeightOnly,
    Granularity,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    Scheme,
)
from ..base import CheckpointError
from ..settings import Settings, matches

__all__ = ["FP4_ARGS", "Args", "Group", "group_of", "groups_of", "layer_scheme"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FP4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
# Strategy, group size and scale dtypes of each format.
FP4_ARGS = {"nvfp4": ("tensor_group", 16, "torch.float8_e4m3fn"), "mxfp4": ("group", 32, "torch.uint8")}
_GRANULARITY: dict[str, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}


@dataclass(frozen=True)
class Args:
    """QuantizationArgs of weights or of activations."""

    bits: int
    kind: str  # "int" or "float"
    symmetric: bool
    strategy: str
    group_size: int
    static: bool

    @property
    def granularity(self) -> Granularity:
        """qao's name for the granularity of e4m3 weights."""
        return _GRANULARITY[self.strategy]


@dataclass(frozen=True)
class Group:
    name: str  # key in the config, for messages
    targets: tuple[str, ...]
    weights: Args
    inputs: Args | None
    outputs: bool  # whether outputs are to be quantized
    fast_accum: bool
    inputs_left: bool = False  # whether the config quantizes activations but qao keeps them in float (e2m1 weights)
    whole_zeros: bool = False  # as in Int4WeightOnly

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {message}")


def groups_of(settings: Settings) -> list[Group]:
    """Parse the groups of a config and check that qao has kernels for each."""
    if settings.child("transform_config"):
        raise CheckpointError(
            f"{settings.where}: transform_config asks for transforms of activations, which qao does not support"
        )
    sparsity = settings.child("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise CheckpointError(f"{settings.where}: sparse weights ({sparsity.text('format', '')}) are not supported")
    if settings.child("moe_sparsity_config"):
        raise CheckpointError(f"{settings.where}: moe_sparsity_config asks for a model without some of its experts")
    own = settings.children("qao")
    return [
        _group(group, settings.text("format", "pack-quantized"), own.get(name))
        for name, group in settings.children("config_groups").items()
        if group.child("weights") is not None
    ]


def _group(settings: Settings, format: str, own: Settings | None) -> Group:
    if settings.values.get("format") is not None:
        format = settings.text("format", format)
    if format not in (*_FORMATS, *_FP4, "mixed-precision"):
        known = ", ".join((*_FORMATS, *_FP4))
        raise CheckpointError(f"{settings.where}: the format {format!r:.40} is not supported; {known} are")
    weights, inputs = settings.child("weights"), settings.child("input_activations")
    assert weights is not None
    of_weights = _weight_args(weights)
    fp4 = of_weights.kind == "float" and of_weights.bits == 4
    return Group(
        settings.where,
        tuple(settings.texts("targets")),
        of_weights,
        None if inputs is None or fp4 else _input_args(inputs, of_weights),
        settings.child("output_activations") is not None,
        own is not None and own.flag("fast_accum", False),
        fp4 and inputs is not None,
        own is not None and own.flag("whole_zeros", False),
    )


def _args(settings: Settings, dynamic: bool, default: str) -> Args:
    group_size = settings.integer("group_size", -1)
    if settings.values.get("group_size") is not None:
        default = "group" if group_size > 0 else "channel"
    strategy = settings.text("strategy", default)
    kind = settings.text("type", "int")
    if kind not in ("int", "float"):
        raise settings.fail("type", '"int" or "float"')
    bits = settings.integer("num_bits", 8, low=1, high=32)
    return Args(bits, kind, settings.flag("symmetric", True), strategy, group_size, not dynamic)


def _weight_args(settings: Settings) -> Args:
    args = _args(settings, False, "tensor")
    where = settings.where
    if (args.kind, args.bits) == ("float", 4):
        return _fp4_args(settings, args)
    if (args.kind, args.bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise CheckpointError(f"{where}: {args.kind} of {args.bits} bits; qao supports int4, int8, e4m3 and e2m1")
    strategies = ("tensor", "channel", "block") if args.kind == "float" else ("tensor", "channel", "group")
    if args.strategy not in strategies:
        raise settings.fail("strategy", f"one of {', '.join(strategies)} for {args.kind} weights of {args.bits} bits")
    if args.strategy == "group" and args.group_size < 1:
        raise settings.fail("group_size", "positive with the strategy group")
    if settings.values.get("scale_dtype") not in (None, "torch.bfloat16", "torch.float16", "torch.float32"):
        raise settings.fail("scale_dtype", "a float dtype (MX formats are not supported)")
    if not args.symmetric and (args.kind, args.bits) != ("int", 4):
        raise CheckpointError(f"{where}: zero points in eight bits; qao supports only symmetric weights there")
    if args.strategy == "block" and settings.values.get("block_structure") not in ([128, 128], "128x128"):
        raise settings.fail("block_structure", "[128, 128]")
    return args


def _fp4_args(settings: Settings, args: Args) -> Args:
    """Parse the QuantizationArgs of MXFP4 and NVFP4."""
    for strategy, group_size, dtype in FP4_ARGS.values():
        if (args.strategy, args.group_size) == (strategy, group_size):
            if settings.values.get("scale_dtype") not in (None, dtype):
                raise settings.fail("scale_dtype", f"{dtype} in groups of {group_size}")
            if not args.symmetric:
                raise settings.fail("symmetric", "true for float weights")
            return args
    expected = " or ".join(f"{strategy} with groups of {size}" for strategy, size, _ in FP4_ARGS.values())
    raise settings.fail("strategy", f"{expected} for float weights of 4 bits")


def _input_args(settings: Settings, weights: Args) -> Args:
    dynamic = settings.values.get("dynamic", False)
    if not isinstance(dynamic, bool):
        raise settings.fail("dynamic", "true or false")
    args = _args(settings, dynamic, "token" if dynamic else "tensor")
    if args.bits != 8:
        raise settings.fail("num_bits", "8: qao supports activations of eight bits only")
    if args.kind == "float" and not args.symmetric:
        raise settings.fail("symmetric", "true for float activations")
    if (
        args.kind == "int"
        and weights.kind == "float"
        or args.kind == "float"
        and (weights.kind, weights.bits) == ("int", 8)
    ):
        raise settings.fail(
            "type", f"another: no kernel has this type with {weights.kind} weights of {weights.bits} bits"
        )
    blocks = args.strategy == "group" and args.group_size == 128 and dynamic
    if (weights.strategy == "block") != blocks or args.strategy not in ("tensor", "token", "group"):
        raise settings.fail("strategy", "token or tensor; dynamic groups of 128 for, and only for, weights by block")
    return args


def group_of(groups: list[Group], settings: Settings, name: str) -> Group:
    """The group of a layer. Targets match by name first, then by pattern, then by class."""
    where = settings.where
    if any(_matches(target, name, where) for target in settings.texts("ignore")):
        raise CheckpointError(f"{where}: {name} is in the ignore list, but its tensors are quantized")
    for rank in (0, 1, 2):
        for group in groups:
            if any(_rank(target, name, where) == rank for target in group.targets):
                return group
    raise CheckpointError(f"{where}: {name} is quantized, but no group of config_groups targets it")


def _rank(target: str, name: str, where: str) -> int | None:
    """Rank of a match: 0 name, 1 pattern, 2 class (assumed, since files do not store classes); None: no match."""
    if target == name:
        return 0
    if target.startswith("re:"):
        return 1 if _matches(target, name, where) else None
    return 2 if target.endswith("Linear") or target == "LinearBase" else None


def _matches(target: str, name: str, where: str) -> bool:
    return matches(target[3:], name, where) if target.startswith("re:") else target == name


def layer_scheme(
    group: Group, group_size: int, scale_dtype: torch.dtype, activation_scale: float | None
) -> tuple[Scheme, list[str]]:
    """The scheme of a layer, and notes on settings of the group that are not applied exactly."""
    weights, inputs = group.weights, group.inputs
    notes = ["the layer's result is not quantized"] if group.outputs else []
    if inputs is not None and activation_scale is None:
        if inputs.static:
            notes.append("static input scales are ignored: activations are quantized with one scale per token")
        elif inputs.strategy == "tensor" and (weights.kind, weights.strategy) != ("float", "tensor"):
            notes.append("activations are quantized with one scale per token, not one per tensor")
    if group.inputs_left:
        notes.append("activations are not quantized: with e2m1 weights they keep their dtype")
    if weights.kind == "float" and weights.bits == 4:
        return Fp4WeightOnly("nvfp4" if weights.group_size == 16 else "mxfp4"), notes
    if weights.kind == "float":
        if inputs is None:
            return Float8WeightOnly(weights.granularity), notes
        by_token = weights.strategy == "tensor" and inputs.strategy == "token"
        granularity: Granularity = "row" if by_token else weights.granularity
        fast = group.fast_accum
        if activation_scale is None:
            return Float8DynamicActivationFloat8Weight(granularity, fast_accum=fast), notes
        return Float8StaticActivationFloat8Weight(
            granularity, activation_scale=activation_scale, fast_accum=fast
        ), notes
    if weights.bits == 8:
        if inputs is None:
            return Int8WeightOnly(), notes
        return Int8DynamicActivationInt8Weight(symmetric_activations=inputs.symmetric), notes
    four_bits: Any = {"symmetric": weights.symmetric, "scale_dtype": scale_dtype, "whole_zeros": group.whole_zeros}
    if inputs is None:
        return Int4WeightOnly(group_size, **four_bits), notes
    if inputs.kind == "float":
        fast = group.fast_accum and group_size == -1 and weights.symmetric
        return Float8DynamicActivationInt4Weight(group_size, fast_accum=fast, **four_bits), notes
    return Int8DynamicActivationInt4Weight(group_size, symmetric_activations=inputs.symmetric, **four_bits), notes
