"""diffusers: QaoConfig as ``quantization_config`` of models. Files use qao's own format."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ...checkpoints.native import VERSION, markers_in_files
from ...nn import marker
from .config import QaoConfig
from .loading import Loader
from .registration import dequantized, fill, mark

__all__ = ["QaoConfig", "QaoQuantizer", "attach", "forget_config", "register"]


class QaoQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """The quantizer interface of diffusers for loading and saving a model."""

    use_keep_in_fp32_modules = True
    required_packages: list[str] = []

    def __init__(self, quantization_config: QaoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Single-file loaders never state that the file is float. A saved configuration names layers.
        if quantization_config.scheme is not None and not quantization_config.layers:
            self.pre_quantized = False
        self.loader = Loader(quantization_config, self.pre_quantized)
        self._markers: dict[str, marker.Marker] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self.loader.validate(kwargs.get("device_map"))

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        if not self.pre_quantized:
            return loaded_keys
        self._markers = markers_in_files(checkpoint_files)
        hidden = {f"{name}.{key}" for name in self.loader.config.layers for key in (marker.MARKER, marker.TRIPWIRE)}
        return [name for name in loaded_keys if name not in hidden]

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        kept = kwargs.get("keep_in_fp32_modules") or ()

        def dtype(name: str) -> torch.dtype | None:
            return torch.float32 if any(part in kept for part in name.split(".")) else None

        self.loader.prepare(model, device_map=kwargs.get("device_map"), dtypes=dtype)
        if self.pre_quantized:
            self.loader.check_markers(model, self._markers)
        return model

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        self.loader.absent.update(missing_keys)
        return missing_keys

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> Any:
        """The dtype that ``device_map="auto"`` assumes for weights; unquantized ones keep their dtype."""
        if self.pre_quantized:
            return torch_dtype
        from accelerate.utils import CustomDtype

        schemes = [layer.scheme for layer in self.loader.pending.values()]
        four = bool(schemes) and all(scheme is not None and scheme.weights in ("int4", "fp4") for scheme in schemes)
        return CustomDtype.INT4 if four else torch.int8

    def get_special_dtypes_update(self, model: nn.Module, torch_dtype: torch.dtype) -> dict[str, torch.dtype]:
        if self.pre_quantized:
            return {}
        names = (name for name, _ in model.named_parameters())
        return {name: torch_dtype for name in names if not self.loader.takes(name)}

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        return param_name in self.loader.pending or param_name in self.loader.dtypes

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if param_name in self.loader.pending:
            self.loader.take(param_name, param_value.to(target_device))
            return
        path, _, last = param_name.rpartition(".")
        # Use the tensor from the file: ``param_value`` was cast to the dtype of the model.
        stored = state_dict[param_name].to(target_device)
        model.get_submodule(path)._parameters[last] = nn.Parameter(stored, requires_grad=False)

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> bool:
        raise ValueError(
            f"{param_name}: {list(loaded_param.shape)} in the checkpoint, and {list(current_param.shape)} in the model"
        )

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self.loader.finish(model)
        attach(model, self)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, str]]:
        return state_dict, {"qao": str(VERSION)}

    @property
    def supports_parallel_loading(self) -> bool:
        """Whether threads may load files side by side (HF_ENABLE_PARALLEL_LOADING); quantizing has state."""
        return bool(self.pre_quantized)

    def dequantize(self, model: Any) -> Any:
        return dequantized(model)

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def register() -> None:
    """Called after diffusers has defined its tables of quantizers."""
    from diffusers.quantizers import auto

    fill(auto, QaoConfig, QaoQuantizer)


def attach(model: Any, quantizer: QaoQuantizer | None = None) -> None:
    """Mark a model as quantized, so that ``save_pretrained`` writes its configuration."""
    config = QaoConfig.of(model)
    quantizer = quantizer or QaoQuantizer(config, pre_quantized=True)
    if mark(model, config, quantizer, diffusers.ModelMixin):
        model.register_to_config(quantization_config=config)


def forget_config(model: Any) -> None:
    """Remove what ``attach`` wrote to the frozen configuration."""
    kept = {name: value for name, value in model._internal_dict.items() if name != "quantization_config"}
    model._internal_dict = type(model._internal_dict)(kept)
