"""In-place update of quantized layers from float weights. CUDA graphs and compiled code stay valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import modes, weight_ops
from ..ops.rotation import rotated
from ..quant_primitives.importance import importance_part, importance_sources, inferred_importance
from ..quant_primitives.integer import check_finite
from ..schemes import FLOAT_DTYPES, Int4Weight, OnePass, PackedWeight, Scheme
from . import offloading
from .model_check import check_module


class Updatable:
    """Base of PackedModule with the methods that load new float weights."""

    scheme: Scheme
    _sizes: tuple[int, int]

    @modes.neutral()
    def load_float_(
        self: Any,
        weight: Tensor | Sequence[Tensor],
        *,
        importance: Tensor | None = None,
        name: str = "weight",
    ) -> None:
        """Quantizes a new float weight with this layer's scheme and overwrites the present weight in place.

        The Parameters keep their addresses; their version counters notify autograd. Captured CUDA graphs and compiled
        code use the new weight afterwards, and results have the same bits as those of a layer quantized from it.
        ``bias`` and a static ``activation_scale`` are unchanged. Modules that share the weight share the new one.

        Args:
            weight: [N, K] in a float dtype, on any device, or several [Ni, K], the row blocks of a merged layer. For a
                sharded layer (qao.distributed) either the whole weight, of which each rank keeps its part, or only the
                part, with scales computed from the part. A DTensor is gathered.
            importance: of columns, for the int4 search: float [K]; None: estimated from the weight.
            name: prefix of error messages.

        Raises:
            ValueError: another shape; NaN, Inf or values beyond the range of scales; on meta. Nothing is changed.
            TypeError: not a float dtype.

        Without a search, the call synchronizes with a GPU's check of the weight. The write is asynchronous, as in
        torch's operators.
        """
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        whole = _whole(parts[0]) if len(parts) == 1 else torch.cat([_whole(one) for one in parts])
        check_weight(self, whole, name)
        self._load(whole, importance, name, None)

    def _load(self: Any, weight: Tensor, importance: Tensor | None, name: str, largest: Tensor | None) -> None:
        """``largest``: the largest magnitude of a weight that is already checked; None: not checked yet."""
        one_pass: OnePass | None = self.scheme.one_pass(*self._sizes)
        q, scales = self.qweight, self.scales
        sharded = hasattr(q, "device_mesh") or hasattr(scales, "device_mesh")
        if one_pass is None or tuple(weight.shape) != self._sizes or sharded:
            self._overwrite(self._requantized(weight, importance, name))
            return
        rotation = self.scheme.rotation
        weight = rotated(_kernel_weight(weight.to(q.device)), rotation)
        if largest is not None:
            fault = torch.zeros(1, dtype=torch.int32, device=q.device)
            known = None if rotation else largest.to(q.device)
            weight_ops.quantize_weight_(weight, q, scales, fault, known, *one_pass)
        elif not weight_ops.load_weight_(weight, q, scales, *one_pass, _CERTAIN[scales.dtype]).item():
            self._overwrite(self._requantized(weight, importance, name))  # raises if the weight is invalid
            return
        sums = self.weight_sums
        if sums is not None:
            sums = self.scheme._weight_sums(*self.scheme.unpack(q, scales, *self._sizes))
        self._overwrite(PackedWeight(q, scales, sums))

    def _requantized(self: Any, weight: Tensor, importance: Tensor | None, name: str) -> PackedWeight:
        """Quantizes a weight that ``check_weight`` accepted."""
        packed: PackedWeight = self.requantize(weight.to(self.qweight.device), name, importance)
        return packed

    def _overwrite(self: Any, packed: PackedWeight) -> None:
        for key in ("qweight", "scales"):
            _write(self._parameters[key], getattr(packed, key))
        for module in {
            id(one): one for one in (self, *self._tied)
        }.values():  # an embedding has neither tensor, its tied head may
            for key in ("weight_sums", "row_scales"):
                own = module._parameters[key]
                if own is not None and module.qweight is self.qweight:
                    _write(own, getattr(packed, key))

    def _saved_bias(self: Any) -> Tensor | None:
        """The bias as in a state dict."""
        bias: Tensor | None = self._parameters.get("bias")
        return bias

    def _weight_shapes(self) -> list[tuple[int, int]]:
        """Shapes that ``load_float_`` accepts."""
        return [self._sizes]


# Weights up to this magnitude are always accepted: a rotation multiplies it by up to 16, a range is at most twice that,
# and scales are at most a 15th of the range; sums of squares up to 2^60 are finite.
_CERTAIN = {dtype: min(torch.finfo(dtype).max / 8, 2.0**56) for dtype in FLOAT_DTYPES}


def _kernel_weight(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype == torch.float64 else weight


def check_weight(module: Any, weight: Tensor, name: str) -> None:
    shapes = module._weight_shapes()
    if weight.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise TypeError(
            f"{name}: the weight has dtype {weight.dtype}, but float32, float16, bfloat16 or float64 is needed"
        )
    if tuple(weight.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: the weight is {list(weight.shape)}, but this {type(module).__name__} has {expected}")
    _check_data(weight, f"{name}: the new weight")
    _check_data(module.qweight, f"{name}: the layer", module)


def _check_data(tensor: Tensor, what: str, owner: nn.Module | None = None) -> None:
    if not modes.has_no_numbers(tensor):
        return
    if owner is not None and any(offloading.offloading_hooks(owner)):
        raise ValueError(f"{what} is offloaded by accelerate: {offloading.remedy(owner)}.")
    raise ValueError(f"{what} is {'on meta' if tensor.is_meta else 'a FakeTensor'} and has no data. Load it first.")


@modes.neutral()
def update_(model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> list[str]:
    """Loads new float weights into a quantized model in place, for example during training of the same model.

    Quantized layers use ``load_float_`` with the column importance of ``quantize_``, so the model has the same bits as
    ``quantize_`` of the new float model; all other tensors are copied in place. No tensor of the model moves: CUDA
    graphs and compiled code stay valid. Everything is checked before the first write.

    Args:
        model: quantized by ``quantize_``; may be sharded by qao.distributed or by ``fully_shard`` (then resharded).
        state_dict: of the float model: "<layer>.weight" [N, K] (Conv1D of transformers: [K, N]) for each quantized
            layer. One name is enough for shared weights. DTensors are gathered, on all ranks.
        strict: False: names may be missing, and those tensors are unchanged. Layers that read the same activation (q, k
            and v; gate and up) must then be given together, because the int4 search uses the weight of one of them.

    Returns:
        Names of the requantized layers.

    Raises:
        ValueError: names are missing or unexpected, a shape differs, a weight holds NaN, Inf or values beyond the range
            of its scales, or a tensor of the model is on meta or offloaded by accelerate; every problem with names and
            shapes is listed. The model is unchanged.
        TypeError: the weight of a quantized layer has no float dtype. The model is unchanged.
    """
    check_module(model, "update_")
    state = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
    layers = {name.replace("_orig_mod.", ""): m for name, m in model.named_modules(remove_duplicate=False)}
    packed = {f"{name}.weight".lstrip("."): m for name, m in layers.items() if isinstance(m, Updatable)}
    others = _others(layers)
    _check_names(state, packed, others, strict)
    weights = _one_each(state, packed)
    for name, module in weights.items():
        check_weight(module, _oriented(packed[name], state[name]), name)
    for name, own in others.items():
        if name in state:
            _check_data(own, f"update_: {name}", layers[name.rpartition(".")[0]])
    largest = _check_values(state, packed, weights)
    importance = _importance(state, packed, weights)
    for name, module in weights.items():
        weight = _oriented(packed[name], _whole(state[name]))
        module._load(weight, importance.get(name), name, largest[name])
    for name, own in others.items():
        if name in state:
            _write(own, _whole(state[name]))
    return [name.removesuffix("weight").removesuffix(".") for name in weights]


def _others(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Tensors outside quantized weights: biases, norms, float layers, persistent buffers.

    It avoids ``model.state_dict()``, which would copy each quantized layer's marker and tripwire to its GPU.
    """
    found: dict[str, Tensor] = {}
    for path, module in layers.items():
        own: dict[str, Any] = {}
        if isinstance(module, Updatable):
            own = {f"{path}.bias".lstrip("."): module._saved_bias()}
        else:
            module._save_to_state_dict(own, f"{path}." if path else "", True)
        found |= {name.replace("_orig_mod.", ""): one for name, one in own.items() if isinstance(one, Tensor)}
    return found


