"""Proof that a subclass of nn.Linear with a custom forward computes exactly x · Wᵀ + bias."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Names that such a forward may use. Others (training, lora_A, scaling, dropout, shape, …) could change its result in
# another call, which a trial would not show.
_ATTRIBUTES = set("weight bias T mT t transpose to dtype nn functional linear matmul jit is_scripting forward".split())
_GLOBALS = (torch, nn, functional, functional.linear, torch.matmul)
_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR")
# A class that overrides one of these changes the call or the weight outside its forward.
_DECISIVE = {"__call__", "_call_impl", "__getattr__", "__getattribute__", "weight", "bias"}


def computes_linear(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` of this subclass of nn.Linear is x · Wᵀ + bias for every x and in every state.

    Two conditions must hold. Its bytecode uses only the weight, the bias and functions that multiply with them, so it
    has no state, mode or side effect. Its result equals nn.Linear's for a stand-in of 15 weights in float64. No layer
    of the model is called, so their devices and sizes do not matter.
    """
    own = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    if any(_DECISIVE & vars(base).keys() for base in own):
        return False
    forwards = tuple(vars(base)["forward"] for base in own if "forward" in vars(base))
    return _is_proven(kind, forwards)  # type: ignore[arg-type]  # classes are hashable, whatever mypy makes of them


@lru_cache(maxsize=256)
def _is_proven(kind: type[nn.Module], forwards: tuple[Any, ...]) -> bool:
    return all(_is_plain(forward) for forward in forwards) and all(_agrees(kind, bias) for bias in (True, False))


def _is_plain(forward: Any) -> bool:
    if not isinstance(forward, FunctionType):
        return False
    code, instructions = forward.__code__, list(dis.get_instructions(forward))
    used = {instruction.argval for instruction in instructions if instruction.opname == "LOAD_GLOBAL"}
    known = forward.__globals__
    return (
        _ATTRIBUTES.issuperset(set(code.co_names) - used)
        and all(name == "super" or any(known.get(name) is one for one in _GLOBALS) for name in used)
        and set(code.co_freevars) <= {"__class__"}
        and not any(instruction.opname in _WRITES for instruction in instructions)
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
    )


@torch.no_grad()
def _agrees(kind: type[nn.Module], bias: bool) -> bool:
    values = torch.arange(20, dtype=torch.float64, device="cpu").sin()
    # Created without its __init__, which may need any arguments.
    layer: nn.Module = object.__new__(kind)
    nn.Module.__init__(layer)
    weight = nn.Parameter(values[:15].view(3, 5))
    layer._parameters = {"weight": weight, "bias": nn.Parameter(values[15:18]) if bias else None}
    forward: Callable[..., Tensor] = kind.forward
    try:
        for shape in ((2, 2, 5), (4, 5), (5,)):
            x = values[: torch.Size(shape).numel()].view(shape)
            given = x.clone()
            expected = functional.linear(x, weight, layer._parameters["bias"])
            if not torch.allclose(forward(layer, given), expected, rtol=1e-12, atol=1e-12) or not torch.equal(given, x):
                return False
    except Exception:  # it needs something else, so it is not a plain linear layer
        return False
    try:  # nn.Linear rejects an x of another dtype and QuantLinear computes in it; a subclass that casts x is excluded
        return forward(layer, values[:5].float()).dtype == torch.float32
    except RuntimeError:
        return True
