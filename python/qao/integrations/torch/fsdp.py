"""FSDP2 (``torch.distributed.fsdp.fully_shard``): keeps the dtype of packed tensors.

FSDP2 casts gathered tensors to the ``param_dtype`` of its ``MixedPrecisionPolicy``: floats, and in torch 2.11 also
integers. In a quantized layer only the bias may be cast; scales in another dtype give wrong results. ``register``
patches FSDP2 accordingly and lets it shard integers, which torch 2.11 rejects because it first makes a sharded
Parameter trainable.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

from ...nn.packed_module import PackedModule


def register() -> None:
    """Called after FSDP2 is imported."""
    init_dtypes = _fsdp_param.FSDPParam.init_dtype_attrs

    @functools.wraps(init_dtypes)
    def init_dtype_attrs(self: Any, mp_policy: Any) -> None:
        init_dtypes(self, mp_policy)
        module, name = self._module_info.module, self._module_info.param_name
        if isinstance(module, PackedModule) and name in module.packed.tensors():
            self.param_dtype = None  # keep the dtype

    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign]
    if torch.__version__ < "2.13":
        _fsdp_param.nn = SimpleNamespace(**{**vars(nn), "Parameter": _parameter})  # type: ignore[attr-defined, assignment]


def _parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """nn.Parameter, with ``requires_grad`` only for dtypes that support gradients."""
    return nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))
