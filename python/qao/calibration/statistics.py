"""Input statistics of linear layers for calibration, collected by hooks while a model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..nn.linear import linear_weight
from ..ops.modes import neutral


class Inputs:
    """Sums over tokens of x xᵀ, float32 [K, K], by linear layer; with ``squares`` of x², [K].

    Layers with a common input (q, k and v of an attention) share one computation and have the same ``key``.
    """

    def __init__(self, squares: bool = False) -> None:
        self._squares = squares
        self._sums: dict[nn.Module, Tensor] = {}
        self._tokens: dict[nn.Module, int] = {}
        self._seen: dict[nn.Module, list[int]] = {}  # ids of the terms of each sum
        self._recent: list[tuple[Tensor, int, Tensor]] = []  # inputs (kept alive for identity checks), ids and terms
        self._count = 0

    @contextlib.contextmanager
    def watch(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._add, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            self._recent.clear()
            for handle in handles:
                handle.remove()

    def forget(self) -> None:
        """Drops inputs of earlier samples, so that their memory can be reused."""
        self._recent.clear()

    @neutral()
    def _add(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else keywords["input"]
        number, term = self._term(x)
        if module in self._sums:
            self._sums[module] += term
        else:
            self._sums[module] = term.clone()
        self._tokens[module] = self._tokens.get(module, 0) + x.numel() // max(1, x.shape[-1])
        self._seen.setdefault(module, []).append(number)

    def _term(self, x: Tensor) -> tuple[int, Tensor]:
        for other, number, term in self._recent:
            if other is x:
                return number, term
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self._count += 1
        term = rows.square().sum(0) if self._squares else rows.t() @ rows
        self._recent = [*self._recent[-1:], (x, self._count, term)]
        return self._recent[-1][1:]

    def mean(self, modules: Iterable[nn.Module], name: str, least: int = 1) -> Tensor | None:
        """The mean over the tokens of modules that share a weight; None if fewer than ``least`` reached them.

        Raises:
            ValueError: it holds NaN or Inf; the message begins with ``name``.
        """
        reached = [module for module in modules if self._tokens.get(module)]
        tokens = sum(self._tokens[module] for module in reached)
        if tokens < least:
            return None
        mean = self._sums[reached[0]].clone()
        for module in reached[1:]:
            mean += self._sums[module]
        mean /= tokens
        if not (mean if self._squares else mean.diagonal()).isfinite().all():
            raise ValueError(
                f"{name}: its inputs hold NaN or Inf, or are too large for float32. The weight is "
                f"{list(linear_weight(reached[0]).shape)}. Check the checkpoint, run the model in bfloat16 or float32, "
                "or leave this layer out with a scheme of None."
            )
        return mean

    def key(self, module: nn.Module) -> tuple[int, ...]:
        """A key that is equal for layers with the same inputs."""
        return tuple(self._seen.get(module, ()))
