"""Loading logic of all quantizers: makes room for quantized layers or quantizes arriving weights."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import marker
from ...nn.eligibility import is_fused
from ...nn.experts import QuantExperts
from ...nn.linear import QuantLinear, pack_weight
from ...nn.marker import Marker
from ...nn.packed_module import PackedModule
from ...quant_primitives.importance import importance_part, importance_sources, inferred_importance
from ...quantization import targets
from ...quantization.fused_experts import Arriving
from ...quantization.module_swap import put_module
from ...quantization.quantize import quantize_
from ...quantization.report import Row
from ...quantization.rules import matches, selector
from ...quantization.skeleton import Undo, prepare_layers, undo
from ...quantization.walk import Layer, walk
from ...schemes import SCHEMES, Int4Weight, Scheme
from .config import QaoConfig
from .tensor_parallel import Sharding


class Unfit(ValueError):
    """A quantized checkpoint does not fit this model or the target device."""


class Loader:
    """State of one model that a library loads into a meta skeleton, tensor by tensor.

    Attributes:
        pending: weights to quantize when they arrive, by name.
        experts: projections of fused experts to quantize when they arrive.
        dtypes: dtypes of the tensors of quantized layers, by name; they must not be cast.
        hidden: names in the checkpoint that are not tensors of the model: the markers.
        left: layers with another size in the checkpoint, left in float at the caller's request.
    """

    def __init__(self, config: QaoConfig, pre_quantized: bool) -> None:
        self.config = config
        self.pre_quantized = pre_quantized
        self.pending: dict[str, Layer] = {}
        self.experts = Arriving()
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[tuple[str, str], Tensor] = {}  # importance by target layer and source layer
        self._targets: dict[str, list[str]] = {}  # target layers by source layer
        self._waiting: dict[str, list[Layer]] = {}  # layers that wait for another layer's weight, by its name
        self.hidden: set[str] = set()
        self._schemes: dict[str, Scheme] = {}  # by layer name, once the model is known
        self._hook: Any = None
        self.sharding: Sharding | None = None  # transformers' tensor parallelism
        self._late: tuple[type[nn.Module], ...] = ()  # classes with modules that are quantized at the end
        self.absent: set[str] = set()  # names of tensors missing from the checkpoint or with another shape
        self._shapes: dict[str, torch.Size] = {}  # shapes of the float skeleton's parameters
        self._tied: set[str] = set()  # weights shared with other names
        self._kept: dict[str, torch.dtype] = {}  # by layer name, where the model requires a dtype
        self._replaced: Undo = []  # float modules whose replacements wait for packed weights
        self.left: set[str] = set()
        self._proven: set[str] = set()  # layers with a marker in the checkpoint

    def validate(self, device_map: Any) -> None:
        """Raise ValueError for what cannot be loaded.

        Libraries call this before the model exists, and some call it again with the map that "auto" resolved to.
        """
        if not self.pre_quantized and self.config.scheme is None:
            raise ValueError(
                "QaoConfig: this checkpoint is not quantized by qao, so say how to quantize it: "
                "QaoConfig(qao.Int4WeightOnly()). Load checkpoints that other libraries quantized with "
                "qao.from_pretrained(path)."
            )
        if self.pre_quantized and not self.config.layers:
            raise ValueError("quantization_config: it says quant_method qao, but names no quantized layers")
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "QaoConfig: layers that are offloaded to disk cannot be quantized while they are loaded. Load without "
                "this device_map, and offload then: accelerate.dispatch_model(model, device_map, offload_dir=...)."
            )
        if isinstance(device_map, dict):
            check_devices(self._schemes, device_map)

    def prepare(
        self,
        model: nn.Module,
        tied: Iterable[str] = (),
        device_map: Any = None,
        dtypes: Callable[[str], torch.dtype | None] = lambda name: None,
    ) -> None:
        """Prepare the skeleton before the weights arrive.

        Args:
            model: the skeleton.
            tied: weights that other names share, besides those that share a Parameter.
            device_map: target devices of the layers.
            dtypes: maps a tensor name to a dtype that the model requires instead of the skeleton's.
        """
        self._tied = set(tied)
        if not self.pre_quantized:
            self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            self._plan(model, self._tied)
            planned = self.pending.items()
            self._schemes = {name.removesuffix(".weight"): layer.scheme for name, layer in planned if layer.scheme}
            self.validate(device_map)
            return
        try:
            self._schemes = schemes = _names_in(model, self.config.layers)
            self.validate(device_map)
            kept = {name: dtypes(f"{name}.weight") for name in schemes}
            self._kept = {name: dtype for name, dtype in kept.items() if dtype is not None}
            self._prepare_layers(model)
        except ValueError as error:
            raise Unfit(str(error)) from error

        def hide(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name in self.hidden:
                state.pop(prefix + name, None)

        self._hook = model.register_state_dict_post_hook(hide)

    def _prepare_layers(self, model: nn.Module) -> None:
        self._replaced = prepare_layers(model, self._schemes, dtypes=self._kept)
        self.dtypes = {}
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                tensors = module.packed.tensors().items()
                self.dtypes.update({f"{name}.{key}": tensor.dtype for key, tensor in tensors if tensor is not None})
        self.hidden = {f"{name}.{key}" for name in self._schemes for key in (marker.MARKER, marker.TRIPWIRE)}

    def check_markers(
        self,
        model: nn.Module,
        markers: Mapping[str, Marker],
        *,
        ignore_sizes: bool = False,
        renamed: Callable[[str], str] | None = None,
    ) -> None:
        """Compare the markers of a checkpoint with the layers that ``prepare`` made room for.

        Args:
            model: the skeleton.
            markers: by layer name in the checkpoint.
            ignore_sizes: leave layers of another size in float, for the library to reinitialize.
            renamed: maps a name in the checkpoint to that of the module; None: as transformers renames.

        Raises:
            ValueError: a layer has another size or scheme. Packed tensors of several sizes share one shape.
        """
        find = _finder(model, renamed)
        differ: dict[str, tuple[str, str]] = {}
        other_sizes = set()
        for name, found in markers.items():
            known = find(name)
            module = None if known is None else model.get_submodule(known)
            if known is None or not isinstance(module, PackedModule):
                continue
            self._proven.add(known)
            own = module._marker()
            unlike = marker.difference(found, own)
            if unlike is not None:
                differ[known] = unlike
            if found[1:3] + found[4:] != own[1:3] + own[4:]:
                other_sizes.add(known)
        if ignore_sizes and other_sizes:
            self._leave_in_float(model, other_sizes)
        wrong = [(name, unlike) for name, unlike in differ.items() if name not in self.left]
        if wrong:
            lines = [f"\n  {name}: {there} in the checkpoint, {here} in the model" for name, (there, here) in wrong[:8]]
            more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise ValueError(
                f"{type(model).__name__}: quantized layers of the checkpoint do not match the model that its "
                f"configuration, or an argument, describes:{''.join(lines)}{more}\nUse the configuration that was "
                "saved with these weights."
            )

    def _leave_in_float(self, model: nn.Module, names: Collection[str]) -> None:
        """Restore the float modules of these layers; for experts, both projections."""
        modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        tied = any(modules[name]._tied or f"{name}.weight" in self._tied for name in names)
        if tied or self.sharding is not None and self.sharding.styles:
            raise ValueError(
                f"ignore_mismatched_sizes=True: {', '.join(sorted(names))}: the checkpoint holds packed weights of "
                "another size, and random numbers in their place are not supported "
                f"{'where weights are tied' if tied else 'with tp_plan'}. Load with the sizes of the checkpoint, then "
                "change the model."
            )
        left = set(names)
        for name in names:
            parent = name.rpartition(".")[0]
            if isinstance(modules[parent], QuantExperts):
                left |= {f"{parent}.up", f"{parent}.down"}
        self.left, self._proven = left, self._proven - left
        undo(self._replaced)
        self._schemes = {name: scheme for name, scheme in self._schemes.items() if name not in left}
        self._prepare_layers(model)
        self._shapes = {name: one.shape for name, one in model.named_parameters() if name.rpartition(".")[0] in left}
        warnings.warn(
            f"ignore_mismatched_sizes=True: the checkpoint holds quantized weights of another size for "
            f"{', '.join(sorted(left))}: new random numbers, which stay in float and can be trained. After that, "
            "qao.quantize_(model, scheme) quantizes them too.",
            stacklevel=2,
        )

    def _plan(self, model: nn.Module, tied: set[str]) -> None:
        """Select weights to quantize on arrival: those of a single linear layer. The rest follows at the end."""
        assert self.config.scheme is not None
        found = walk(model)
        keep = _filter_fn(model, self.config.modules_to_not_convert)
        self._late = (nn.Linear, nn.Embedding) if self.config.embeddings else ()
        users = Counter(id(parameter) for _, _, parameter in found.parameters)
        targets.decide(found, selector(found, self.config.scheme), keep)
        for layer in found.linears:
            names = [f"{name}.weight" for name in (layer.row.name, *layer.row.aliases)]
            alone = users[id(layer.module._parameters.get("weight"))] == 1 and not tied.intersection(names)
            if layer.scheme is not None and alone:
                self.pending.update(dict.fromkeys(names, layer))
                if isinstance(layer.scheme, Int4Weight) and layer.scheme.clip_search:
                    for other in importance_sources(layer.row.name):
                        self._targets.setdefault(other, []).append(layer.row.name)
        self.experts = Arriving(found.experts)

    def takes(self, name: str) -> bool:
        return name in self.pending or name in self.experts.pending

    def fits(self, name: str, value: Tensor) -> bool:
        """Whether a weight that ``takes`` accepts has the model's shape; if not, it is no longer pending."""
        layer = self.pending.get(name)
        if layer is None or value.shape == layer.module._parameters["weight"].shape:  # type: ignore[union-attr]
            return True
        for other in [other for other, found in self.pending.items() if found is layer]:
            del self.pending[other]
        self.absent.add(name)
        return False

    def take(self, name: str, value: Tensor) -> None:
        """Replace the linear layer of an arrived weight with a QuantLinear. Its bias arrives before or after."""
        if name in self.experts.pending:
            self.experts.take(name, value)
            return
        layer = self.pending[name]
        assert layer.scheme is not None
        layer.module._parameters["weight"] = nn.Parameter(value, requires_grad=False)
        for other in [other for other, found in self.pending.items() if found is layer]:
            del self.pending[other]
        name = layer.row.name
        for target in self._targets.pop(name, []):
            self._parts[target, name] = importance_part(layer.weight, target)
        for ready in (layer, *self._waiting.pop(name, [])):
            missing = [other for other in importance_sources(ready.row.name) if f"{other}.weight" in self.pending]
            if missing and isinstance(ready.scheme, Int4Weight):
                self._waiting.setdefault(missing[0], []).append(ready)
            else:
                self._replace(ready)

    def _replace(self, layer: Layer) -> None:
        assert layer.scheme is not None
        name, weight, others = layer.row.name, layer.weight, importance_sources(layer.row.name)
        parts = [self._parts.pop((name, other)) for other in others if (name, other) in self._parts]
        importance = inferred_importance(parts, weight.shape[1]) if len(parts) == len(others) else None
        packed = pack_weight(weight, layer.scheme, None, name, importance)
        layer.module = made = QuantLinear.from_packed(layer.module, layer.scheme, packed)
        for parameter in made.parameters():
            if not parameter.is_meta:
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers would do it anew
        for parent, attribute in layer.places:
            put_module(parent, attribute, made)
        if self.sharding is not None and (made.bias is None or not made.bias.is_meta):
            self.sharding.take([layer.row.name, *layer.row.aliases], made)

    def finish(self, model: nn.Module) -> None:
        """Finish loading after all tensors have arrived."""
        if self._hook is not None:
            self._hook.remove()
        if self.sharding is None or self.sharding.mesh is None:
            self._check_shapes(model)
        if self.config.scheme is not None and not self.pre_quantized:
            self.experts.finish()
            self._quantize_the_rest(model)
        else:
            _check_all_loaded(model, self.absent)
            self._check_unproven(model)
        _fill_biases(model, self.absent)
        if self.sharding is not None:
            self.sharding.finish()
        for module in model.modules():
            if isinstance(module, PackedModule):
                module.settle()

    def _check_unproven(self, model: nn.Module) -> None:
        """Raise ValueError if the tensors of a layer without a marker imply another size."""
        proven = {id(model.get_submodule(name)) for name in self._proven}
        for name, module in model.named_modules():
            if isinstance(module, PackedModule) and id(module) not in proven:
                module._check_padding(module.qweight, module.scales, f"{name}." if name else "")

    def _check_shapes(self, model: nn.Module) -> None:
        """Raise RuntimeError if a float parameter took the checkpoint's shape.

        transformers (5.17) allows this with any quantizer, regardless of ``ignore_mismatched_sizes``.
        """
        for name, parameter in model.named_parameters():
            expected = self._shapes.get(name, parameter.shape)
            if parameter.shape != expected:
                raise RuntimeError(
                    f"size mismatch for {name}: {list(parameter.shape)} in the checkpoint, {list(expected)} in the "
                    "model, and this version of transformers cannot skip it (ignore_mismatched_sizes) while it "
                    "quantizes. Load the float model, then call qao.quantize_, or upgrade transformers."
                )

    def _quantize_the_rest(self, model: nn.Module) -> None:
        assert self.config.scheme is not None
        embeddings: Any = {"embeddings": True} if self.config.embeddings else {}
        keep = _filter_fn(model, self.config.modules_to_not_convert)
        fresh = _reinitialized(model, {*self.absent, *self.pending})

        def chosen(module: nn.Module, fqn: str) -> bool:
            return fqn not in fresh and (keep is None or keep(module, fqn))

        report = quantize_(model, self.config.scheme, filter_fn=chosen, progress=False, **embeddings)
        asked = {row.name if row.name in fresh else row.name.rpartition(".")[0] for row in report.rows if _left(row)}
        names = ", ".join(sorted(name for name in asked & fresh if keep is None or keep(model, name)))
        if names:
            warnings.warn(
                f"QaoConfig: the checkpoint does not hold {names}: new random numbers, which stay in float and can be "
                "trained. After that, qao.quantize_(model, scheme) quantizes them too.",
                stacklevel=2,
            )

    def is_quantized(self, name: str, module: nn.Module) -> bool:
        """Whether a module of the skeleton is a quantized layer or may become one."""
        return isinstance(module, PackedModule) or f"{name}.weight" in self.pending or type(module) in self._late


