"""The backend "qao" of torch.compile: Inductor with graph passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_HOOK = "post_grad_custom_pre_pass"  # Inductor runs it on the functional graph of ATen operators, before its own passes


def compile(model: Any, **kwargs: Any) -> Any:
    """``torch.compile(model, backend="qao", **kwargs)``: Inductor with graph passes for quantized layers.

    The passes replace parts of the graph by operators of qao: attention of few tokens over a static cache, and linear
    layers that read the same input. ``qao.explain(model, x)`` lists what they replaced, and why other places stayed as
    they were. Graphs with gradients are compiled as by Inductor.

    Args:
        model: a module or a function.
        kwargs: other arguments of torch.compile: ``fullgraph``, ``dynamic``, ``mode``, and ``options`` of Inductor.

    Returns:
        What torch.compile returns.

    Raises:
        ValueError: ``backend`` is given, or ``options`` has a pass at ``post_grad_custom_pre_pass``.
    """
    if "backend" in kwargs:
        raise ValueError(
            f"qao.compile: backend={kwargs['backend']!r} is not possible, since this function selects the backend "
            "'qao'. Call torch.compile for another one."
        )
    _check(kwargs.get("options"))
    return torch.compile(model, backend="qao", **kwargs)


def inductor_options() -> dict[str, Any]:
    """Options that make Inductor run qao's graph passes: ``torch.compile(model, options=qao.inductor_options())``.

    They serve calls that must select the backend "inductor" themselves. Add other options to the dict, such as those of
    a mode: ``{**torch._inductor.list_mode_options("reduce-overhead"), **qao.inductor_options()}``.
    """
    from .dependent_launch import wait_first  # these import Inductor
    from .graph_pass import GraphPass
    from .nodes import has_hopper

    # Tests of the sizes that each operator returns take 7 % of a token of SmolLM2 on a CPU. The suite makes them.
    options: dict[str, Any] = {_HOOK: GraphPass(), "size_asserts": False, "alignment_asserts": False}
    if has_hopper():
        # Triton kernels that start before the kernel in front of them ends, as qao's do, and independent small kernels
        # in one launch: 3.30 -> 3.17 ms a token of Llama-3.1-8B in int4 on an H100.
        options |= {"triton.enable_pdl": True, "combo_kernels": True}
        wait_first()
    return options


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo. ``mode`` and ``options`` are those of torch.compile for Inductor."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    _check(options)
    patches = {**(list_mode_options(mode) if mode else {}), **inductor_options(), **(options or {})}
    return compile_fx(graph, example_inputs, config_patches=patches)  # type: ignore[return-value]


def register() -> None:
    """Make ``backend`` known to torch.compile by its name."""
    from torch._dynamo.backends import registry

    if "qao" not in registry._COMPILER_FNS:
        registry.register_backend(backend, name="qao")


def _check(options: Mapping[str, Any] | None) -> None:
    if options and options.get(_HOOK) is not None:
        raise ValueError(
            f"backend 'qao': options[{_HOOK!r}] is already the place of qao's graph passes. Put your pass at "
            "'post_grad_custom_post_pass', or call both from one pass with backend='inductor'."
        )
