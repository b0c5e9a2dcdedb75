"""Linear layers excluded by default: small, sensitive ones (routers and layers with one output)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_REMEDY = "name it in a dict of schemes to quantize it"
ROUTER = f"a router: its errors send tokens to other experts; {_REMEDY}"
ONE_OUTPUT = f"it has a single output, so quantizing saves nothing; {_REMEDY}"

_GATES = {"gate", "gating", "moe_gate", "expert_gate", "shared_expert_gate"}


def reason_to_exclude(name: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module]) -> str | None:
    """Why the linear layer ``name`` with a weight [N, K] is excluded by default; None if it is not."""
    if is_router(name, shape, modules):
        return ROUTER
    return ONE_OUTPUT if shape[:1] == (1,) else None


def is_router(name: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module]) -> bool:
    """Whether the module ``name`` with a weight [N, K] selects experts or computes their weights.

    One of these holds: a part of its name contains the word "router"; its class or that of an enclosing module has
    "Router" or "TopK" in its name; a part of its name is "gate" ("gating", "shared_expert_gate", ...), it has fewer
    outputs than inputs and is not inside an expert. "gate_proj" and "gate_up_proj" do not count as gates.
    """
    parts = name.split(".")
    path = [".".join(parts[: i + 1]) for i in range(len(parts))]
    if any("router" in part.split("_") for part in parts):
        return True
    if any(word in type(modules[one]).__name__ for one in path if one for word in ("Router", "TopK")):
        return True
    gates = [i for i, part in enumerate(parts) if part in _GATES]
    if not gates or len(shape) != 2 or shape[0] >= shape[1]:
        return False
    return not any("expert" in part for part in parts[: gates[0]])
