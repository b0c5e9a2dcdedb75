"""``tp_plan`` of transformers (5.23 and later) for quantized layers, with styles of qao.distributed.

transformers shards parameters as DTensors and replaces forward methods. Neither works for a packed weight. Therefore
entries for quantized layers are removed from the plan, and qao shards these layers: when the weight arrives if it is
quantized during loading, and after all tensors have arrived if the checkpoint is quantized. From such a checkpoint each
rank keeps only its part, if parts concatenate to the packed weight (``distributed.cut.joins``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from ...nn.packed_module import PackedModule, Sharded

_RESOLVE = "_resolve_parallel_plans"


class Sharding:
    """Sharding of one model during loading. ``styles``: by layer name; empty without tensor parallelism."""

    def __init__(self, model: Any, is_ours: Callable[[str, nn.Module], bool]) -> None:
        self.styles: dict[str, Any] = {}
        self.mesh: Any = None
        self._model, self._is_ours = model, is_ours
        resolve = getattr(model, _RESOLVE, None)
        if resolve is not None:  # patched on the instance until loading ends
            setattr(model, _RESOLVE, partial(self._resolve, resolve))

    def _resolve(self, resolve: Callable[[Any], tuple[dict[str, str], ...]], config: Any) -> tuple[dict[str, str], ...]:
        """The plans of transformers, without quantized layers in the tensor-parallel plan."""
        plan, *others = resolve(config)
        if not plan:
            return plan, *others
        _check(config)
        self.mesh = self._model._mesh_manager.get_mesh("tp")
        modules = dict(self._model.named_modules())
        left = {}
        for name, style in plan.items():
            owner = name if name in modules else name.rpartition(".")[0]
            if not self._is_ours(owner, modules[owner]):
                left[name] = style
            elif name in modules:
                self.styles[name] = made = _style(name, style)
                if isinstance(modules[name], PackedModule):
                    made.expect(modules[name], self.mesh)
        return left, *others

    def take(self, names: Iterable[str], module: nn.Module) -> None:
        """Shard a quantized layer when all of its tensors have arrived."""
        styles = [self.styles.pop(name) for name in names if name in self.styles]
        if styles:
            styles[0]._apply(module, self.mesh)

    def finish(self) -> None:
        """Shard the remaining layers after all tensors have arrived."""
        vars(self._model).pop(_RESOLVE, None)
        if self.mesh is None and (getattr(self._model, "_tp_size", None) or 1) > 1:
            raise ValueError("tp_plan: tensor parallelism of quantized models needs transformers 5.23 or later")
        modules = {name: self._model.get_submodule(name) for name in self.styles}
        for name, module in modules.items():
            if not isinstance(module, Sharded):  # not yet sharded under another name
                self.take([name], module)


def _style(name: str, style: str) -> Any:
    from torch.distributed.tensor import Replicate

    from ...distributed import Colwise, Rowwise

    whole = Replicate()
    known: dict[str, Callable[[], Any]] = {
        "colwise": Colwise,
        "colwise_gather_output": partial(Colwise, output_layouts=whole),
        "colwise_rep": partial(Colwise, output_layouts=whole),
        "rowwise": Rowwise,
        "rowwise_split_input": partial(Rowwise, input_layouts=whole),
        "rowwise_rep": partial(Rowwise, input_layouts=whole),
        "embedding_rowwise": Rowwise,
        "embedding_colwise": partial(Colwise, output_layouts=whole),
    }
    if style not in known:
        raise ValueError(
            f"tp_plan: {name} is quantized, and {style!r} cannot shard a quantized layer; use "
            f"{', '.join(known)}. Or leave it in float (modules_to_not_convert), or pass another plan."
        )
    made = known[style]()
    made.src_data_rank = None  # every rank reads the file
    return made


def _check(config: Any) -> None:
    sizes = {name: getattr(config, name, 1) for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size")}
    if others := [f"{name}={size}" for name, size in sizes.items() if size and size > 1]:
        raise ValueError(
            f"tp_plan: quantized models are only sharded by tensor parallelism, not with {', '.join(others)}. For "
            "FSDP load the model without a distributed_config and call fully_shard (docs/distributed.md)."
        )
