"""Checks for state that a module replacement would lose: hooks, an instance-level forward, shards."""

from __future__ import annotations

from types import MethodType

from torch import nn

SHARDED = (
    "it is sharded (fully_shard, FSDP, tensor parallelism): quantize first, then call fully_shard, because "
    "FullyShardedDataParallel does not support integers, or parallelize_module with the styles of qao.distributed"
)


def attached(module: nn.Module) -> str | None:
    """Description of the state that would be lost if the module were replaced; None if there is no such state."""
    if "_hf_hook" in vars(module):
        return (
            "a hook of accelerate runs it (device_map, offloading): quantize before dispatch_model, or call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
        )
    # After removing its hook, accelerate leaves the bound forward of the class on the instance.
    own = MethodType(type(module).forward, module)
    if vars(module).get("forward", own) != own:
        return "its forward was replaced on the instance"
    hooks = {name.strip("_"): value for name, value in vars(module).items() if name.endswith("_hooks") and value}
    if "fsdp" in repr(hooks).lower():
        return SHARDED
    return f"it has {', '.join(hooks)}, which would be lost" if hooks else None
