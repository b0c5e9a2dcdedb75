"""Differences between versions of vLLM, each recognized by a feature and not by the number of a version."""

from __future__ import annotations

from typing import Any


def rows_first(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``convert_to_wna16_moe_kernel_format`` with packed weights [E, N, K / 8], scales and zeros alike.

    vLLM 0.30 has [E, K / 8, N]. The shapes of both weights together always tell which.

    Raises:
        ValueError: the shapes are others.
    """
    config = given["layer"].moe_config
    hidden, width = config.hidden_dim, config.intermediate_size_per_partition
    shapes = {"w13": (2 * width, hidden // 8), "w2": (hidden, width // 8)}
    if all(given[name].shape[1:] == shape for name, shape in shapes.items()):
        return given
    if any(given[name].shape[1:] != shape[::-1] for name, shape in shapes.items()):
        others = " and ".join(str(list(given[name].shape)) for name in shapes)
        raise ValueError(
            f"qao: experts with packed weights {others} for {hidden} columns and a width of {width}, which no tested "
            "version of vLLM has. Leave them to vLLM with VLLM_DISABLED_KERNELS=QaoExperts."
        )
    tensors = [f"{name}{kind}" for name in shapes for kind in ("", "_scale", "_qzeros")]
    found = {name: given[name].transpose(1, 2) for name in tensors if given.get(name) is not None}
    return {**given, **found}
