"""State-dict entries that identify a quantized layer and prevent a plain module from loading it.

A QuantLinear or QuantEmbedding adds two entries to every ``state_dict``, created on the fly:

    <layer>.pip_install_qao   uint8: JSON with the format version, the scheme, the sizes and the dtype of the layer
    <layer>.weight            uint8 [16]: a tripwire

In a process without qao, a plain nn.Linear cannot load such a state dict: strict loading rejects the first entry, with
a name that states the remedy, and any loading fails with a size mismatch of ``weight``. Without these entries it would
keep its random weight, or load 8-bit codes as a weight. With qao it becomes the layer that the first entry describes
(integrations/torch/state_dicts.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..schemes import Int4Weight, Scheme, scheme_from_dict

VERSION = 2  # of rotated weights, which older versions would misread; others still have version 1
MARKER = "pip_install_qao"
TRIPWIRE = "weight"
_TRIPWIRE_TEXT = b"pip install qao\n"
# Markers in state dicts of live layers. Those in a state dict of empty tensors, to be loaded, have no content yet.
of_layers = WeakTensorKeyDictionary()
_LONGEST = 1 << 16  # bytes of JSON; a layer needs some 200


class Marker(NamedTuple):
    """Content of a layer's marker; ``scheme`` is the result of ``Scheme.to_dict``."""

    scheme: dict[str, Any]
    out_features: int
    in_features: int
    dtype: torch.dtype
    experts: int | None = None  # number of stacked weights of these sizes; None: not stacked


def layer_of(entry: str) -> str | None:
    """Layer name of a marker entry in a state dict, "" for the module itself; None for every other entry."""
    if entry == MARKER:
        return ""
    return entry.removesuffix(f".{MARKER}") or None if entry.endswith(f".{MARKER}") else None


def encode(marker: Marker) -> Tensor:
    """uint8: the marker as JSON."""
    fields = {name: value for name, value in marker._asdict().items() if value is not None}
    version = VERSION if marker.scheme.get("rotation") else 1
    content = {"version": version, **fields, "dtype": str(marker.dtype).removeprefix("torch.")}
    return _bytes(json.dumps(content).encode())


# Scheme fields that define the meaning of packed tensors; "weights" is the weight format. The other fields describe the
# search for codes, the dtype of scales (which the tensors have), accumulation or activation quantization: a layer may
# differ in these, as in its dtype.
_BINDING = (
    "weights",
    "format",
    "granularity",
    "group_size",
    "symmetric",
    "rotation",
    "integer_scales",
    "power_of_two_scales",
    "qtype",
)


def check(found: Marker, own: Marker, name: str, layer: str = "layer") -> None:
    """Raises ValueError if the weight that ``found`` describes does not fit the layer that ``own`` describes.

    Shapes and dtypes cannot show this: packed four-bit tensors are padded to whole tiles, so several sizes have the
    same shape, and the codes of all schemes are int8. The message begins with ``name``; ``layer`` describes the layer.
    """
    unlike = difference(found, own)
    if unlike is None:
        return
    there, here = unlike
    raise ValueError(
        f"{name}: the checkpoint holds {there}, but this {layer} has {here} and would compute something else. Use the "
        "model that the checkpoint was made from, quantized with the same scheme, or load into the float model: "
        "qao.load(path, model) takes the schemes from the file."
    )


def difference(found: Marker, own: Marker) -> tuple[str, str] | None:
    """Descriptions of ``found`` and ``own`` where they differ; None if the weight fits the layer."""
    sizes, stored = _facts(found)
    own_sizes, wanted = _facts(own)
    differ = [field for field in _BINDING if stored[field] != wanted[field]]
    differ = ["scheme"] if "weights" in differ else differ  # other formats may have other fields
    if sizes == own_sizes and not differ:
        return None
    there, here = (
        ", ".join(
            ([f"a weight {size}"] if sizes != own_sizes else [])
            + [f"{field}={of.scheme.get(field)!r}" for field in differ]
        )
        for of, size in ((found, sizes), (own, own_sizes))
    )
    return there, here


def _facts(marker: Marker) -> tuple[list[int], dict[str, Any]]:
    """Sizes, and the binding fields in normal form: None for a disabled option or a field that the scheme lacks."""
    sizes = [*([] if marker.experts is None else [marker.experts]), marker.out_features, marker.in_features]
    fields: dict[str, Any] = {name: marker.scheme.get(name) or None for name in _BINDING}
    fields["weights"] = str(marker.scheme.get("scheme")).rpartition("_")[2]
    size = fields["group_size"]
    if isinstance(size, int) and not 0 < size < marker.in_features:  # one group per row
        fields.update(group_size=-1, integer_scales=None, power_of_two_scales=None)
    return sizes, fields


def tripwire() -> Tensor:
    """uint8 [16], the entry in place of ``weight``: no nn.Linear has a 1-D weight."""
    return _bytes(_TRIPWIRE_TEXT)


def decode(tensor: Tensor, name: str = MARKER) -> Marker:
    """The inverse of ``encode``.

    Raises:
        ValueError: the tensor is not a marker, or has a newer version; the message begins with ``name``.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not 0 < tensor.numel() <= _LONGEST:
        raise ValueError(f"{name}: not a marker of qao: {tensor.dtype}{list(tensor.shape)}, not uint8 of one dimension")
    plain: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    try:
        content = json.loads(bytes(plain.cpu().tolist()))
        version = content["version"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"{name}: not a marker of qao: {error}") from error
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{name}: written by a newer qao (format {version}, this one knows {VERSION}): pip install -U qao"
        )
    try:
        scheme, n, k = content["scheme"], content["out_features"], content["in_features"]
        dtype = getattr(torch, content["dtype"])
        experts = content.get("experts")
        whole = all(type(size) is int and size > 0 for size in (n, k, version, 1 if experts is None else experts))
        if not (whole and isinstance(scheme, dict) and isinstance(dtype, torch.dtype)):
            raise TypeError("a field has a wrong type")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: not a marker of qao: {error}") from error
    return Marker(scheme, n, k, dtype, experts)


def scheme_of(found: Marker, name: str, scale_dtype: torch.dtype | None = None) -> Scheme:
    """The scheme of a marker. ``scale_dtype``: that of the stored scales, which four-bit weights keep.

    Raises:
        ValueError: there is no such scheme; the message begins with ``name``.
    """
    try:
        scheme = scheme_from_dict(found.scheme)
        return replace(scheme, scale_dtype=scale_dtype) if scale_dtype and isinstance(scheme, Int4Weight) else scheme
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
