"""Replacement of modules in a model, and names without wrapper prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_COMPILED = "_orig_mod."  # prefix that torch.compile(module) adds to tensor names
_WRAPPED = "module."  # prefix that nn.DataParallel and DistributedDataParallel add


def put_module(parent: nn.Module, attribute: str, module: nn.Module) -> None:
    """``setattr(parent, attribute, module)``, which also replaces the old module in plain lists and dicts.

    MaskFormer's heads call their children through such a list. It would keep the float layer, which ``.to()`` does not
    reach.
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


def unwrapped(module: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile and data parallelism."""
    while True:
        parallel = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        inner = module._modules.get("module" if parallel else "_orig_mod")
        if inner is None or not (parallel or type(module).__name__ == "OptimizedModule"):
            return module
        module = inner


def without_wrappers(names: Iterable[str], model: nn.Module | None = None) -> dict[str, str]:
    """Maps the given tensor names to names without the prefix of torch.compile and, for ``model``, without the prefix
    of data parallelism if all names have it."""
    found = {name: name.replace(_COMPILED, "") for name in names}
    parallel = model is not None and "module" not in model._modules and "module" not in model._parameters
    if parallel and found and all(name.startswith(_WRAPPED) for name in found.values()):
        found = {name: bare.removeprefix(_WRAPPED) for name, bare in found.items()}
    return found


class WrappedNames:
    """Lookup from plain tensor names to actual names in a model with modules wrapped by torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[str, str] = {}
        for path, _ in model.named_modules(remove_duplicate=False):  # children come after their parents
            self._paths[f"{path}.".replace(_COMPILED, "")[:-1]] = path

    def __getitem__(self, name: str) -> str:
        start, end = name, ""
        while start:
            start, _, last = start.rpartition(".")
            end = f".{last}{end}"
            if start in self._paths:
                return f"{self._paths[start]}{end}".removeprefix(".")
        return name


_OF_TORCH = frozenset(vars(nn.Module()))  # nn.Module's dicts of parameters, hooks and children
