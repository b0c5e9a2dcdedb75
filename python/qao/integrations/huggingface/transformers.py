"""transformers: QaoConfig as ``quantization_config``, for versions 4.57 and 5.

A float checkpoint is quantized weight by weight as its tensors arrive. For a quantized checkpoint, quantized layers are
created before its tensors arrive. Saving uses ``get_state_dict_and_metadata``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from ...checkpoints import native
from ...nn import marker
from ...nn.packed_module import PackedModule
from ...quantization.walk import byte_count
from ..wrapping import wrap
from .config import QaoConfig
from .loading import Loader
from .registration import dequantized, fill, mark
from .saving import files_of
from .tensor_parallel import Sharding

__all__ = ["QaoConfig", "QaoQuantizer", "attach", "forget_config", "register"]

_V5 = int(transformers.__version__.partition(".")[0]) >= 5


class QaoQuantizer(HfQuantizer):  # type: ignore[misc]
    """The quantizer interface of transformers for loading and saving a model."""

    requires_calibration = False
    requires_parameters_quantization = True  # version 4
    required_packages: list[str] = []

    def __init__(self, quantization_config: QaoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.modules_to_not_convert: list[str] = []
        self.loader = Loader(quantization_config, self.pre_quantized)
        self._unexpected: Any = None  # the model's patterns of names that may be left over
        self._kept: Callable[[str], torch.dtype | None] = partial(_kept_dtype, {})  # dtypes that the model requires
        self._watched: list[str] = []  # methods patched during loading
        self._cast_to: torch.dtype | None = None  # version 4: dtype of arriving tensors, set while loading

    # ---- before the weights arrive

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self.loader.validate(kwargs.get("device_map"))

    def update_attn_implementation(self, config: Any) -> Any:
        """Version 5 calls this before ``dtype="auto"`` is looked up in ``config``."""
        if self.pre_quantized and self.quantization_config.dtype is not None:
            config.dtype = self.quantization_config.dtype
        return config

    update_tp_plan = update_attn_implementation  # the same hook in version 4

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        ties = getattr(model, "all_tied_weights_keys", None)  # version 5; version 4 shares a Parameter by now
        tied = [name for pair in ties.items() for name in pair] if isinstance(ties, dict) else []
        self._kept = _kept_dtypes(model, kwargs.get("dtype") or model.dtype)
        self.loader.prepare(model, tied, kwargs.get("device_map"), self._kept)
        self._watch(model)
        self.loader.sharding = Sharding(model, self.loader.is_quantized)
        self._unexpected = model._keys_to_ignore_on_load_unexpected
        if self.loader.hidden:
            patterns = [*(self._unexpected or ()), rf"(^|\.){marker.MARKER}$"]
            wires = [name for name in self.loader.hidden if name.endswith(marker.TRIPWIRE)]
            prefix = f"{getattr(model, 'base_model_prefix', '')}."  # which names in files of a base model lack
            wires += [name.removeprefix(prefix) for name in wires if name.startswith(prefix)]
            patterns += [rf"(^|\.){re.escape(name)}$" for name in wires]
            model._keys_to_ignore_on_load_unexpected = set(patterns) if _V5 else patterns
        return model

    def check_files(
        self,
        model: Any,
        state: Mapping[str, Any] | None,
        files: Sequence[str] | None,
        how: Any,
        options: Mapping[str, Any],
    ) -> None:
        """Check the files that transformers will read; ``how``: LoadStateDictConfig of version 5."""
        if not self.pre_quantized:
            return
        markers = native.markers(state) if state is not None else native.markers_in_files(files or ())
        ignore = bool(getattr(how, "ignore_mismatched_sizes", False))  # not supported in version 4
        renamed = _renaming(getattr(how, "weight_mapping", None), options.get("key_mapping"))
        self.loader.check_markers(model, markers, ignore_sizes=ignore, renamed=renamed)

    def _watch(self, model: Any) -> None:
        """Record which tensors transformers initializes because they are missing or have another shape."""
        for name in ("_move_missing_keys_from_meta_to_device", "_move_missing_keys_from_meta_to_cpu"):
            upstream = getattr(model, name, None)
            if upstream is not None:
                vars(model)[name] = partial(self._note_missing, upstream)
                self._watched.append(name)

    def _note_missing(self, upstream: Any, missing: Any, *args: Any, **kwargs: Any) -> Any:
        self.loader.absent.update(missing)
        return upstream(missing, *args, **kwargs)

    # ---- while they arrive: version 5

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return self.loader.takes(param_name) or self._cast_to is not None

    def get_quantize_ops(self) -> Any:
        return _Quantize(self.loader)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        patterns = getattr(converter, "target_patterns", ())
        return None if any(name in self.loader.dtypes for name in patterns) else dtype

    def param_element_size(self, model: nn.Module, param_name: str, param: Tensor) -> float:
        layer = self.loader.pending.get(param_name) or self.loader.experts.pending.get(param_name)
        if layer is None or layer.scheme is None:
            return param.element_size()
        *experts, n, k = layer.row.shape
        packed = layer.scheme.empty(n, k, dtype=param.dtype, device="meta", experts=experts[0] if experts else None)
        return byte_count(*(t for t in packed.tensors().values() if t is not None)) / max(1, param.numel())

    # ---- while they arrive: version 4

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        # Missing weights are initialized in float and quantized at the end.
        self.loader.absent.update(missing_keys)
        for name in missing_keys:
            self.loader.pending.pop(name, None)
        return missing_keys

    def update_expected_keys(self, model: Any, expected_keys: list[str], loaded_keys: list[str]) -> list[str]:
        # transformers would cast every float tensor to this dtype, including scales. Without it, qao casts.
        if getattr(model.config, "_pre_quantization_dtype", None) is not None:
            self._cast_to = model.config._pre_quantization_dtype
            model.config._pre_quantization_dtype = None
        return expected_keys

    def create_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        if param_name in self.loader.pending:
            if not self.loader.fits(param_name, param_value):
                raise RuntimeError(_mismatch(param_name, param_value, model.get_parameter(param_name)))
            dtype = self._kept(param_name) or self._cast_to
            self.loader.take(param_name, param_value.to(target_device, dtype))
            return
        path, _, last = param_name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, last)
        dtype = self.loader.dtypes.get(param_name, old.dtype) if param_value.is_floating_point() else None
        value = param_value.to(target_device, dtype)
        if value.shape != old.shape:
            raise RuntimeError(_mismatch(param_name, value, old))
        if last in module._parameters:
            module._parameters[last] = parameter = nn.Parameter(value, requires_grad=value.is_floating_point())
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        else:
            module._buffers[last] = value

    def adjust_target_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.pre_quantized else torch.int8

    def get_special_dtypes_update(self, model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {name: dtype for name, _ in model.named_parameters() if name not in self.loader.pending}

    # ---- after loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model._keys_to_ignore_on_load_unexpected = self._unexpected
        for name in self._watched:
            vars(model).pop(name, None)
        if self._cast_to is not None:
            model.config._pre_quantization_dtype, self._cast_to = self._cast_to, None
        self.loader.finish(model)
        attach(model, self)
        return model

    # ---- saving and other hooks

    def get_state_dict_and_metadata(self, model: Any, *args: Any) -> tuple[dict[str, Any], dict[str, str]]:
        if not any(isinstance(module, PackedModule) for module in model.modules()):  # it had no linear layers
            forget_config(model)
            return dict(model.state_dict()), {}
        state, metadata, model.config.quantization_config = files_of(model)
        return state, metadata

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return dequantized(model, dtype)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _renaming(conversions: Any, key_mapping: Mapping[str, str] | None) -> Callable[[str], str] | None:
    """Map from a layer name in a file to that of its module, with the renaming passed to ``from_pretrained``."""
    if conversions:
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        return lambda name: rename_source_key(f"{name}.weight", renamings, [])[0].removesuffix(".weight")
    if key_mapping:
        return lambda name: reduce(lambda key, pair: re.sub(pair[0], pair[1], key), key_mapping.items(), name)
    return None


def _mismatch(name: str, value: Tensor, own: Tensor) -> str:
    return f"size mismatch for {name}: {list(value.shape)} in the checkpoint, {list(own.shape)} in the model"


def _kept_dtypes(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Map from a tensor name to the dtype that the model class requires instead of ``dtype``."""
    plan: dict[str, torch.dtype] = {}
    if dtype == torch.float16:
        plan.update(dict.fromkeys(getattr(model, "_keep_in_fp32_modules", None) or (), torch.float32))
    if dtype in (torch.float16, torch.bfloat16):
        plan.update(dict.fromkeys(getattr(model, "_keep_in_fp32_modules_strict", None) or (), torch.float32))
    around = ("", "") if _V5 else (r"(^|\.)", r"($|\.)")  # version 5 searches a name as a pattern
    patterns = {re.compile(pattern.replace("*", ".*").join(around)): kept for pattern, kept in plan.items()}
    return partial(_kept_dtype, patterns)


