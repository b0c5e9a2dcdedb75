"""FSDP1 (``FullyShardedDataParallel``): an error that names FSDP2, before the model is wrapped.

FSDP1 flattens all parameters of a module into one tensor of one dtype, and a quantized layer has several dtypes.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

from ...nn.packed_module import PackedModule
from ..wrapping import wrap


def register() -> None:
    """Called after FSDP1 is imported."""
    wrap(fsdp.FullyShardedDataParallel, "__init__", _checked)


def _checked(upstream: Any) -> Any:
    parameters = inspect.signature(upstream)

    def __init__(*args: Any, **options: Any) -> None:
        given = parameters.bind(*args, **options).arguments
        ignored = [*(given.get("ignored_modules") or ()), *(given.get("ignored_states") or ())]
        _check(given["module"], ignored)
        upstream(*args, **options)

    return __init__


def _check(model: nn.Module, ignored: list[Any]) -> None:
    inside = {id(part) for one in ignored for part in (one.modules() if isinstance(one, nn.Module) else [one])}
    for name, module in model.named_modules():
        if isinstance(module, PackedModule) and not {id(module), id(module.qweight)} & inside:
            raise TypeError(
                f"FullyShardedDataParallel: {name or 'the module'} is a {type(module).__name__}, and FSDP1 shards only "
                "parameters of one dtype. Use FSDP2: torch.distributed.fsdp.fully_shard(model), which shards packed "
                "weights, or leave quantized layers unsharded: ignored_modules=[m for m in model.modules() if "
                f"isinstance(m, qao.{type(module).__name__})]."
            )