def _left(row: Row) -> bool:
    return row.status == "excluded" and row.note == "by the filter"


def _names_of_new(model: nn.Module, absent: Collection[str]) -> set[str]:
    """Names of model parameters that the checkpoint has under no name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for every in names.values() if all(one in absent for one in every) for name in every}


def _reinitialized(model: nn.Module, absent: Collection[str]) -> set[str]:
    """Names of modules with a weight that is missing from the checkpoint."""
    new = _names_of_new(model, absent)
    return {name.rpartition(".")[0] for name in new if model.get_parameter(name).dim() > 1}


def _fill_biases(model: nn.Module, absent: Collection[str]) -> None:
    """Zero the biases that transformers leaves uninitialized because QuantLinear is not a class it knows."""
    new = _names_of_new(model, absent) if absent else set()
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear) and f"{name}.bias" in new and module.bias is not None:
            module.bias.data.zero_()


def _check_all_loaded(model: nn.Module, absent: Collection[str]) -> None:
    """Raise ValueError if a quantized layer has no values."""
    new = _names_of_new(model, absent) if absent else set()
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            missing = [key for key in module.packed.tensors() if f"{name}.{key}" in new]
            if missing:
                raise ValueError(
                    f"{name}: quantization_config names a quantized layer here, but the checkpoint has no "
                    f"{', '.join(missing)} of it with the model's shape: is the file complete, and for this model?"
                )


def check_devices(schemes: Mapping[str, Scheme], device_map: Mapping[str, Any]) -> None:
    """Raise ValueError if a layer's device has no kernels for its scheme."""
    kinds = {name: _kind(device) for name, device in device_map.items()}
    # With an accelerator in the map, layers on the CPU or disk are computed on the first accelerator.
    main = next((kind for kind in kinds.values() if kind not in ("cpu", "disk")), "cpu")
    wrong = []
    for name, scheme in schemes.items():
        places = [place for place in kinds if not place or f"{name}.".startswith(f"{place}.")]
        kind = kinds[max(places, key=len)] if places else main
        kind = main if kind in ("cpu", "disk") else kind
        if kind not in (*scheme.devices, "meta"):
            wrong.append((name, scheme, kind))
    if not wrong:
        return
    name, scheme, kind = wrong[0]
    more = f" and {len(wrong) - 1} more layers" if len(wrong) > 1 else ""
    others = [word for word, other in SCHEMES.items() if kind in other.devices]
    instead = f', or choose a scheme that has kernels on "{kind}": {", ".join(others)}' if others else ""
    runs = " or ".join(f'device_map="{device}"' for device in scheme.devices)
    raise ValueError(
        f'QaoConfig: {name}{more} would run on "{kind}", which has no kernels of {type(scheme).__name__} ({scheme}). '
        f"Load with {runs}{instead}."
    )


