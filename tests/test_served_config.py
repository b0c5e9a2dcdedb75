"""The config of a model's layers in the form that serving engines request; without an engine."""

from __future__ import annotations

import warnings

import pytest
import qao
from qao.integrations.serving.config import Served

SCHEME = qao.Int8WeightOnly()
LAYERS = [f"model.layers.{i}.mlp.{one}" for i in range(2) for one in ("gate_proj", "up_proj", "down_proj")]
LAYERS += ["model.layers.1.mlp.experts.up", "model.layers.1.mlp.experts.down"]


def asked(*blocks: int) -> Served:
    """By an engine that has made these blocks, and has not asked about the head."""
    served = Served(dict.fromkeys([*LAYERS, "lm_head"], SCHEME), "An engine")
    for block in blocks:
        for one in ("gate_up_proj", "down_proj"):
            served.scheme_of(f"model.layers.{block}.mlp.{one}", {})
    if 1 in blocks:
        served.experts_of("model.layers.1.mlp.experts")
    return served


def test_layers_that_nobody_asked_about() -> None:
    with pytest.warns(UserWarning, match="An engine has made no quantized layer for 1 quantized ones, such as lm_head"):
        asked(0, 1).warn_unrequested()


@pytest.mark.parametrize("blocks", [(0,), (1,)])
def test_blocks_of_other_processes(blocks: tuple[int, ...]) -> None:
    """With pipeline parallelism, where the last process has the head."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked(*blocks).warn_unrequested()


def test_a_layer_within_a_block_of_this_process() -> None:
    served = asked(0)
    served.layers["model.layers.0.mlp.router"] = SCHEME
    with pytest.warns(UserWarning, match="for 1 quantized ones, such as model.layers.0.mlp.router"):
        served.warn_unrequested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.warn_unrequested()  # once


def test_all_asked() -> None:
    served = asked(0, 1)
    served.scheme_of("lm_head", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.warn_unrequested()
