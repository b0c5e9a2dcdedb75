"""PEFT methods other than LoRA on quantized layers: creation, merging, trainable tokens, embedding.

PEFT methods select their layer by ``isinstance(target, nn.Linear)``. While PEFT inspects a model, quantized layers have
a class that also derives from that of their float layer. The created layer then calls the quantized layer and reads its
``weight``. ``register`` needs peft imported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from peft import mixed_model, peft_model
from peft.tuners import tuners_utils
from torch import Tensor, nn
from torch.nn import functional

from ...nn.embedding import QuantEmbedding
from ...nn.experts import QuantExperts
from ...nn.linear import QuantLinear
from ...nn.packed_module import PackedModule, Sharded, frozen
from ...quantization.targets import uncounted
from ...schemes import PackedWeight

Layer = Any  # a BaseTunerLayer
F = TypeVar("F", bound=Callable[..., Any])

# Same names as the float classes, since PEFT's messages show them.
_FLOAT: dict[type, type] = {
    QuantLinear: type("QuantLinear", (QuantLinear, nn.Linear), {}),
    QuantEmbedding: type("QuantEmbedding", (QuantEmbedding, nn.Embedding), {}),
}
_QUANTIZED = {made: kind for kind, made in _FLOAT.items()}


@contextmanager
def as_float_layers(model: nn.Module) -> Iterator[None]:
    """Temporarily make ``isinstance`` match nn.Linear for QuantLinears and nn.Embedding for QuantEmbeddings."""
    found = [module for module in model.modules() if type(module) in _FLOAT]
    if not found:  # no quantized layers, or an outer call has done it
        yield
        return
    for module in found:
        module.__class__ = _FLOAT[type(module)]
    try:
        yield
    finally:
        for module in model.modules():
            if type(module) in _QUANTIZED:
                module.__class__ = _QUANTIZED[type(module)]


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """After an error, restore the modules of a quantized model and their ``requires_grad``."""
    modules = list(model.modules())
    if not any(isinstance(module, PackedModule) for module in modules):
        yield
        return
    children = [(module, dict(module._modules)) for module in modules]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    configured = "peft_config" in vars(model)
    try:
        yield
    except BaseException:
        if not configured:
            vars(model).pop("peft_config", None)
        for module, before in children:
            module._modules.clear()
            module._modules.update(before)
        for parameter, requires_grad in trained:
            parameter.requires_grad = requires_grad
        raise


def _wrap_all(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap a method in every tuner class that defines it."""
    kinds, seen = [tuners_utils.BaseTuner], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind not in seen and name in vars(kind):
            seen.add(kind)
            setattr(kind, name, functools.wraps(vars(kind)[name])(wrapper(vars(kind)[name])))


