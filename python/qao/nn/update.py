"""New float weights for quantized layers, in place: what holds their tensors (CUDA graphs, compiled code) goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import modes, weight_ops
from ..ops.rotation import rotated
from ..quant_primitives.importance import told_by, told_importance, told_part
from ..quant_primitives.integer import check_finite
from ..schemes import FLOAT_DTYPES, Int4Weight, OnePass, PackedWeight, Scheme


class Updatable:
    """What of a PackedModule takes new weights."""

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
        """Quantizes another float weight as this one is, and writes it over the present one.

        The Parameters stay, at their addresses; their version counters tell autograd. CUDA graphs that were captured
        and compiled code compute with the new weight from then on, and results are bit for bit those of a layer made
        of it. ``bias`` and a static ``activation_scale`` stay as they are. Modules that share the weight share the new
        one.

        Args:
            weight: [N, K] in a float dtype, on any device, or several [Ni, K] that lie one below the other in a merged
                layer. Of a sharded layer (qao.distributed) the whole weight, of which each rank keeps its part, or the
                part alone; scales are then those of the part. A DTensor is gathered.
            importance: of columns, for the search of int4: float [K]; None: estimated from the weight.
            name: begins the messages of errors.

        Raises:
            ValueError: another shape; NaN or Inf, or more than scales can hold; on meta. Nothing is changed.
            TypeError: no float dtype.

        Without a search, a GPU looks at the weight, which is what this waits for, and then writes: the call returns
        before that, as those of torch's operators do.
        """
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        whole = _whole(parts[0]) if len(parts) == 1 else torch.cat([_whole(one) for one in parts])
        check_weight(self, whole, name)
        self._load(whole, importance, name, None)

    def _load(self: Any, weight: Tensor, importance: Tensor | None, name: str, largest: Tensor | None) -> None:
        """``largest``: the largest magnitude of the weight, which is known to raise nothing."""
        told: OnePass | None = self.scheme.one_pass(*self._sizes)
        q, scales = self.qweight, self.scales
        sharded = hasattr(q, "device_mesh") or hasattr(scales, "device_mesh")
        if told is None or tuple(weight.shape) != self._sizes or sharded:
            self._overwrite(self._requantized(weight, importance, name))
            return
        rotation = self.scheme.rotation
        weight = rotated(_kernel_weight(weight.to(q.device)), rotation)
        if largest is not None:
            fault = torch.zeros(1, dtype=torch.int32, device=q.device)
            known = None if rotation else largest.to(q.device)
            weight_ops.quantize_weight_(weight, *told, q, scales, fault, known)
        elif not weight_ops.load_weight_(weight, *told, q, scales, _CERTAIN[scales.dtype]).item():
            self._overwrite(self._requantized(weight, importance, name))  # which knows what to raise, if anything
            return
        sums = self.weight_sums
        if sums is not None:
            sums = self.scheme._weight_sums(*self.scheme.unpack(q, scales, *self._sizes))
        self._overwrite(PackedWeight(q, scales, sums))

    def _requantized(self: Any, weight: Tensor, importance: Tensor | None, name: str) -> PackedWeight:
        """Of a weight as ``check_weight`` lets pass."""
        packed: PackedWeight = self.requantize(weight.to(self.qweight.device), name, importance)
        return packed

    def _overwrite(self: Any, packed: PackedWeight) -> None:
        for key in ("qweight", "scales"):
            _write(self._parameters[key], getattr(packed, key))
        for module in {
            id(one): one for one in (self, *self._tied)
        }.values():  # an embedding has none of these, its head may
            for key in ("weight_sums", "row_scales"):
                own = module._parameters[key]
                if own is not None and module.qweight is self.qweight:
                    _write(own, getattr(packed, key))

    def _saved_bias(self: Any) -> Tensor | None:
        """As a state dict has it."""
        bias: Tensor | None = self._parameters.get("bias")
        return bias

    def _weight_shapes(self) -> list[tuple[int, int]]:
        """Of weights that ``load_float_`` takes."""
        return [self._sizes]


# To this magnitude no weight is refused. A rotation makes it up to 16 times as large, no range is more than twice that,
# and scales of four bits are a 15th of it, others less; and squares up to 2^60 can be added up.
_CERTAIN = {dtype: min(torch.finfo(dtype).max / 8, 2.0**56) for dtype in FLOAT_DTYPES}


def _kernel_weight(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype == torch.float64 else weight


def check_weight(module: Any, weight: Tensor, name: str) -> None:
    shapes = module._weight_shapes()
    if weight.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise TypeError(
            f"{name}: the weight has dtype {weight.dtype}, and float32, float16, bfloat16 or float64 is needed"
        )
    if tuple(weight.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: the weight is {list(weight.shape)}, and this {type(module).__name__} has {expected}")
    if modes.has_no_numbers(weight) or modes.has_no_numbers(module.qweight):
        without, which = (weight, "new weight") if modes.has_no_numbers(weight) else (module.qweight, "layer")
        where = "on meta" if without.is_meta else "a FakeTensor"
        raise ValueError(f"{name}: the {which} is {where} and has no data. Load it first.")


@modes.neutral()
def update_(model: nn.Module, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> list[str]:
    """Gives a quantized model new float weights, in place: those of the same model in training.

    Quantized layers get theirs by ``load_float_``, with the importance of columns that ``quantize_`` would take, so the
    model is bit for bit what ``quantize_`` makes of the new floats; everything else is copied into what is there. No
    tensor of the model moves: CUDA graphs and compiled code go on. All is checked before the first number is written.

    Args:
        model: quantized by ``quantize_``, sharded by qao.distributed or ``fully_shard`` (then resharded) or not.
        state_dict: of the float model: "<layer>.weight" [N, K] (Conv1D of transformers: [K, N]) where the model has a
            quantized layer. Of weights that are shared one name is enough. DTensors are gathered, on all ranks.
        strict: False: names may be missing, and those tensors stay. Give layers that read one activation together then
            (q, k and v; gate and up): the search of int4 goes by one of them.

    Returns:
        Names of the layers that were quantized again.

    Raises:
        ValueError: names are missing or unexpected, a shape differs, a weight holds NaN or Inf, or more than its scales
            can hold; every problem of names and shapes is listed. The model is unchanged.
        TypeError: a weight of a quantized layer has no float dtype. The model is unchanged.
    """
    state = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
    layers = {name.replace("_orig_mod.", ""): m for name, m in model.named_modules(remove_duplicate=False)}
    packed = {f"{name}.weight".lstrip("."): m for name, m in layers.items() if isinstance(m, Updatable)}
    others = _others(layers)
    _check_names(state, packed, others, strict)
    weights = _one_each(state, packed)
    for name, module in weights.items():
        check_weight(module, _oriented(packed[name], state[name]), name)
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
    """What is no tensor of a quantized weight: biases, norms, float layers, buffers that are saved.

    Not by ``model.state_dict()``, where a quantized layer's marker and tripwire would go to its GPU.
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
    groups: dict[int, list[str]] = {}  # names of one tensor
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
                problems.append(f"{name}: {list(state[name].shape)}, and the model has {list(others[name].shape)}")
        for name in given[1:]:
            if state[name] is not state[given[0]] and not torch.equal(_whole(state[name]), _whole(state[given[0]])):
                problems.append(f"{name}: it differs from {given[0]}, with which it is shared in the model")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        text = "".join(f"\n  {line}" for line in [*problems[:20], *more])
        raise ValueError(f"update_: these are not the float weights of this model, which is unchanged:{text}")


def _one_each(state: Mapping[str, Tensor], packed: Mapping[str, Any]) -> dict[str, Any]:
    """A name in ``state`` for each quantized weight, with the module to give it to: linear, if there is one."""
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
    """Raises all that quantizing them would; waits for a GPU once. Returns their largest magnitudes."""
    # From the last to the first: a GPU's L2 then holds some of what is quantized first.
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
    """As ``quantize_`` finds it, where weights of other layers tell."""
    found = {}
    for name, module in weights.items():
        others = [f"{other}.weight" for other in told_by(name.removesuffix(".weight"))]
        if not (isinstance(module.scheme, Int4Weight) and module.scheme.clip_search):
            continue
        if not (packed.keys() >= set(others) and state.keys() >= set(others)):
            continue
        tellers = (_oriented(packed[other], _whole(state[other])) for other in others)
        parts = [told_part(weight, name.removesuffix(".weight")) for weight in tellers]
        importance = told_importance(parts, module._weight_shapes()[-1][1])
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
    """Into the memory of ``own``, or of the part of it that is here; it may be there already."""
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
