"""qao's grouped products as fused experts of vLLM, for checkpoints of four bits that vLLM reads: those of
compressed-tensors, GPTQ (symmetric, as vLLM takes it) and AWQ.

Written against vLLM 0.33. It keeps a list of backends that nobody can add to, so the three functions that choose one,
arrange its weights and make its kernel are asked here first. ``obstacle`` says no, with the reason, to whatever would
not be computed exactly as the checkpoint says; vLLM then goes through its own list.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ...checkpoints.awq import values_of
from ...checkpoints.plain import group_size_of
from ...grouped import SILU_MUL
from ...grouped_mm import int4_grouped_mm
from .. import served, served_experts
from .kernels import _missing

BACKEND = SimpleNamespace(value="QAO")  # where vLLM has a member of its enum


class GroupedExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """W [E, N, K] of a format that a subclass knows; gate and up in one product, SiLU between.

    Experts that are on other processes (expert parallelism) count as zero here.
    """

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        """x times gate and up, or down (``second``), [rows, n]."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return _missing() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU  # type: ignore[no-any-return]

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        n = 2 * self.moe_config.intermediate_size_per_partition  # packed, w1 does not say
        return len(w1), len(a1), n, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(
        self, M: int, N: int, K: int, *rest: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        k, width = hidden_states.shape[-1], self.moe_config.intermediate_size_per_partition
        ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights

        def up(x: Tensor, offsets: Tensor, row_index: Tensor) -> Tensor:
            return self._product(False, x, w1, offsets, row_index, 2 * width)

        def down(rows: Tensor, offsets: Tensor) -> Tensor:
            return self._product(True, rows, w2, offsets, None, k)

        output.copy_(served_experts.through(hidden_states, ids, weights, len(w1), up, down))


class QaoExperts(GroupedExperts):
    """W of four bits in groups, activations as they come."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None  # of the weight, obstacle() is told more

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        scales, bias = (self.w2_scale, self.w2_bias) if second else (self.w1_scale, self.w1_bias)
        k = x.shape[-1]
        size = group_size_of(self.block_shape[1], k)  # columns of a group, as the checkpoint says
        assert size is not None  # obstacle()
        gate = None if second else SILU_MUL
        return int4_grouped_mm(x, weight, scales, bias, offsets, row_index, None, n, k, size, gate=gate)


def general_obstacle(experts: type[GroupedExperts], config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why experts of any format are left to vLLM; None if ``experts`` may compute them."""
    if config.moe_backend != "auto" or experts.__name__ in envs.VLLM_DISABLED_KERNELS:
        return f"another backend is asked for (moe_backend {config.moe_backend!r}), or this one left out"
    if config.swiglu_limit is not None or config.swiglu_alpha is not None or config.swiglu_beta is not None:
        return "a SwiGLU with limits or factors"
    batched = config.moe_parallel_config.use_batched_activation_format
    formats = mk.FusedMoEActivationFormat
    supported, reason = experts.is_supported_config(
        experts, config, weight_key, activation_key, formats.BatchedExperts if batched else formats.Standard
    )
    return None if supported else str(reason)


def obstacle(config: Any, weight_key: Any, quant_config: Any) -> str | None:
    """Why these experts are left to vLLM; None if qao computes them."""
    layout = _layout(quant_config)
    if layout is None:
        return "experts in a layout other than those of compressed-tensors, GPTQ and AWQ"
    if layout.bits != 4 or layout.strategy != "group":
        return f"{layout.bits} bits by {layout.strategy}; qao has four bits in groups here"
    if layout.own_order:
        return "columns in an order of their own"
    if reason := general_obstacle(QaoExperts, config, weight_key, None):
        return reason
    sizes = config.hidden_dim, config.intermediate_size_per_partition, config.intermediate_size
    return served_experts.integers_obstacle(4, quant_config.group_size, *sizes, not layout.symmetric)


class _Layout(NamedTuple):
    bits: int
    strategy: str
    own_order: bool  # columns are not those of x, one after the other
    symmetric: bool


def _layout(quant_config: Any) -> _Layout | None:
    """What vLLM's description of a checkpoint says; None of another kind. By name: its modules import much."""
    if isinstance(quant_config, QuantizationArgs):
        bits, strategy = quant_config.num_bits, str(getattr(quant_config.strategy, "value", quant_config.strategy))
        strategy = strategy if quant_config.type == "int" else f"{quant_config.type} {strategy}"
        return _Layout(bits, strategy, quant_config.actorder == "group", quant_config.symmetric)
    strategy = "channel" if getattr(quant_config, "group_size", -1) == -1 else "group"
    if type(quant_config).__name__ == "AutoGPTQConfig":
        return _Layout(quant_config.weight_bits, strategy, quant_config.desc_act, quant_config.is_sym)
    if type(quant_config).__name__ == "AutoAWQConfig":
        return _Layout(quant_config.weight_bits, strategy, False, not quant_config.zero_point)
    return None


def packed(words: Tensor, scales: Tensor, zeros: Tensor | None, quant_config: Any) -> tuple[Tensor, Tensor]:
    """Weight and scales of experts as grouped products read them, from int32 words: of AWQ [E, K, N / 8], else
    [E, N, K / 8]."""
    awq = type(quant_config).__name__ == "AutoAWQConfig"

    def plain(expert: int) -> served_experts.Plain:
        own = None if zeros is None else zeros[expert]
        if awq:
            return values_of(words[expert]), scales[expert].t(), None if own is None else values_of(own)
        q = served.rows(words[expert], 4, packed_dim=1, output_dim=0)
        return q, scales[expert], None if own is None else served.rows(own, 4, packed_dim=0, output_dim=0)

    k = words.shape[1] if awq else 8 * words.shape[2]
    each = map(plain, range(len(words)))
    _, together = served_experts.integers(each, len(words), quant_config.group_size, 4, k)
    return together.qweight, together.scales


def register() -> None:
    """Puts qao before vLLM's backends of int4 experts; another call changes nothing."""
    if getattr(int_wna16, "qao_is_asked_first", False):
        return
    int_wna16.qao_is_asked_first = True
    select, convert = int_wna16.select_wna16_moe_backend, int_wna16.convert_to_wna16_moe_kernel_format
    make = int_wna16.make_wna16_moe_kernel

    def select_backend(config: Any, weight_key: Any, quant_config: Any, *rest: Any, **named: Any) -> Any:
        reason = obstacle(config, weight_key, quant_config)
        if reason is None:
            int_wna16.logger.info_once("Using QaoExperts for int4 experts.", scope="local")
            return BACKEND, QaoExperts
        int_wna16.logger.debug_once("qao leaves experts to vLLM: %s", reason, scope="local")
        return select(config, weight_key, quant_config, *rest, **named)

    def convert_weights(backend: Any, **given: Any) -> Any:
        if backend is not BACKEND:
            return convert(backend=backend, **given)
        config, found = given["quant_config"], {}
        layout = _layout(config)
        assert layout is not None  # obstacle()
        for name in ("w13", "w2"):
            zeros = None if layout.symmetric else given[f"{name}_qzeros"]
            found[name] = packed(given[name], given[f"{name}_scale"], zeros, config)
        (w13, w13_scales), (w2, w2_scales) = found["w13"], found["w2"]
        zeros = given.get("w13_qzeros"), given.get("w2_qzeros")  # with the scales now
        return w13, w2, w13_scales, w2_scales, *zeros, None, None, given.get("w13_bias"), given.get("w2_bias")

    def make_kernel(
        moe_quant_config: Any,
        moe_config: Any,
        experts_cls: Any,
        backend: Any = int_wna16.WNA16MoEBackend.MARLIN,
        routing_tables: Any = None,
    ) -> Any:
        if backend is not BACKEND:
            return make(moe_quant_config, moe_config, experts_cls, backend, routing_tables)
        from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

        return mk.FusedMoEKernel(
            maybe_make_prepare_finalize(
                moe_config, moe_quant_config, routing_tables, allow_new_interface=True, use_monolithic=False
            ),
            experts_cls(moe_config=moe_config, quant_config=moe_quant_config),
        )

    int_wna16.select_wna16_moe_backend = select_backend
    int_wna16.convert_to_wna16_moe_kernel_format = convert_weights
    int_wna16.make_wna16_moe_kernel = make_kernel