def _around(upstream: Any) -> Any:
    def injected(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with as_float_layers(model), _all_or_nothing(model):
            for config in vars(self).get("peft_config", {}).values():
                _check_parameters(config, model)
            result = upstream(self, model, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, tuners_utils.BaseTunerLayer) and isinstance(_base(module), PackedModule):
                _teach_merging(type(module))
        return result

    return injected


def _check_parameters(config: Any, model: nn.Module) -> None:
    """Reject ``target_parameters`` that are weights of quantized layers, which are not Parameters."""
    wanted = tuple(getattr(config, "target_parameters", None) or ())
    for name, module in model.named_modules() if wanted else ():
        owners: dict[str, PackedModule] = module.projections() if isinstance(module, QuantExperts) else {}  # type: ignore[assignment]
        owners = {"weight": module} if isinstance(module, PackedModule) else owners
        for key, owner in owners.items():
            if f"{name}.{key}".endswith(tuple(f".{one}" for one in wanted)) or f"{name}.{key}" in wanted:
                raise TypeError(_refusal(config, f"{name}.{key}", owner, "target_parameters needs float Parameters"))


def _whole(upstream: Any) -> Any:
    """``PeftModel.__init__``: steps after the adapters, such as modules_to_save, may also fail."""

    def init(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with _all_or_nothing(model):
            upstream(self, model, *args, **kwargs)

    return init


def _named(upstream: Any) -> Any:
    """``_create_and_replace`` with errors that name the method, the layer and the remedy."""

    def create(
        self: Any, config: Any, adapter: str, target: nn.Module, name: str, parent: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        base = _base(target)
        if not isinstance(base, PackedModule):
            return upstream(self, config, adapter, target, name, parent, *args, **kwargs)
        key = kwargs.get("current_key") or (args[0] if args else name)
        if isinstance(base, Sharded):
            raise TypeError(_refusal(config, key, base, "it is sharded (qao.distributed)"))
        try:
            result = upstream(self, config, adapter, target, name, parent, *args, **kwargs)
        except ValueError as error:
            if "support" not in str(error):
                raise  # an error in the config, independent of the layer
            raise TypeError(_refusal(config, key, base, str(error))) from error
        if getattr(parent, name) is base:
            raise TypeError(_refusal(config, key, base, "the method ignores it"))
        return result

    return create


def _refusal(config: Any, name: str, base: PackedModule, reason: str) -> str:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    return (
        f"{method} cannot adapt {name}, a quantized {type(base).__name__} ({base.extra_repr()}): {reason.rstrip('.')}. "
        "Use LoRA with target_modules there, or leave the layer in float: "
        "quantize_(model, {name: None, 're:.*': scheme}). The model is unchanged."
    )


def _base(layer: Any) -> nn.Module:
    return layer.get_base_layer() if isinstance(layer, tuners_utils.BaseTunerLayer) else layer  # type: ignore[no-any-return]


def _weight(layer: Layer, upstream: Any) -> Tensor:
    """``layer.weight``: PEFT would use ``qweight`` of any layer that has one."""
    base = layer.get_base_layer()
    return base.weight if isinstance(base, PackedModule) else upstream(layer)


# ---- merging ---------------------------------------------------------------------------------------------------------


def check_data(layer: Layer, names: list[str]) -> None:
    """Raise ValueError if the base layer or an adapter of ``names`` has no values, since PEFT would merge silently."""
    if layer.get_base_layer().qweight.is_meta:
        raise ValueError(
            "accelerate offloads the base layer, or it is on meta. Call merge_adapter, unmerge_adapter or "
            "merge_and_unload of the whole model, which load offloaded layers. Nothing was changed."
        )
    for key, tensor in layer.named_parameters():
        if tensor.is_meta and not set(names).isdisjoint(key.split(".")):
            raise ValueError(
                f"{key} is on meta and has no values, because the base layer was offloaded when PEFT created the "
                "adapter. Call unload() and accelerate.hooks.remove_hook_from_module(model, recurse=True), add or load "
                "the adapter, and dispatch the model after it. Nothing was changed in this layer."
            )


def warn_of_rounding(base: PackedModule, packed: PackedWeight, wanted: Tensor, change: Tensor) -> None:
    """Warn of the rounding error of merging into a quantized layer; ``change``: norm of the adapter's delta."""
    lost = (base.dequantize(torch.float32) - wanted).norm() / change
    warnings.warn(  # one significant digit, so that many layers give few distinct warnings
        f"Merging quantizes the weights again. Their relative error is about {packed.relative_error:.1g}, "
        f"{lost:.1g} times the adapter's own change. To be exact, keep the adapter unmerged, or call "
        "qao.dequantize_(model) first and merge in float.",
        stacklevel=3,
    )


def _teach_merging(kind: type) -> None:
    """Make ``merge`` and ``unmerge`` of a PEFT layer work with a quantized base layer.

    The method merges into a float layer with the base weight, which is then quantized with the base layer's scheme. The
    original weight is kept: ``unmerge`` restores it bit for bit, and merging another adapter starts from it.
    """
    if not hasattr(kind, "merge") or getattr(kind.merge, "quantizes", False) or getattr(kind, "merges_itself", False):
        return
    upstream, back = kind.merge, kind.unmerge  # type: ignore[attr-defined]

    @functools.wraps(upstream)
    def merge(self: Layer, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = _base(self)
        if not isinstance(base, PackedModule):
            upstream(self, safe_merge, adapter_names)
            return
        names = tuners_utils.check_adapters_to_merge(self, adapter_names)
        if not names:
            return
        check_data(self, names)
        before = list(self.merged_adapters)
        present, bias = self._before_merging or (base.packed, base._parameters.get("bias"))
        floats = _float_layer(base, present, bias)
        original = floats.weight.detach().clone()  # type: ignore[operator]
        self.merged_adapters = []
        try:
            with _in_place_of(self, base, floats):
                upstream(self, safe_merge, [*before, *names])
            merged: list[str] = self.merged_adapters
            weight = floats.weight.detach()  # type: ignore[operator]
            change = (weight - original).norm()
            begins = f"adapter {', '.join(names)}: the merged weight"
            packed = base.requantize(weight, begins) if change else present
        except BaseException:
            self.merged_adapters = before
            raise
        if not merged:  # no adapter of these names in this layer
            self.merged_adapters = before
            return
        base.set_packed(_of_base(base, packed))
        if bias is not None:
            base.bias = frozen(floats.bias.detach().to(bias))  # type: ignore[operator]
        object.__setattr__(self, "_before_merging", (present, bias))
        if change:
            warn_of_rounding(base, packed, weight, change)

    @functools.wraps(back)
    def unmerge(self: Layer) -> None:
        base = _base(self)
        if not isinstance(base, PackedModule) or self._before_merging is None:
            back(self)
            return
        check_data(self, [])
        present, bias = self._before_merging
        with _in_place_of(self, base, _float_layer(base, base.packed, base._parameters.get("bias"))):
            back(self)
        device = base.qweight.device
        base.set_packed(PackedWeight(*(t if t is None else t.to(device) for t in present.tensors().values())))  # type: ignore[arg-type]
        if bias is not None:
            base.bias = frozen(bias.to(device))
        object.__setattr__(self, "_before_merging", None)

    merge.quantizes = True  # type: ignore[attr-defined]
    kind.merge, kind.unmerge, kind._before_merging = merge, unmerge, None  # type: ignore[attr-defined]


def _of_base(base: PackedModule, packed: PackedWeight) -> PackedWeight:
    """Remove weight sums and row scales, which an embedding does not store."""
    return packed if base.needs_all else PackedWeight(packed.qweight, packed.scales, sizes=packed.sizes)


def _float_layer(base: PackedModule, packed: PackedWeight, bias: Tensor | None) -> nn.Module:
    n, k = base._sizes
    weight = frozen(base.scheme.dequantize(packed.qweight, packed.scales, n, k, torch.float32))
    if isinstance(base, QuantEmbedding):
        return base.to_float(weight)
    floats = nn.Linear(k, n, bias is not None, device="meta")
    floats.weight = weight
    if bias is not None:
        floats.bias = frozen(bias.detach().to(torch.float32, copy=True))
    return floats


@contextmanager
def _in_place_of(layer: Layer, base: nn.Module, floats: nn.Module) -> Iterator[None]:
    while layer.base_layer is not base:
        layer = layer.base_layer
    layer.base_layer = floats
    try:
        yield
    finally:
        layer.base_layer = base


def _untying(upstream: Any) -> Any:
    """``BaseTuner._unload_and_optionally_merge``, which compares addresses of the embedding and the head."""

    def unload(self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        ends = _ends(self.model)
        if not any(isinstance(module, PackedModule) for end in ends for module in end.modules()):
            return upstream(self, merge, *args, **kwargs)
        tied = merge and self.get_model_config(self.model).get("tie_word_embeddings")
        with mock.patch.object(self, "get_model_config", lambda model: {}):
            model = upstream(self, merge, *args, **kwargs)
        ends = _ends(model)
        if tied and len(ends) == 2 and not _tie_again(*ends):
            model.config.tie_word_embeddings = False
            warnings.warn(
                "The embedding and the head are no longer tied after merging: tie_word_embeddings=False in the config.",
                stacklevel=3,
            )
        return model

    return unload


def _ends(model: Any) -> list[nn.Module]:
    """The embedding and the head of a transformers model, if present."""
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (NotImplementedError, AttributeError):
        return []
    return [end for end in ends if end is not None]


def _tie_again(embedding: nn.Module, head: nn.Module) -> bool:
    """Share the weight of both again if merging separated equal weights. Returns whether they are tied."""
    if not (isinstance(embedding, PackedModule) and isinstance(head, PackedModule)):
        return embedding.weight is head.weight
    own, other = embedding.packed, head.packed
    if own.qweight is other.qweight:
        return True
    if embedding.scheme != head.scheme or not all(torch.equal(a, b) for a, b in zip(own[:2], other[:2], strict=True)):
        return False
    embedding.qweight, embedding.scales = other.qweight, other.scales  # type: ignore[assignment]
    embedding.tie(head)
    return True


# ---- trainable tokens ------------------------------------------------------------------------------------------------


def _with_tokens(upstream: Any) -> Any:
    """``TrainableTokensLayer.forward_adapters``: substitutes trained rows for those of the base layer."""

    def forward_adapters(self: Layer, x: Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_layer
        if not isinstance(base, PackedModule) or self.disable_adapters or not active_adapters or self.merged:
            return upstream(self, x, active_adapters, *args, **kwargs)  # type: ignore[no-any-return]
        self._check_overlapping_tokens(active_adapters)
        result: Tensor = base(x, *args, **kwargs)
        for name in active_adapters:
            tokens = torch.tensor(self.token_indices[name], device=result.device)
            rows = self.trainable_tokens_delta[name].to(result)
            if isinstance(base, QuantEmbedding):
                scale = base.embed_scale
                rows = rows if scale is None else rows * (scale.to(rows) if isinstance(scale, Tensor) else scale)
                hits = x.unsqueeze(-1) == tokens
                result = torch.where(hits.any(-1, keepdim=True), rows[hits.int().argmax(-1)], result)
            else:
                bias: Any = base.bias
                y = functional.linear(x.to(rows.dtype), rows, None if bias is None else bias[tokens].to(rows.dtype))
                result = result.index_copy(-1, tokens, y.to(result.dtype))
        return result

    return forward_adapters


def _made_of_float(upstream: Any) -> Any:
    """``TrainableTokensLayer.__init__``, which reads the sizes of the layer."""

    def init(self: Layer, base_layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        with as_float_layers(base_layer):
            upstream(self, base_layer, *args, **kwargs)

    return init


# ---- counts ----------------------------------------------------------------------------------------------------------


def _counting(upstream: Any) -> Any:
    """``get_nb_trainable_parameters``, which sums tensor sizes."""

    def get_nb_trainable_parameters(self: Any) -> tuple[int, int]:
        trained, total = upstream(self)
        return trained, total + uncounted(self.modules())

    return get_nb_trainable_parameters


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _with_word_embedding(upstream: Any) -> Any:
    """``PeftModel._setup_prompt_encoder``, which finds the embedding by the first size of parameters.

    In a quantized model these are the sizes of packed tensors. PEFT first looks for an embedding under BERT's name.
    """

    def setup(self: Any, adapter_name: str) -> Any:
        model = self.base_model
        search = model.get_submodule
        if not any(isinstance(module, PackedModule) for module in model.modules()):
            return upstream(self, adapter_name)

        def get_submodule(target: str) -> Any:
            try:
                return search(target)
            except AttributeError:
                if target == "embeddings.word_embeddings" and hasattr(model, "get_input_embeddings"):
                    return model.get_input_embeddings()
                raise

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(model, "get_submodule", get_submodule))
            stack.enter_context(_all_or_nothing(model))
            return upstream(self, adapter_name)

    return setup


def register() -> None:
    """Called after peft is imported."""
    from peft.tuners.trainable_tokens import layer as tokens

    _wrap_all("__init__", _around)
    _wrap_all("inject_adapter", _around)
    _wrap_all("_pre_injection_hook", _around)
    _wrap_all("_create_and_replace", _named)
    _wrap_all("_unload_and_optionally_merge", _untying)
    upstream = tuners_utils.BaseTunerLayer.weight.fget
    tuners_utils.BaseTunerLayer.weight = property(lambda self: _weight(self, upstream))
    kind = tokens.TrainableTokensLayer
    kind.forward_adapters = functools.wraps(kind.forward_adapters)(_with_tokens(kind.forward_adapters))
    kind.__init__ = functools.wraps(kind.__init__)(_made_of_float(kind.__init__))
    _teach_merging(kind)
    for model in (peft_model.PeftModel, mixed_model.PeftMixedModel):
        counts = model.get_nb_trainable_parameters
        model.get_nb_trainable_parameters = functools.wraps(counts)(_counting(counts))
    init = peft_model.PeftModel.__init__
    peft_model.PeftModel.__init__ = functools.wraps(init)(_whole(init))
    setup = peft_model.PeftModel._setup_prompt_encoder
    peft_model.PeftModel._setup_prompt_encoder = functools.wraps(setup)(_with_word_embedding(setup))
