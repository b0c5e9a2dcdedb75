"""PEFT: LoRA on a QuantLinear without registering a mapping. Importing this module needs peft.

``register`` makes peft use ``LoraQuantLinear`` as the LoRA layer of a QuantLinear, keeps scales unchanged in
``prepare_model_for_kbit_training``, and makes ``modules_to_save`` of a quantized layer an error. Other methods:
``peft_methods``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any
from unittest import mock

import torch
from peft.tuners import lora, tuners_utils
from peft.utils import other
from torch import Tensor, nn

from ...nn.linear import QuantLinear
from ...nn.packed_module import PackedModule, frozen
from ...schemes import PackedWeight
from . import peft_methods


class LoraQuantLinear(lora.Linear):  # type: ignore[misc]
    """LoRA on a QuantLinear, with all features of peft's ``lora.Linear``, including DoRA.

    The base layer is unchanged until ``merge``. Then it holds Q(W + ΔW), quantized again with its scheme, and a warning
    reports the distance from W + ΔW. W is kept: ``unmerge`` restores it bit for bit, and merging another adapter starts
    from it, so errors do not accumulate.
    """

    merges_itself = True
    # Weight and bias without adapters while some are merged. A tuple, since Module would register a Parameter.
    _original: tuple[PackedWeight, Tensor | None] | None = None

    @property
    def fan_in_fan_out(self) -> bool:
        return False  # even if the QuantLinear replaced a Conv1D with weight [K, N]

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, value: bool) -> None:
        pass

    def _changes_the_weight(self, *arguments: Any) -> None:
        raise ValueError(
            "This init_lora_weights takes a part of the weight out of the base layer, which a quantized one cannot "
            "give. Use True, 'gaussian', 'orthogonal' or 'eva', or initialize on the float model and quantize then."
        )

    pissa_init = olora_init = corda_init = loftq_init = lora_ga_init = _changes_the_weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight and quantize the sum.

        Raises:
            ValueError: the sum holds NaN or Inf, or a tensor is on meta, which is always checked; nothing is changed
                then.
        """
        base = self.get_base_layer()
        if not isinstance(base, QuantLinear):  # dequantized since
            super().merge(safe_merge, adapter_names)
            return
        names = [n for n in tuners_utils.check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        peft_methods.check_data(self, names)
        original = self._original or (base.packed, base.bias)
        present, bias = original
        weight = without = base.scheme.dequantize(
            present.qweight, present.scales, base.out_features, base.in_features, torch.float32
        )
        for name in (*self.merged_adapters, *names):
            if name in self.lora_variant:
                weight = self.lora_variant[name].merge_safe(self, name, weight)
            else:
                weight = weight + self.get_delta_weight(name).to(weight)
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError("LoRA with lora_bias=True cannot be merged: the QuantLinear has no bias.")
                bias = bias + (self.lora_B[name].bias * self.scaling[name]).to(bias)
        if bias is not None and not bias.isfinite().all():
            raise ValueError(f"adapter {', '.join(names)}: the merged bias holds NaN or Inf")
        change = (weight - without).norm()
        packed = base.requantize(weight, f"adapter {', '.join(names)}: the merged weight") if change else present
        self._original = original
        base.set_packed(packed)
        if bias is not None and bias is not base.bias:
            base.bias = frozen(bias.detach())
        self.merged_adapters.extend(names)
        if change:
            peft_methods.warn_of_rounding(base, packed, weight, change)

    def unmerge(self) -> None:
        """Remove all adapters from the weight and restore it bit for bit."""
        base = self.get_base_layer()
        if not isinstance(base, QuantLinear) or self._original is None:
            super().unmerge()
            return
        peft_methods.check_data(self, [])
        device = base.qweight.device
        (packed, bias), self._original = self._original, None
        base.set_packed(PackedWeight(*(t if t is None else t.to(device) for t in packed.tensors().values())))  # type: ignore[arg-type]
        base.bias = None if bias is None else frozen(bias.to(device))
        self.merged_adapters.clear()

    def __repr__(self) -> str:
        return str(super().__repr__()).replace("lora.LoraQuantLinear", "lora.QuantLinear", 1)


def register() -> None:
    """Called after peft is imported."""
    peft_methods.register()
    create = lora.LoraModel._create_new_module

    @functools.wraps(create)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        layer = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
        with warnings.catch_warnings():
            if isinstance(layer, QuantLinear):
                # Register for each config: a config does not save registrations.
                lora_config._register_custom_module({QuantLinear: LoraQuantLinear})
                warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            module: nn.Module = create(lora_config, adapter_name, target, **kwargs)
        return module

    lora.LoraModel._create_new_module = staticmethod(create_new_module)

    check = other.ModulesToSaveWrapper.check_module

    @functools.wraps(check)
    def check_module(self: Any) -> None:
        check(self)
        if isinstance(self.original_module, PackedModule):
            raise TypeError(
                "modules_to_save names a quantized layer, which cannot be trained. Leave it in float, with "
                "quantize_(model, {name: None, 're:.*': scheme}), or let LoRA target it."
            )

    other.ModulesToSaveWrapper.check_module = check_module

    prepare = other.prepare_model_for_kbit_training

    @functools.wraps(prepare)
    def prepare_model_for_kbit_training(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        packed = [p for m in model.modules() if isinstance(m, PackedModule) for p in m.packed.tensors().values()]
        before = [(parameter, parameter.data) for parameter in packed if parameter is not None]
        if before and not getattr(model, "is_loaded_in_4bit", False):
            # The flag that peft checks before it enables gradient checkpointing.
            with mock.patch.object(model, "is_loaded_in_4bit", True, create=True):
                prepare(model, *args, **kwargs)
        else:
            prepare(model, *args, **kwargs)
        for parameter, data in before:
            parameter.data = data
        return model

    for module in ("peft.utils.other", "peft.utils", "peft"):
        vars(sys.modules[module])["prepare_model_for_kbit_training"] = prepare_model_for_kbit_training
