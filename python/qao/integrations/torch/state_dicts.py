"""Loading state dicts of quantized layers into a float model with torch's ``load_state_dict``.

Libraries save models in parts and load them with ``load_state_dict`` into newly created modules: sentence-transformers,
``PyTorchModelHubMixin``, ``safetensors.torch.load_model``, Lightning checkpoints. With ``register``, a float layer
becomes the quantized layer that the state dict's marker (nn/marker.py) describes, as in ``qao.load``. Errors name the
remedy.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.native import safetensors_entries
from ...nn import marker
from ...nn.eligibility import is_embedding, is_fused, is_linear
from ...nn.embedding import rename_ties
from ...nn.linear import QuantLinear
from ...nn.packed_module import PackedModule, frozen
from ...quantization.skeleton import Undo, prepare_layers, undo
from ...schemes import Scheme
from ..imports import when_imported
from ..wrapping import wrap

Found = dict[str, marker.Marker]  # by layer name


def register() -> None:
    """Called by ``import qao``."""
    wrap(nn.Module, "load_state_dict", _load_state_dict)
    when_imported("safetensors.torch", _register_safetensors)


def _load_state_dict(upstream: Any) -> Any:
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, **others: Any
    ) -> Any:
        names = names_of_layers(state_dict) if isinstance(state_dict, Mapping) else []
        if not names:
            if isinstance(state_dict, Mapping):
                _refuse_codes(self, state_dict)
            return upstream(self, state_dict, strict, assign, **others)
        done, state_dict, hint = _prepare(self, state_dict, names, assign)
        try:
            result = upstream(self, state_dict, strict, assign, **others)
        except RuntimeError as error:
            _undo(self, done)
            if hint:
                raise RuntimeError(f"{error}\n\t{hint}") from error
            raise
        if hint:
            warnings.warn(f"load_state_dict: strict=False. {hint} They were not loaded.", stacklevel=2)
        return result

    return load_state_dict


def names_of_layers(names: Iterable[Any]) -> list[str]:
    """Names of the quantized layers in a state dict with these names; "" is the module itself."""
    layers = (marker.layer_of(name) for name in names if isinstance(name, str))
    return [layer for layer in layers if layer is not None]


def _key(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name


def _prepare(
    model: nn.Module, state: Mapping[str, Any], names: list[str], assign: bool
) -> tuple[Undo, Mapping[str, Any], str]:
    """Replace float layers of ``model`` by the quantized layers of a state dict.

    Returns:
        The argument of ``undo``, the state dict to load, and a message about layers without a module in the model.

    Raises:
        RuntimeError: a layer cannot be replaced, or its tensors are incomplete. The model is unchanged.
    """
    done, fresh = prepared(model, state, names, assign)
    try:
        state = completed(fresh, state)
    except ValueError as error:
        _undo(model, done)
        raise _error(model, str(error)) from error
    modules = dict(model.named_modules(remove_duplicate=False))
    lost = [name for name in names if not isinstance(modules.get(name), PackedModule)]
    return done, state, _hint(model, modules, lost)


def prepared(
    model: nn.Module, state: Mapping[str, Any], names: list[str], assign: bool
) -> tuple[Undo, dict[str, PackedModule]]:
    """The argument of ``undo``, and the new layers by the names in ``names``."""
    try:
        done = _prepare_layers(model, state, names, assign)
    except ValueError as error:
        raise _error(model, str(error)) from error
    made = {id(parent._modules[attribute]) for parent, attribute, _ in done}
    for parent, attribute, before in done:
        new, bias = parent._modules[attribute], before._parameters.get("bias")
        if assign and isinstance(new, QuantLinear) and bias is not None:  # kept if the state dict has none
            new.bias = frozen(bias.detach().clone())
    modules = dict(model.named_modules(remove_duplicate=False))
    fresh = {}
    for name in names:
        module, owner = modules.get(name), modules.get(name.rpartition(".")[0])  # replaced as a whole
        if isinstance(module, PackedModule) and (id(module) in made or id(owner) in made):
            fresh[name] = module
    return done, fresh


def _undo(model: nn.Module, done: Undo) -> None:
    undo(done)
    rename_ties(model)


def _prepare_layers(model: nn.Module, state: Mapping[str, Any], names: list[str], assign: bool) -> Undo:
    modules = dict(model.named_modules(remove_duplicate=False))
    schemes: dict[str, Scheme] = {}
    found: Found = {}
    dtypes_of_scales: dict[str | int, torch.dtype] = {}  # by layer name, and by id of its float weight
    for name in names:
        scales = state.get(_key(name, "scales"))
        if isinstance(scales, Tensor):
            dtypes_of_scales[name] = scales.dtype
            if name in modules and (weight := modules[name]._parameters.get("weight")) is not None:
                dtypes_of_scales[id(weight)] = scales.dtype
    for name in names:
        parent = modules.get(name.rpartition(".")[0])
        module = modules.get(name, parent if parent is not None and is_fused(parent) else None)
        if module is None or isinstance(module, PackedModule):
            continue
        key = _key(name, marker.MARKER)
        found[name] = marker.decode(state[key], key)
        dtype = dtypes_of_scales.get(name) or dtypes_of_scales.get(id(module._parameters.get("weight")))
        scheme = marker.scheme_of(found[name], key, dtype)
        if not name:
            raise ValueError(_of_one_layer(module, scheme, found[name], state))
        schemes[name] = scheme
    if not schemes:
        return []
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules.values()):
        raise ValueError(
            f"the state dict holds quantized layers ({', '.join(list(schemes)[:3])}), but DistributedDataParallel "
            "already holds the float parameters of this model. Load before the model is wrapped."
        )
    sizes = {name: (one.out_features, one.in_features) for name, one in found.items()}
    # As in torch: with assign, dtypes come from the state dict, otherwise from the model.
    dtypes = {name: one.dtype for name, one in found.items()} if assign else None
    return prepare_layers(model, schemes, sizes=sizes, dtypes=dtypes, on_meta=assign)


def _of_one_layer(module: nn.Module, scheme: Scheme, found: marker.Marker, state: Mapping[str, Any]) -> str:
    what = f"the state dict holds a single quantized layer ({scheme}, [{found.out_features}, {found.in_features}])"
    if not is_linear(module):
        kind = "become one in place" if is_embedding(module) else "take its place"
        return f"{what}, and a {type(module).__name__} cannot {kind}. Load into the model that contains the layer."
    bias = "bias" in state
    return (
        f"{what}, and a {type(module).__name__} cannot become one in place. Replace it: "
        f"layer = qao.QuantLinear.empty({found.in_features}, {found.out_features}, {bias}, scheme=qao.{scheme!r}, "
        f"dtype={found.dtype}), then layer.load_state_dict(state_dict)."
    )


def completed(fresh: Mapping[str, PackedModule], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with the tensors of new layers under all of their names, since files may store shared ones once.

    Raises:
        ValueError: a tensor is missing. A float layer would keep its values; a new layer has none.
    """
    added: dict[str, Any] = {}
    for name, module in fresh.items():
        alike = [other for other, one in fresh.items() if one.qweight is module.qweight]
        for part, own in module.packed.tensors().items():
            if own is None or _key(name, part) in state:
                continue
            sources = (_key(other, part) for other in alike if _key(other, part) in state)
            source = next(sources, None)
            if source is None:
                raise ValueError(
                    f"{_key(name, marker.MARKER)}: the state dict has this entry of a quantized layer, but no "
                    f"{_key(name, part)}. Save all entries of the layer."
                )
            added[_key(name, part)] = state[source]
    if not added:
        return state
    completed = OrderedDict(state)
    completed.update(added)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        completed._metadata = metadata  # type: ignore[attr-defined]
    return completed