def _check_names(
    state: Mapping[str, Tensor], packed: Mapping[str, Any], others: Mapping[str, Tensor], strict: bool
) -> None:
    groups: dict[int, list[str]] = {}  # names that share a tensor
    for name, tensor in [*((name, module.qweight) for name, module in packed.items()), *others.items()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        groups.setdefault(local.data_ptr() or id(tensor), []).append(name)
    problems = [f"unexpected: {name}" for name in state if name not in packed and name not in others]
    for names in groups.values():
        given = [name for name in names if name in state]
        if strict and not given:
            problems.append(f"missing: {' or '.join(names)}")
        for name in given:
            if name in others and state[name].shape != others[name].shape:
                problems.append(f"{name}: {list(state[name].shape)}, but the model has {list(others[name].shape)}")
        for name in given[1:]:
            if state[name] is not state[given[0]] and not torch.equal(_whole(state[name]), _whole(state[given[0]])):
                problems.append(f"{name}: it differs from {given[0]}, which is the same tensor in the model")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        text = "".join(f"\n  {line}" for line in [*problems[:20], *more])
        raise ValueError(f"update_: these are not the float weights of this model. The model is unchanged:{text}")


def _one_each(state: Mapping[str, Tensor], packed: Mapping[str, Any]) -> dict[str, Any]:
    """A name in ``state`` for each quantized weight, with the module that loads it, preferably a linear one."""
    owners: dict[int, Any] = {}
    for module in packed.values():
        owner = owners.setdefault(id(module.qweight), module)
        if not hasattr(owner, "in_features"):
            owners[id(module.qweight)] = module
    names = {id(module.qweight): name for name, module in reversed(list(packed.items())) if name in state}
    return {name: owners[key] for key, name in reversed(list(names.items()))}


def _check_values(
    state: Mapping[str, Tensor], packed: Mapping[str, Any], weights: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Raises the errors of quantization up front, with one GPU synchronization. Returns the largest magnitudes."""
    # In reverse order: a GPU's L2 then still holds some of the weights that are quantized first.
    largest = {
        name: weight_ops.largest_magnitude(_kernel_weight(_whole(state[name]))) for name in reversed(list(weights))
    }
    devices: dict[torch.device, list[str]] = {}
    for name, magnitude in largest.items():
        devices.setdefault(magnitude.device, []).append(name)
    for names in devices.values():
        for name, value in zip(names, torch.cat([largest[name] for name in names]).tolist(), strict=True):
            if not value <= _CERTAIN[weights[name].scales.dtype]:
                weight = _oriented(packed[name], _whole(state[name]))
                check_finite(weight, name)
                weights[name]._requantized(weight, None, name)
    return largest


def _importance(
    state: Mapping[str, Tensor], packed: Mapping[str, Any], weights: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Importance of layers that ``quantize_`` estimates from weights of other layers."""
    found = {}
    for name, module in weights.items():
        others = [f"{other}.weight" for other in importance_sources(name.removesuffix(".weight"))]
        if not (isinstance(module.scheme, Int4Weight) and module.scheme.clip_search):
            continue
        if not (packed.keys() >= set(others) and state.keys() >= set(others)):
            continue
        tellers = (_oriented(packed[other], _whole(state[other])) for other in others)
        parts = [importance_part(weight, name.removesuffix(".weight")) for weight in tellers]
        importance = inferred_importance(parts, module._weight_shapes()[-1][1])
        if importance is not None:
            found[name] = importance
    return found


def _oriented(module: Any, weight: Tensor) -> Tensor:
    return weight.t() if getattr(module, "stands_for", None) == "Conv1D" and weight.dim() == 2 else weight


def _whole(tensor: Any) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


@torch.no_grad()
def _write(own: Any, value: Tensor) -> None:
    """Copies ``value`` into ``own`` or its local shard. If they are the same tensor, only the version changes."""
    if own is value:
        torch.autograd.graph.increment_version(own)
    elif hasattr(own, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        placed: Any = distribute_tensor(
            value.to(own.to_local().device), own.device_mesh, own.placements, src_data_rank=None
        )
        own.to_local().copy_(placed.to_local())
    else:
        with modes.writing(own):
            own.copy_(value)
