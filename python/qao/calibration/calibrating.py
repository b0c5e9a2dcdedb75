"""calibrate: in-place quantization of a model with calibration data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._words import METHODS as METHODS
from .._words import default_method
from ..nn.linear import pack_weight
from ..nn.model_check import check_module
from ..nn.packed_module import Sharded
from ..ops import modes
from ..quantization import fused_experts, quantize
from ..quantization.callbacks import layer_filter
from ..quantization.module_swap import put_module
from ..quantization.report import Report
from ..quantization.walk import Layer
from ..schemes import PackedWeight, Scheme
from .choice import quantized
from .scaling import smooth
from .statistics import Inputs
from .stream import Blocks, Call, called, check_first, evaluating, find_blocks, random_samples, samples_of

Unit = list[Layer]

UNREACHED = "the data did not reach it; rounded to nearest"
_LEAST_TOKENS = 32  # of a layer for the method "importance": few tokens say less than other layers' weights
_RARE = f"fewer than {_LEAST_TOKENS} tokens reached it; columns weighted as by quantize_"


@modes.neutral()
def calibrate(
    model: nn.Module,
    data: Iterable[Any] | None,
    scheme: Scheme | Mapping[str, Scheme | None] | Callable[..., Scheme | None],
    *,
    method: str | None = None,
    damping: float = 0.01,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    embeddings: bool = False,
    progress: bool = True,
    strict: bool = False,
    filter: Callable[..., bool] | None = None,
) -> Report:
    """Quantizes the linear layers of ``model`` in place, calibrated on ``data`` or on random tokens.

    The layers and formats are those of ``quantize_``; only the codes and scales differ, so run time is the same. Fused
    experts are rounded to nearest. All other weights are quantized by GPTQ for the inputs of their layer, computed with
    the earlier layers already quantized (docs/calibrate.md), or only weighted by these inputs. A model of decoder
    blocks runs one block at a time, twice over all samples; any other model runs once as a whole, which the report's
    rows note. Gradients and training modes are unchanged.

    If it is interrupted (an error, Ctrl-C), the model is unchanged.

    Args:
        model: with its weights on their devices; samples are moved to the device of its first parameter.
        data: samples of text from the model's domain; 64 to 256 of 512 tokens are enough. Each is token ids (a list, or
            int64 [T] or [B, T]), a tensor as the model's only argument, a tuple of arguments, or a mapping of keyword
            arguments. Do not pad: padded positions count as tokens. None: 512 random token ids of the vocabulary, for
            the method "importance".
        scheme: as in ``quantize_``: one scheme, a dict from names, or a function.
        method: "gptq", the default with data; "smoothquant", which first moves activation outliers into weights where
            this is exact (for schemes with quantized activations); "importance", the default without data: the search
            for int4 scales weights columns by the mean square of their inputs, and codes are rounded to nearest.
        damping: of GPTQ, as a fraction of the mean diagonal of H: use more with little data.
        filter_fn, embeddings, progress, strict, filter: as in ``quantize_``.

    Returns:
        The Report of ``quantize_``, with ``output_error`` in its rows: the relative error of the layer's outputs (None
        with the method "importance").

    Raises:
        TypeError, ValueError: as ``quantize_``; or the method is unknown, a scheme has fp4 weights, the model or a
            sample is on meta, data is empty or has a wrong type, data is None for another method or for a model without
            an embedding of tokens, the model cannot run it, or inputs of a layer hold NaN or Inf. The model is
            unchanged.

    The model runs under the caller's torch modes (autocast, TF32, default dtype ...); statistics and weights are always
    computed in float32 and float64.
    """
    check_module(model, "calibrate")
    method = default_method(data is not None) if method is None else method
    if method not in METHODS:
        raise ValueError(f"calibrate: method must be one of {', '.join(METHODS)}, not {method!r}")
    if not (isinstance(damping, (int, float)) and 0 < damping <= 1):
        raise ValueError(f"calibrate: damping must be a number above 0, at most 1, not {damping!r}")
    _check_data(model)
    if any(isinstance(module, Sharded) for module in model.modules()):
        raise ValueError("calibrate: the model is sharded, and calibration needs whole weights. Shard it afterwards.")
    filter_fn = layer_filter(filter_fn, filter, "calibrate")
    if data is None and method != "importance":
        raise ValueError(f'calibrate: {method} needs data; random tokens (data=None) only serve method="importance"')
    calls = samples_of(random_samples(model) if data is None else data, model)
    planned = quantize.plan(model, scheme, filter_fn, embeddings, None, strict)
    _check_schemes(planned.pending)
    units = quantize.units_of(planned.pending)
    experts = [layer for unit in planned.experts for layer in unit]
    weighs = method == "importance"
    take: Callable[[list[Unit], Tensor | None, str | None], None] = partial(_quantize, damping=damping)
    if weighs:
        take = partial(_weigh, inferred=quantize.importance_of(planned.layers))
    before = [(layer, layer.module) for layer in (*planned.pending, *experts)]
    folded: list[Callable[[], None]] = []
    try:
        with evaluating(model):
            check_first(model, calls)
            if method == "smoothquant":
                smooth(model, calls, units, folded)
            for some, mean, note in _inputs(model, calls, units, progress, weighs):
                take(some, mean, note)
            for unit in planned.experts:
                fused_experts.replace(unit, None)
    except BaseException:
        for layer, module in before:
            layer.module = module
            for parent, attribute in layer.places:
                put_module(parent, attribute, module)
        for restore in reversed(folded):
            restore()
        raise
    finally:
        planned.settle()
    for layer, module in before:
        layer.module.train(module.training)
    report = planned.finished()
    unreached = [row.name for row in report.rows if row.note == UNREACHED]
    if unreached:
        warnings.warn(f"calibrate: the data did not reach {', '.join(unreached)}; rounded to nearest", stacklevel=3)
    return report


def _check_schemes(layers: list[Layer]) -> None:
    for layer in layers:
        if layer.scheme is not None and layer.scheme.weights == "fp4":
            raise ValueError(
                f"calibrate: {layer.row.name}: no codes of {layer.scheme} can be chosen by data. Quantize it by "
                "qao.quantize_, which rounds to nearest, or give another scheme."
            )


def _check_data(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if modes.has_no_numbers(tensor):
            where = "on meta" if tensor.is_meta else "a FakeTensor"
            raise ValueError(f"calibrate: {name} is {where}, and the model cannot run. Load it first.")


def _inputs(
    model: nn.Module, calls: list[Call], units: list[Unit], progress: bool, squares: bool = False
) -> Iterator[tuple[list[Unit], Tensor | None, str | None]]:
    """Yields units of one scheme with a common input, its mean of x xᵀ (None: no token reached them) and a note.

    With ``squares`` the mean is that of x² (None: fewer than _LEAST_TOKENS reached them).

    The caller quantizes them before it takes the next ones: the outputs of each block are then computed again for the
    next block.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # here, to keep `import qao` light

    blocks, why = find_blocks(model, calls)
    inside = _by_block(blocks, units)
    stages = {id(unit) for some in inside for unit in some}
    outside = [unit for unit in units if id(unit) not in stages]
    least = _LEAST_TOKENS if squares else 1
    with tqdm(total=len(units), desc="calibrate", unit="layer", delay=2, disable=not progress) as bar:
        for index, some in enumerate(inside):
            assert blocks is not None
            inputs = Inputs(squares)
            if some:
                with inputs.watch(_linears(some)):
                    blocks.run(index, inputs.forget, keep=False)
            for together in _with_one_input(some, inputs):
                yield together, inputs.mean(_linears(together[:1]), together[0][0].row.name, least), None
                bar.update(len(together))
            blocks.run(index, inputs.forget, keep=True)
        if outside:
            note = f"calibrated in one pass over the whole model: {why}" if why else None
            inputs = Inputs(squares)
            with inputs.watch(_linears(outside)):
                for args, keywords in calls:
                    called(model, args, keywords)
                    inputs.forget()
            for together in _with_one_input(outside, inputs):
                yield together, inputs.mean(_linears(together[:1]), together[0][0].row.name, least), note
                bar.update(len(together))