def _error(model: nn.Module, text: str) -> RuntimeError:
    return RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")


# ---- names that do not match -----------------------------------------------------------------------------------------

_OF_WRAPPERS = {"module.": "nn.DataParallel and DistributedDataParallel add", "_orig_mod.": "torch.compile adds"}


def _hint(model: nn.Module, modules: Mapping[str, nn.Module], lost: list[str]) -> str:
    """A message about quantized layers of a state dict without a module in the model; else ""."""
    if not lost:
        return ""
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    text = (
        f"The state dict holds quantized layers {', '.join(map(repr, lost[:3]))}{more}, but this "
        f"{type(model).__name__} has no modules of these names."
    )
    own = [name for name, module in modules.items() if name and not module._modules]
    return text + _of_prefixes(own, lost[0])


def _of_prefixes(own: Iterable[str], name: str) -> str:
    """The prefix by which ``name`` differs from a name in ``own``."""
    for other in own:
        longer, shorter = (name, other) if len(name) > len(other) else (other, name)
        if not f".{longer}".endswith(f".{shorter}"):
            continue
        prefix = longer[: len(longer) - len(shorter)]
        if not prefix:
            continue
        who = next((f" ({by} it)" for start, by in _OF_WRAPPERS.items() if prefix.startswith(start)), "")
        if longer is name:
            return (
                f" Names in the state dict begin with {prefix!r}{who}, which those of the model do not: "
                f"{{name.removeprefix({prefix!r}): tensor for name, tensor in state_dict.items()}}."
            )
        return f" Names of the model begin with {prefix!r}{who}, which those in the state dict do not."
    return ""


# ---- codes that could be mistaken for weights ------------------------------------------------------------------------

_CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def _refuse_codes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise RuntimeError if torch would copy 8-bit codes, which need scales, into a float weight.

    compressed-tensors and fp8 checkpoints store them under the name and in the shape of the float weight, so
    ``strict=False`` would not report them.
    """
    for name, scale in state.items():
        end = next((end for end in (".weight_scale", ".weight_scale_inv") if str(name).endswith(end)), None)
        if end is None or not isinstance(scale, Tensor):
            continue
        layer = name[: -len(end)]
        codes = state.get(f"{layer}.weight")
        if not isinstance(codes, Tensor) or codes.dtype not in _CODES:
            continue
        try:
            module = model.get_submodule(layer)
        except AttributeError:
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.dtype not in _CODES and (is_linear(module) or is_embedding(module)):
            kind = str(codes.dtype).removeprefix("torch.")
            raise _error(
                model,
                f"{layer}.weight: the state dict holds {kind} codes with scales in {name}, but this "
                f"{type(module).__name__} has a {str(weight.dtype).removeprefix('torch.')} weight. Load the directory "
                "of the checkpoint: qao.from_pretrained(path).",
            )


# ---- safetensors -----------------------------------------------------------------------------------------------------


def _register_safetensors() -> None:
    import safetensors.torch as library

    wrap(library, "load_model", _load_model)


def _load_model(upstream: Any) -> Any:
    """``load_model`` compares names with the model before loading, so layers are replaced before that."""

    def load_model(model: nn.Module, filename: Any, *args: Any, **options: Any) -> Any:
        state = safetensors_entries(filename)  # of any suffix
        done, fresh = prepared(model, state, names_of_layers(state), False)
        try:
            completed(fresh, state)
            return upstream(model, filename, *args, **options)
        except RuntimeError:
            _undo(model, done)
            raise
        except ValueError as error:
            _undo(model, done)
            raise _error(model, str(error)) from error

    return load_model