def _kept_dtype(patterns: dict[re.Pattern[str], torch.dtype], name: str) -> torch.dtype | None:
    # Not a closure: a model with its quantizer must be picklable, for example by torch.save(model).
    return next((kept for pattern, kept in patterns.items() if pattern.search(name)), None)


class _Quantize:
    """Version 5 conversion that puts a QuantLinear into the model instead of a tensor."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def convert(
        self, input_dict: dict[str, Any], *, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        left = {}
        for name, value in input_dict.items():
            if not self._loader.takes(name):
                left[name] = value
                continue
            tensor = value[0] if isinstance(value, list) else value
            if not self._loader.fits(name, tensor):  # reported by transformers, which continues if allowed to
                left[name] = value
                continue
            self._loader.take(name, tensor)
            if missing_keys is not None:
                missing_keys.discard(name)
        return left


def register() -> None:
    """Called after transformers has defined its tables of quantizers."""
    from transformers.quantizers import auto

    fill(auto, QaoConfig, QaoQuantizer)


def watch_loading() -> None:
    """Let the quantizer inspect a checkpoint before loading. Called after the base class of models is defined."""
    from transformers.modeling_utils import PreTrainedModel

    wrap(PreTrainedModel, "_load_pretrained_model", _checking_files)


def _checking_files(upstream: Any) -> Any:
    signature = inspect.signature(upstream)

    def load(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        how = given.get("load_config")  # version 5
        quantizer = given.get("hf_quantizer", getattr(how, "hf_quantizer", None))
        if isinstance(quantizer, QaoQuantizer):
            quantizer.check_files(given["model"], given["state_dict"], given["checkpoint_files"], how, given)
        return upstream(*args, **options)

    return load


def attach(model: Any, quantizer: QaoQuantizer | None = None) -> None:
    """Mark a model as quantized. ``save_pretrained`` asks ``hf_quantizer``, which writes its current state."""
    config = QaoConfig.of(model)
    quantizer = quantizer or QaoQuantizer(config, pre_quantized=True)
    if mark(model, config, quantizer, transformers.PreTrainedModel):
        model.config.quantization_config = config
        for one in _configs(model):  # from_pretrained sets it too. Mamba layers and flash attention read it.
            one._is_quantized = True


def forget_config(model: Any) -> None:
    """Remove what ``attach`` wrote to the configuration, and conversions that saving left out."""
    for name in ("quantization_method", "_weight_conversions"):  # as transformers' remove_quantization_config does
        vars(model).pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for one in _configs(model):
        for name in ("_is_quantized", "_pre_quantization_dtype"):  # version 4 cannot write the latter into a file
            vars(one).pop(name, None)


def _configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