def _with_one_input(units: list[Unit], inputs: Inputs) -> list[list[Unit]]:
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        weight = unit[0].weight
        key = tuple(inputs.key(module) for module in _linears([unit]))
        groups.setdefault((key, unit[0].scheme, weight.shape[1], weight.dtype, weight.device), []).append(unit)
    return list(groups.values())


def _by_block(blocks: Blocks | None, units: list[Unit]) -> list[list[Unit]]:
    """Units with all linear layers in one block, by block."""
    if blocks is None:
        return []
    owners = {id(module): index for index, block in enumerate(blocks.modules) for module in block.modules()}
    found: list[list[Unit]] = [[] for _ in blocks.modules]
    for unit in units:
        of = {owners.get(id(module), -1) for module in _linears([unit])}
        if len(of) == 1 and (index := of.pop()) >= 0:
            found[index].append(unit)
    return found


def _linears(units: Iterable[Unit]) -> list[nn.Module]:
    return [layer.module for unit in units for layer in unit if layer.is_linear]


def _quantize(units: list[Unit], hessian: Tensor | None, note: str | None, damping: float) -> None:
    """Quantizes layers with a common input."""
    firsts = [unit[0] for unit in units]
    names, scheme = [layer.row.name for layer in firsts], firsts[0].scheme
    assert scheme is not None
    made: list[tuple[PackedWeight, float | None, float | None]]
    if hessian is None:
        note = UNREACHED
        made = [(pack_weight(layer.weight, scheme, None, layer.row.name), None, None) for layer in firsts]
    else:
        weights = [layer.weight for layer in firsts]
        made = [*quantized(weights, hessian, scheme, damping, names)]
    for unit, (packed, error, of_nearest) in zip(units, made, strict=True):
        if error is not None and not math.isfinite(error):
            raise ValueError(f"{unit[0].row.name}: its outputs are too large for float32, so errors cannot be weighted")
        quantize.put(unit, packed)
        for layer in unit:
            layer.row.output_error, layer.row.output_error_nearest = error, of_nearest
            layer.row.note = layer.row.note if note is None else "; ".join(filter(None, (layer.row.note, note)))


def _weigh(units: list[Unit], squares: Tensor | None, note: str | None, inferred: Mapping[str, Tensor]) -> None:
    """Quantizes layers with a common input, of which ``squares`` [K] is the mean square by column."""
    note = "; ".join(filter(None, (note, _RARE if squares is None else None)))
    for unit in units:
        name, scheme = unit[0].row.name, unit[0].scheme
        assert scheme is not None
        importance = inferred.get(name) if squares is None or not squares.any() else squares
        quantize.put(unit, pack_weight(unit[0].weight, scheme, None, name, importance))
        for layer in unit:
            layer.row.note = "; ".join(filter(None, (layer.row.note, note))) or None
