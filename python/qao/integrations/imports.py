"""Runs what tells another library of qao's layers once that library is imported, by whomever; imports none itself."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..quantization import listeners
from .huggingface import registration

Register = Callable[[], None]
Failed = Callable[[str, Exception], None]

_waiting: dict[str, list[tuple[Register, Failed]]] = {}


def warn_of(library: str, error: Exception) -> None:
    """Says that a module of another library goes on without qao."""
    library = library.partition(".")[0]
    version = getattr(sys.modules[library], "__version__", "of unknown version")
    warnings.warn(
        f"qao does not work together with this {library} ({version}): {type(error).__name__}: {error}. All else "
        "does. Another version of one of the two may help.",
        stacklevel=3,
    )


def when_imported(library: str, register: Register, failed: Failed = warn_of) -> None:
    """Calls ``register`` now if module ``library`` is imported, else right after it is, before its importer goes on.

    A module that is being imported counts as one that is not imported yet. Where ``register`` raises, ``library`` works
    without qao: ``failed`` gets its name and the error, and says so.
    """
    module = sys.modules.get(library)
    if module is not None and not is_importing(module):
        _call(library, register, failed)
        return
    _waiting.setdefault(library, []).append((register, failed))
    if module is not None:
        module.__spec__.__class__ = _WatchedSpec
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def is_importing(module: ModuleType) -> bool:
    """Whether code of a module in ``sys.modules`` has yet to run, so that names in it may be missing."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def register_part(module: str, function: str = "register") -> None:
    """Imports a module of qao and calls a function of it, which must do no more when called again.

    Its import may import the library that it is for, which gets here again: the function waits until it is whole.
    """
    part = sys.modules.get(module)
    if part is not None and is_importing(part):
        when_imported(module, partial(register_part, module, function))
    else:
        getattr(importlib.import_module(module), function)()


# A module of another library, and the one of this folder whose ``register`` is to be called once it is imported.
_PARTS = {
    "accelerate": "huggingface.accelerate",
    "diffusers.quantizers.auto": "huggingface.diffusers",
    "peft": "huggingface.peft",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "torch.fsdp",
    "torch.optim.swa_utils": "torch.averaging",
    "torch.utils.flop_counter": "torch.flop_counter",
    "transformers.modeling_utils": "huggingface.takeover",
    "transformers.quantizers.auto": "huggingface.transformers",
}


def install() -> None:
    """Called by ``import qao``."""
    listeners.quantized.append(registration.attach)
    listeners.dequantized.append(registration.detach)
    for module, part in _PARTS.items():
        when_imported(module, partial(register_part, f"qao.integrations.{part}"))
    register_part("qao.integrations.torch.state_dicts")


class _Finder(MetaPathFinder):
    """Finds what the others find, with one more thing to do after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        # Whoever merely asks whether a library is there never executes it.
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _call_waiting(name)

            loader.exec_module = exec_module
        return spec


class _WatchedSpec(ModuleSpec):
    """The spec of a module that was being imported when ``when_imported`` was called: its import ends here."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value and self.name in sys.modules:  # an import that fails takes its module away
            _call_waiting(self.name)


def _call_waiting(library: str) -> None:
    for register, failed in _waiting.pop(library, []):
        _call(library, register, failed)


def _call(library: str, register: Register, failed: Failed) -> None:
    try:
        register()
    except Exception as error:  # whatever it is, its import must not fail for it
        failed(library, error)
