"""e4m3 checkpoints of Hugging Face ("fp8", DeepSeek's format) and of FBGEMM ("fbgemm_fp8").

fp8         weight e4m3 [N, K]; weight_scale_inv, a factor despite its name: [ceil(N/128), ceil(K/128)], float32 or
            an exponent (ue8m0); or a per-tensor weight_scale; input_scale or activation_scale if static
fbgemm_fp8  weight e4m3 [N, K]; weight_scale float32 [N, 1]; per-token activation scales

W = weight · scale.
"""

from __future__ import annotations

from functools import partial

import torch

from ..ops.packed_shape import SCALE_BLOCK
from ..schemes import Float8DynamicActivationFloat8Weight, Float8StaticActivationFloat8Weight, Granularity, Scheme
from .base import QuantizedLayer
from .files import TensorFiles
from .plain import FP8_SCALES, check_layer_name, fp8_scale_shapes, read_fp8
from .settings import Settings

__all__ = ["read_fbgemm", "read_huggingface"]


def read_huggingface(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of an "fp8" checkpoint.

    Raises:
        CheckpointError: also for blocks other than 128 x 128, and for static activations with blocks.
    """
    block = settings.values.get("weight_block_size")
    if block not in (None, [SCALE_BLOCK, SCALE_BLOCK]):
        raise settings.fail("weight_block_size", "[128, 128] or null")
    activations = settings.text("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise settings.fail("activation_scheme", '"dynamic" or "static"')
    if block and activations == "static":
        raise settings.fail("activation_scheme", '"dynamic" with weight_block_size')
    dtypes = (*FP8_SCALES, torch.uint8) if settings.text("scale_fmt", "") == "ue8m0" else FP8_SCALES
    layers = []
    for key in files.names:
        suffix = next((one for one in (".weight_scale_inv", ".weight_scale") if key.endswith(one)), None)
        if suffix is None:
            continue
        name = check_layer_name(files, key, suffix)
        weight = f"{name}.weight"
        n, k = files.matrix(weight, torch.float8_e4m3fn)
        granularity: Granularity = "block" if block else "tensor"
        files.check(key, dtypes, *fp8_scale_shapes(granularity, n, k))
        keys = [weight, key]
        scheme: Scheme = Float8DynamicActivationFloat8Weight(granularity)
        if activations == "static":
            scale = f"{name}.input_scale"
            scale = scale if scale in files else f"{name}.activation_scale"
            keys.append(scale)
            scheme = Float8StaticActivationFloat8Weight(granularity, activation_scale=files.scalar(scale))
        layers.append(QuantizedLayer(name, scheme, n, k, tuple(keys), partial(read_fp8, files, weight, key)))
    return layers


def read_fbgemm(files: TensorFiles, settings: Settings) -> list[QuantizedLayer]:
    """The layers of an "fbgemm_fp8" checkpoint."""
    limit = settings.values.get("activation_scale_ub")
    note = None if limit is None else "activations are not clipped at activation_scale_ub"
    layers = []
    for key in files.names:
        if key.endswith(".weight_scale"):
            name = check_layer_name(files, key, ".weight_scale")
            weight, bound = f"{name}.weight", f"{name}.input_scale_ub"
            n, k = files.matrix(weight, torch.float8_e4m3fn)
            files.check(key, FP8_SCALES, *fp8_scale_shapes("row", n, k))
            keys = (weight, key, bound) if bound in files else (weight, key)
            scheme = Float8DynamicActivationFloat8Weight("row")
            layers.append(QuantizedLayer(name, scheme, n, k, keys, partial(read_fp8, files, weight, key), note))
    return layers
