"""``tp_plan`` of transformers (from 5.23 on) for quantized layers: they are sharded by the styles of qao.distributed.

transformers shards parameters of its modules as DTensors and replaces forwards. Neither fits a packed weight, so
entries of the plan that concern quantized layers are taken out of it, and these become sharded layers of qao: as soon
as the weight has arrived where it is quantized while it is loaded, and when all have arrived where the checkpoint is
quantized. Of such a checkpoint each rank keeps its own part alone, where parts join to the packed weight
(``distributed.cut.joins``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from ...nn.packed_module import PackedModule, Sharded

_RESOLVE = "_resolve_parallel_plans"


class Sharding:
    """Of one model while it is loaded. ``styles``: of quantized layers by name; empty without tensor parallelism."""

    def __init__(self, model: Any, is_ours: Callable[[str, nn.Module], bool]) -> None:
        self.styles: dict[str, Any] = {}
        self.mesh: Any = None
        self._model, self._is_ours = model, is_ours
        resolve = getattr(model, _RESOLVE, None)
        if resolve is not None:  # on the instance, until it is loaded
            setattr(model, _RESOLVE, partial(self._resolve, resolve))

    def _resolve(self, resolve: Callable[[Any], tuple[dict[str, str], ...]], config: Any) -> tuple[dict[str, str], ...]:
        """The plans of transformers, without what concerns quantized layers in that of tensor parallelism."""
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
        """Shards a quantized layer once all of its tensors are there."""
        styles = [self.styles.pop(name) for name in names if name in self.styles]
        if styles:
            styles[0]._apply(module, self.mesh)

    def finish(self) -> None:
        """When all tensors have arrived: the rest."""
        vars(self._model).pop(_RESOLVE, None)
        if self.mesh is None and (getattr(self._model, "_tp_size", None) or 1) > 1:
            raise ValueError("tp_plan: tensor parallelism of quantised models needs transformers 5.23 or later")
        modules = {name: self._model.get_submodule(name) for name in self.styles}
        for name, module in modules.items():
            if not isinstance(module, Sharded):  # by another of its names
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
            f"tp_plan: {name} is quantised, and {style!r} is no way to shard a quantised layer; there are "
            f"{', '.join(known)}. Leave it in floats (modules_to_not_convert), or give another plan."
        )
    made = known[style]()
    made.src_data_rank = None  # every rank reads the file
    return made


def _check(config: Any) -> None:
    sizes = {name: getattr(config, name, 1) for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size")}
    if others := [f"{name}={size}" for name, size in sizes.items() if size and size > 1]:
        raise ValueError(
            f"tp_plan: quantised models are sharded by tensor parallelism alone, not with {', '.join(others)}. For "
            "FSDP load the model without a distributed_config and call fully_shard (docs/distributed.md)."
        )
