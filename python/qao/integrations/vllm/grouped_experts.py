"""Base class of vLLM's fused experts on qao's grouped GEMM, for all formats."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ...ops.grouped_autograd import SILU_MUL, Gate
from ..serving import moe
from ..serving.interface import check_class, function_of
from .process import missing


class GroupedExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """W [E, N, K] in the format of a subclass. Gate and up are one GEMM with a fused gate.

    Experts on other ranks (expert parallelism) contribute zero here.
    """

    @staticmethod
    def gate_of(config: Any) -> Gate | None:
        """The gate in vLLM's config of experts; None if this class does not support it."""
        limits = config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta
        return SILU_MUL if config.activation == MoEActivation.SILU and limits == (None, None, None) else None

    def _product(
        self, second: bool, x: Tensor, weight: Tensor, offsets: Tensor, row_index: Tensor | None, n: int
    ) -> Tensor:
        """The GEMM of x with gate and up, or with down (``second``): [rows, n]."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return missing() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return True  # the gate is checked in gate_of()

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        n = 2 * self.moe_config.intermediate_size_per_partition  # the packed w1 does not show it
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

        output.copy_(moe.through(hidden_states, ids, weights, len(w1), up, down))


def unsupported_experts(experts: type[GroupedExperts], config: Any, weight_key: Any, activation_key: Any) -> str | None:
    """Why experts of any format are left to vLLM; None if ``experts`` may compute them."""
    check_class(experts, "gate_of")
    _prepare_finalize()
    if config.moe_backend != "auto" or experts.__name__ in envs.VLLM_DISABLED_KERNELS:
        return f"another backend was requested (moe_backend {config.moe_backend!r}), or this one is disabled"
    if experts.gate_of(config) is None:
        numbers = f"limit {config.swiglu_limit}, alpha {config.swiglu_alpha}, beta {config.swiglu_beta}"
        return f"the gate {config.activation.value} with {numbers}"
    batched = config.moe_parallel_config.use_batched_activation_format
    formats = mk.FusedMoEActivationFormat
    supported, reason = experts.is_supported_config(
        experts, config, weight_key, activation_key, formats.BatchedExperts if batched else formats.Standard
    )
    return None if supported else str(reason)


def kernel_of(experts: GroupedExperts, routing_tables: Any) -> Any:
    """vLLM's modular MoE kernel (permute and unpermute) around these experts."""
    way = _prepare_finalize()(
        experts.moe_config, experts.quant_config, routing_tables, allow_new_interface=True, use_monolithic=False
    )
    return mk.FusedMoEKernel(way, experts)


def _prepare_finalize() -> Any:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    names = "moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic"
    return function_of(all2all_utils, "maybe_make_prepare_finalize", *names)