def _kind(device: Any) -> str:
    """The type of a device in a device map: a number is an accelerator's index."""
    if not isinstance(device, int):
        return str(device).partition(":")[0]
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else accelerator.type


def _finder(model: nn.Module, renamed: Callable[[str], str] | None = None) -> Callable[[str], str | None]:
    """Map from a layer name in a checkpoint to that of its module; None if there is none.

    A model with a head holds its base model under a prefix, and transformers writes some models under names that differ
    from their modules' (Swin, DINOv2).
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    experts = [name for name, module in model.named_modules() if is_fused(module)]
    modules.update(f"{name}.{part}" for name in experts for part in ("up", "down"))
    prefix = getattr(model, "base_model_prefix", "")
    rename = _renaming(model) if renamed is None else renamed

    def find(name: str) -> str | None:
        name = name if name in modules else rename(name)
        names = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
        return next((one for one in names if one in modules), None)

    return find


def _names_in(model: nn.Module, layers: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """``layers`` by their names in this model."""
    prefix = getattr(model, "base_model_prefix", "")
    find, found = _finder(model), {}
    for name, scheme in layers.items():
        known = find(name)
        if known is not None:
            found[known] = scheme
        elif not prefix or name.startswith(f"{prefix}."):  # otherwise a layer of a head that this model lacks
            why = (
                "it holds its experts in one tensor, and experts quantized one by one are not supported"
                if ".experts." in name
                else "another model?"
            )
            raise ValueError(f"{name}: a quantized layer in the checkpoint, no module of {type(model).__name__}: {why}")
    return found


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """Map from a layer name in a checkpoint to its module's, as transformers 5 renames tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # version 4 does not rename
        return lambda name: name
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    return lambda name: rename_source_key(f"{name}.weight", renamings, [])[0].removesuffix(".weight")


def _filter_fn(model: nn.Module, names: list[str]) -> Callable[[nn.Module, str], bool] | None:
    """A ``filter_fn`` of ``quantize_`` that excludes these modules; None if the list is empty."""
    if not names:
        return None
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for key in names:
        if not any(_matches(key, name) for name in modules):
            raise ValueError(f"QaoConfig: no module of the model matches {key!r} of modules_to_not_convert")
    return lambda module, fqn: not any(_matches(key, fqn) for key in names)


def _matches(key: str, name: str) -> bool:
    return matches(key, name) if key.startswith("re:") else f".{key}." in f".{name}."
