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

_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(library: str, register: Callable[[], None]) -> None:
    """Calls ``register`` now if module ``library`` is imported, else right after it is, before its importer goes on.

    Where ``register`` raises, ``library`` works without qao: a warning says so.
    """
    if library in sys.modules:
        _call(library, register)
        return
    _waiting.setdefault(library, []).append(register)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


# A module of another library, and the one of this folder whose ``register`` is to be called once it is imported.
_PARTS = {
    "accelerate": "accelerate",
    "diffusers.quantizers.auto": "diffusers",
    "peft": "peft",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "fsdp",
    "torch.utils.flop_counter": "flop_counter",
    "transformers.quantizers.auto": "transformers",
}


def install() -> None:
    """Called by ``import qao``."""
    for module, part in _PARTS.items():
        when_imported(module, partial(_register, part))


def _register(part: str) -> None:
    importlib.import_module(f"qao.integrations.{part}").register()


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
                for register in _waiting.pop(name, []):
                    _call(name, register)

            loader.exec_module = exec_module
        return spec


def _call(library: str, register: Callable[[], None]) -> None:
    try:
        register()
    except Exception as error:  # whatever it is, its import must not fail for it
        warn_of(library, error)


def warn_of(library: str, error: Exception) -> None:
    """Says that a module of another library goes on without qao."""
    library = library.partition(".")[0]
    version = getattr(sys.modules[library], "__version__", "of unknown version")
    warnings.warn(
        f"qao does not work together with this {library} ({version}): {type(error).__name__}: {error}. All else "
        "does. Another version of one of the two may help.",
        stacklevel=3,
    )
