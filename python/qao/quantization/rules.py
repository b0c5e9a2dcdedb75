"""Selection of each layer's scheme: one for all, a dict from names to schemes, or a function."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from .. import _words
from ..schemes import Scheme
from .callbacks import checked
from .walk import Walk

Select = Callable[[str, nn.Module], Scheme | None]


@dataclass
class Selection:
    """Scheme of each layer from ``scheme`` in its three forms; results are checked."""

    choose: Select
    excluded: dict[str, str]  # layers excluded by default, with reasons

    def __call__(self, name: str, module: nn.Module) -> Scheme | None:
        chosen = self.choose(name, module)
        if chosen is not None and not isinstance(chosen, Scheme):
            raise TypeError(f"quantize_: the scheme for {name} must be a Scheme or None, not {chosen!r}")
        return chosen


def selector(
    found: Walk, scheme: Scheme | Mapping[str, Scheme | None] | Callable[[nn.Module, str], Scheme | None]
) -> Selection:
    if isinstance(scheme, type) or not (isinstance(scheme, (Scheme, Mapping)) or callable(scheme)):
        own = isinstance(scheme, type) and issubclass(scheme, Scheme)
        given = f"{scheme!r}; did you mean {scheme.__name__}()?" if own else _words.described(scheme)
        raise TypeError(
            "quantize_: scheme must be a scheme such as qao.Int4WeightOnly(), a dict of module names to schemes, or a "
            f"function of (module, fqn), not {given}"
        )
    kept = {layer.row.name: layer.excluded for layer in found.linears if layer.excluded is not None}
    if isinstance(scheme, Scheme):
        return Selection(lambda name, module: scheme, kept)
    if not isinstance(scheme, Mapping):
        function = checked(scheme, "quantize_: scheme")
        return Selection(lambda name, module: function(module, name), {})
    for key in scheme:
        if not any(matches(key, name) for name in found.modules):
            raise ValueError(f"quantize_: no module of the model matches {key!r}{_near(key, found.modules)}")
    # A key that also matches other layers does not select these layers; a key for only these does.
    others = [layer.row for layer in found.linears if not (layer.excluded or layer.already_quantized)] if kept else []
    names = [name for row in others for name in (row.name, *row.aliases)]
    for_all = {key for key in scheme if any(matches(key, name) for name in names)}
    kept = {name: why for name, why in kept.items() if _first_key(scheme, name) in for_all}
    return Selection(partial(_first_match, scheme), kept)


def _near(key: str, names: Iterable[str]) -> str:
    """What a key that matches no name may have meant, for the end of an error message."""
    parts = [name for name in names if f".{name}.".endswith(f".{key}.")]
    if parts:
        return rf"; names are whole: {parts[0]!r}, or 're:.*\.{key}' for every {key}"
    close = difflib.get_close_matches(key, names, 1)
    return f"; did you mean {close[0]!r}?" if close else ". See model.named_modules()."


def _first_match(schemes: Mapping[str, Scheme | None], name: str, module: nn.Module) -> Scheme | None:
    return _scheme_of(schemes, name)


def _first_key(schemes: Mapping[str, Scheme | None], name: str) -> str | None:
    return next((key for key in schemes if matches(key, name)), None)


# Scheme fields that affect how a weight is quantized or run, but not the kind of layer.
_NO_KIND = ("scale_dtype", "clip_search", "whole_zeros", "fast_accum", "activation_scale")


def alike(scheme: Scheme, other: Scheme) -> bool:
    """Whether two schemes make the same kind of layer: weights, groups, activations, rotation."""
    first, second = ({k: v for k, v in one.to_dict().items() if k not in _NO_KIND} for one in (scheme, other))
    return first == second


def differing(
    layers: Mapping[str, Scheme], wanted: Scheme | Mapping[str, Scheme | None]
) -> tuple[str, Scheme, Scheme] | None:
    """The first quantized layer with a scheme of another kind in ``wanted``: its name and both schemes."""
    for name, scheme in layers.items():
        other = wanted if isinstance(wanted, Scheme) else _scheme_of(wanted, name)
        if other is not None and not alike(scheme, other):
            return name, scheme, other
    return None


def _scheme_of(schemes: Mapping[str, Scheme | None], name: str) -> Scheme | None:
    key = _first_key(schemes, name)
    return None if key is None else schemes[key]


def matches(key: str, name: str) -> bool:
    if key.startswith("re:"):
        return re.fullmatch(key[3:], name) is not None
    return name == key or name.startswith(f"{key}.")
