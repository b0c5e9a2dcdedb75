"""AutoRound checkpoints ("auto-round"): GPTQ or AWQ packing with per-layer settings.

packing_format  "auto_round:auto_gptq", "auto_round:gptq"      GPTQ version 1: stores zero points minus 1
                "auto_round", "auto_round:gptqmodel", others   GPTQ version 2: stores zero points unchanged
                "auto_round:auto_awq"                          AWQ in the gemm layout
extra_config    maps a layer name or pattern to the bits, group_size, sym and data_type that differ
"""

from __future__ import annotations

import re

from . import awq, gptq
from .base import CheckpointError, QuantizedLayer
from .files import TensorFiles
from .plain import check_layer_name
from .settings import Settings, matches

__all__ = ["read"]

_REMEDY = 'Export it with format="llm_compressor", or quantize the float model: scheme='


def read(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of an AutoRound checkpoint.

    Raises:
        CheckpointError: also for non-integer weights and for quantized activations.
    """
    packing = settings.text("packing_format", settings.text("backend", "auto_round:gptq")).replace("-", "_")
    packing = "auto_round:gptq" if packing == "auto" else packing
    known = ("auto_round", "autoround", "auto_gptq", "auto_awq", "gptq", "awq")
    if not packing.startswith(known) or any(word in packing for word in ("llm_compressor", "fp", "mx", "rrq")):
        raise CheckpointError(
            f"{settings.where}: the packing_format {packing!r:.60} of AutoRound is not supported; those of GPTQ and "
            f"AWQ are. {_REMEDY}"
        )
    first = "gptq" in packing and "gptqmodel" not in packing
    names = [check_layer_name(files, key, ".qweight") for key in files.names if key.endswith(".qweight")]
    layers = []
    for name in names:
        own = _of_layer(settings, name)
        if "awq" in packing:
            layers.append(awq.layer(files, name, own))
        else:
            version = {"checkpoint_format": "gptq" if first else "gptq_v2", "desc_act": False}
            layers.append(gptq.layer(files, name, Settings({**own.values, **version}, own.where)))
    return layers


def _of_layer(settings: Settings, name: str) -> Settings:
    """Return the settings of one layer. Its weights must be integers and its activations float."""
    extra = settings.children("extra_config")
    found = extra.get(name)
    if found is None:
        patterns = [key for key in extra if re.search(r"[\\*+?\[\](){}|^$]", key)]
        found = next((extra[key] for key in patterns if matches(key, name, settings.where, whole=True)), None)
    own = settings if found is None else Settings({**settings.values, **found.values}, found.where)
    kind, bits = own.text("data_type", "int"), own.integer("bits", 4, low=1, high=64)
    if kind != "int" and not kind.startswith("int_"):
        raise CheckpointError(
            f"{own.where}: {name}: weights of data_type {kind!r:.40} are not supported, only integers. {_REMEDY}"
        )
    if bits > 8:
        raise CheckpointError(f"{own.where}: the config gives {name} {bits} bits, but its tensors are quantized")
    activations = own.values.get("act_bits")
    if isinstance(activations, int) and activations < 16:
        raise CheckpointError(
            f"{own.where}: {name}: AutoRound's packing with {activations}-bit activations is not supported. {_REMEDY}"
        )
    return own
