"""vLLM's modules imported in many orders, each in a separate process: the resulting state of qao.

``python vllm_start.py FOLDER CASE...`` prints a line of JSON for each case "WHEN MODULE": vLLM loads its plugins first,
last or never, and MODULE is the first other vLLM module to be imported. qao's entry point is written to FOLDER.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import vllm_stand_ins  # noqa: F401  # first: it makes vLLM importable

# isort: split
# What each process needs, and nothing of vLLM.
import compressed_tensors  # noqa: F401
import fused_support
import layouts
import loaded
import torch
import transformers.modeling_utils  # noqa: F401

LINEAR = ("W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8 weights")
EXPERTS = {"W4A16": "compressed-tensors", "block": "fp8"}


def kernels() -> dict[str, str]:
    """The class that vLLM chooses for a layer of each kind of checkpoint."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm_support import _MAKE, engine

    found = {}
    with engine(torch.bfloat16):
        for case in LINEAR:
            config, _, _ = layouts.states_of(case, "column", torch.bfloat16)
            own: Any = get_quantization_config("compressed-tensors").from_config(config)
            own.packed_modules_mapping = loaded.JOINED
            layer: Any = _MAKE["column"](quant_config=own, bias=False)
            held = vars(layer.scheme)
            kernel = next(held[one] for one in ("kernel", "fp8_linear", "linear_kernel") if one in held)
            found[case] = type(kernel).__name__
    for case, method in EXPERTS.items():
        with engine(torch.bfloat16):
            config = fused_support.checkpoint(case)[0] if case == "W4A16" else FP8_EXPERTS
            own = get_quantization_config(method).from_config(config)
            sizes = fused_support.E, fused_support.TOP, fused_support.K, fused_support.WIDTH
            runner = FusedMoEFactory(*sizes, prefix=fused_support.PREFIX, quant_config=own)
            found[f"experts {case}"] = runner.routed_experts.quant_method.experts_cls.__name__
    return found


FP8_EXPERTS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def key() -> str:
    """Of a model's compile cache."""
    from vllm.config import VllmConfig

    return VllmConfig().compute_hash()


def run(when: str, module: str) -> dict[str, Any]:
    import qao.integrations.vllm as ours

    if when == "first":
        importlib.import_module("vllm.plugins").load_general_plugins()
    try:
        importlib.import_module(module)
    except ImportError as error:  # what this machine lacks
        return {"left_out": repr(error)}
    if when == "last":
        importlib.import_module("vllm.plugins").load_general_plugins()
    if when == "never":
        return {"key": key()}
    return {"kernels": kernels(), "failed": sorted(ours.failed_parts()), "key": key()}


def main(folder: Path, cases: list[str]) -> None:
    sys.path.insert(0, str(loaded.installed(folder, "vllm.general_plugins")))
    for case in cases:
        sys.stdout.flush()
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            print(json.dumps({"case": case, **run(*case.split())}), flush=True)
        except BaseException:
            print(json.dumps({"case": case, "error": traceback.format_exc()}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
