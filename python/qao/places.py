"""Where a module is in a model, and how another one takes its place."""

from __future__ import annotations

from torch import nn


def places_of(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every parent and attribute."""
    return [(parent, key) for parent in model.modules() for key, child in parent._modules.items() if child is module]


def put_module(parent: nn.Module, attribute: str, module: nn.Module) -> None:
    """``setattr(parent, attribute, module)``, also in a plain list or dict of the parent that holds the one before.

    MaskFormer's heads call their children by such a list: it would keep the float layer, which no ``.to()`` reaches.
    """
    before = parent._modules.get(attribute)
    setattr(parent, attribute, module)
    if before is None:
        return
    for name, held in vars(parent).items():
        if name in _OF_TORCH:
            continue
        if type(held) is list:
            held[:] = [module if value is before else value for value in held]
        elif type(held) is dict:
            held.update({key: module for key, value in held.items() if value is before})


_OF_TORCH = frozenset(vars(nn.Module()))  # its dicts of parameters, hooks and children
