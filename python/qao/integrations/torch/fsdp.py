"""FSDP2 (``torch.distributed.fsdp.fully_shard``): packed tensors keep their dtype; needs torch.distributed.

FSDP2 casts what it gathers to the ``param_dtype`` of its ``MixedPrecisionPolicy``: floats, and in torch 2.11 integers
too. Of a quantized layer only the bias may be cast: scales of another dtype are wrong numbers. ``register`` teaches
FSDP2 so, and how to shard integers, which torch 2.11 refuses since it makes a sharded Parameter trainable first.
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
    """Called once FSDP2 is imported."""
    init_dtypes = _fsdp_param.FSDPParam.init_dtype_attrs

    @functools.wraps(init_dtypes)
    def init_dtype_attrs(self: Any, mp_policy: Any) -> None:
        init_dtypes(self, mp_policy)
        module, name = self._module_info.module, self._module_info.param_name
        if isinstance(module, PackedModule) and name in module.packed.tensors():
            self.param_dtype = None  # as it is

    _fsdp_param.FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[method-assign]
    if torch.__version__ < "2.13":
        _fsdp_param.nn = SimpleNamespace(**{**vars(nn), "Parameter": _parameter})  # type: ignore[attr-defined, assignment]


def _parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """nn.Parameter, but for data that cannot have a gradient."""
    return nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))
