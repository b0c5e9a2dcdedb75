"""Experts in qao's own format in SGLang's own layer; run by tests/test_sglang.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sglang_support  # noqa: F401  # first: it makes SGLang importable

# isort: split
import pytest
import qao
import torch
from experts_support import SCHEMES
from fused_support import DTYPE, PREFIX, WIDTH, E, K, check, routing
from native_experts import EXPERT_SCHEMES, check_parts, checkpoint
from qao.schemes import Scheme
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang_support import Experts
from torch import Tensor


def load(config: dict[str, Any], tensors: dict[str, Tensor], *rank: int, **options: Any) -> Experts:
    """By the loader of one of SGLang's models."""
    experts = Experts("qao", config, *rank, **options)
    parameters = [(f"{PREFIX}.{name}", one) for name, one in experts.layer.named_parameters()]
    model = SimpleNamespace(
        named_parameters=lambda: parameters,
        config=SimpleNamespace(num_experts=E),
        model=SimpleNamespace(),
        routed_experts_weights_of_layer=None,
    )
    with experts.process():
        Qwen3MoeForCausalLM.load_weights(model, tensors.items())
        experts.layer.quant_method.process_weights_after_loading(experts.layer)
    return experts


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("scheme", EXPERT_SCHEMES, ids=str)
def test_experts(scheme: Scheme, ranks: int) -> None:
    torch.manual_seed(ranks)
    config, tensors, dense = checkpoint(scheme)
    given = routing(9)
    parts = [load(config, tensors, rank, ranks)(*given).double() for rank in range(ranks)]
    check_parts(parts, scheme, dense, given)


def test_experts_of_other_processes() -> None:
    torch.manual_seed(0)
    config, tensors, dense = checkpoint(SCHEMES[0])
    given = routing(9)
    parts = [load(config, tensors, rank, E, ep=True) for rank in range(E)]
    assert all(one.layer.up.experts == 1 for one in parts)
    check(sum(one(*given).double() for one in parts), dense, *given)


def test_weights_are_held_once() -> None:
    config, tensors, _ = checkpoint(SCHEMES[0])
    held = dict(load(config, tensors).layer.named_parameters())
    names = {name for name in tensors if not name.endswith(("pip_install_qao", ".weight"))}
    assert {f"{PREFIX}.{name}" for name in held} == names
    assert all(torch.equal(one, tensors[f"{PREFIX}.{name}"]) for name, one in held.items())


def test_cuts_within_what_shares_a_scale() -> None:
    config, tensors, _ = checkpoint(qao.Int4WeightOnly(group_size=256))
    with pytest.raises(
        ValueError, match="experts.down: one process gets 128 columns .* int4 g256 .* among 256. .* work: 1."
    ):
        load(config, tensors, 0, 3)


def test_another_checkpoint_than_the_config_says() -> None:
    config, _, _ = checkpoint(SCHEMES[0])
    _, tensors, _ = checkpoint(qao.Int4WeightOnly(group_size=64))
    with pytest.raises(ValueError, match="experts.* the config says int4 g32.* Save the model again"):
        load(config, tensors)


def test_another_model() -> None:
    config, tensors, _ = checkpoint(SCHEMES[0])
    experts = Experts("qao", config)
    marker = qao.nn.marker.Marker(SCHEMES[0].to_dict(), 2 * WIDTH, K, DTYPE, E - 1)
    with pytest.raises(ValueError, match="holds 4 experts, but the model has expert 4"):
        target = experts.layer.up._parameters["pip_install_qao"]
        target.weight_loader(target, qao.nn.marker.encode(marker))


def test_tensors_that_a_model_passes_over() -> None:
    config, tensors, _ = checkpoint(SCHEMES[0])
    some = {name: one for name, one in tensors.items() if not name.endswith("down.scales")}
    with pytest.raises(ValueError, match="experts.down: SGLang has not loaded scales into it"):
        load(config, some)


def test_what_nobody_can_compute() -> None:
    config, _, _ = checkpoint(SCHEMES[0])
    with pytest.raises(NotImplementedError, match="experts in qao's own format: a gate other than SiLU"):
        Experts("qao", config, activation="gelu")


def test_experts_that_transformers_calls_otherwise() -> None:
    """The config has the checkpoint's names; tensors need SGLang's names, or they are not loaded."""
    config, tensors, dense = checkpoint(SCHEMES[0])
    modules = config["layers"][0]["modules"]
    modules[:] = [one.replace("mlp", "moe") for one in modules]
    given = routing(9)
    check(load(config, tensors)(*given), dense, *given)
    others = {name.replace("mlp", "moe"): one for name, one in tensors.items()}
    with pytest.raises(ValueError, match="experts.up: SGLang has not loaded pip_install_qao, qweight, scales, weight"):
        load(config, others)


def test_two_experts_of_a_block() -> None:
    config, _, _ = checkpoint(SCHEMES[0])
    modules = config["layers"][0]["modules"]
    modules[:] = [one.replace("mlp", other) for one in modules for other in ("moe", "more")]
    with pytest.raises(NotImplementedError, match="0.mlp.experts, .*0.moe.experts and .*0.more.experts"):
        Experts("qao", config)
