"""What makes a saved layer say what it is, whichever container holds it, and stops others from misreading it.

A QuantLinear or QuantEmbedding adds two entries to every ``state_dict``, made on the fly:

    <layer>.pip_install_qao   uint8: JSON, the version of this format, the scheme, the sizes and the dtype of the layer
    <layer>.weight            uint8 [16]: a tripwire

In a process without qao, a plain nn.Linear that is asked to load such a state dict fails: strictly, since it does not
know the first name, which tells what to do; and in any case with a size mismatch of ``weight``. Without them it would
stay random, or take numbers of eight bits for its weight. With qao it becomes the layer that the first entry describes
(integrations/state_dicts.py).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSION = 2  # rotated weights, which older ones would misread; others have version 1 still
MARKER = "pip_install_qao"
TRIPWIRE = "weight"
_TRIPWIRE_TEXT = b"pip install qao\n"
_LONGEST = 1 << 16  # bytes of JSON; a layer needs some 200


class Marker(NamedTuple):
    """What the marker of a layer says; ``scheme`` as ``Scheme.to_dict`` gives it."""

    scheme: dict[str, Any]
    out_features: int
    in_features: int
    dtype: torch.dtype
    experts: int | None = None  # how many weights of these sizes it is, one behind the other; None: one


def encode(marker: Marker) -> Tensor:
    """uint8: the marker as JSON."""
    told = {name: value for name, value in marker._asdict().items() if value is not None}
    version = VERSION if marker.scheme.get("rotation") else 1
    content = {"version": version, **told, "dtype": str(marker.dtype).removeprefix("torch.")}
    return _bytes(json.dumps(content).encode())


# Fields of a scheme on which the meaning of packed tensors depends; "weights" is the weight format. Others say how
# codes were found, in which dtype scales are stored (the tensors say so themselves), how results are added up, or
# what a layer does with activations: that is up to the layer, as its dtype is.
_BINDING = (
    "weights",
    "format",
    "granularity",
    "group_size",
    "symmetric",
    "rotation",
    "integer_scales",
    "power_of_two_scales",
)


def check(found: Marker, own: Marker, name: str, layer: str = "layer") -> None:
    """Raises ValueError where a weight that ``found`` describes is none that a layer which ``own`` describes can take.

    Packed tensors of four bits are padded to whole tiles and look alike for several sizes, codes of all schemes are
    int8: shapes and dtypes alone cannot tell. The message begins with ``name``, ``layer`` describes the layer.
    """
    unlike = difference(found, own)
    if unlike is None:
        return
    there, here = unlike
    raise ValueError(
        f"{name}: the checkpoint holds {there}, and this {layer} has {here}: it would compute something else. Use the "
        "model that the checkpoint was made of, quantized with the same scheme, or load into the float model: "
        "qao.load(path, model) takes the schemes from the file."
    )


def difference(found: Marker, own: Marker) -> tuple[str, str] | None:
    """What ``found`` and ``own`` say where they differ; None if one describes a weight that the other can take."""
    sizes, stored = _facts(found)
    own_sizes, wanted = _facts(own)
    differ = [field for field in _BINDING if stored[field] != wanted[field]]
    differ = ["scheme"] if "weights" in differ else differ  # others may have fields of other names
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
    """Sizes, and the binding fields in one form: what is off is None, as is a field that the scheme does not have."""
    sizes = [*([] if marker.experts is None else [marker.experts]), marker.out_features, marker.in_features]
    fields: dict[str, Any] = {name: marker.scheme.get(name) or None for name in _BINDING}
    fields["weights"] = str(marker.scheme.get("scheme")).rpartition("_")[2]
    size = fields["group_size"]
    if isinstance(size, int) and not 0 < size < marker.in_features:  # one group a row, whatever it is called
        fields.update(group_size=-1, integer_scales=None, power_of_two_scales=None)
    return sizes, fields


def tripwire() -> Tensor:
    """uint8 [16], the entry in place of ``weight``: no nn.Linear has a weight of one dimension."""
    return _bytes(_TRIPWIRE_TEXT)


def decode(tensor: Tensor, name: str = MARKER) -> Marker:
    """The inverse of ``encode``.

    Raises:
        ValueError: the tensor is no marker, or that of a newer version; the message begins with ``name``.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not 0 < tensor.numel() <= _LONGEST:
        raise ValueError(f"{name}: not a marker of qao: {tensor.dtype}{list(tensor.shape)}, not uint8 of one dimension")
    try:
        plain: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        content = json.loads(bytes(plain.cpu().tolist()))
        version = content["version"]
        if isinstance(version, int) and version > VERSION:
            raise ValueError(
                f"{name}: written by a newer qao (format {version}, this one knows {VERSION}): pip install -U qao"
            )
        scheme, n, k = content["scheme"], content["out_features"], content["in_features"]
        dtype = getattr(torch, content["dtype"])
        experts = content.get("experts")
        whole = all(type(size) is int and size > 0 for size in (n, k, version, 1 if experts is None else experts))
        if not (whole and isinstance(scheme, dict) and isinstance(dtype, torch.dtype)):
            raise TypeError("a field has a wrong type")
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: not a marker of qao: {error}") from error
    return Marker(scheme, n, k, dtype, experts)


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
