"""Import hooks that register qao with another library once any code imports it. Imports none itself."""

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
    """Warn that a module of another library continues without qao."""
    library = library.partition(".")[0]
    version = getattr(sys.modules[library], "__version__", "of unknown version")
    warnings.warn(
        f"qao does not work with this version of {library} ({version}): {type(error).__name__}: {error}. Everything "
        "else works. Another version of one of the two may help.",
        stacklevel=3,
    )


def when_imported(library: str, register: Register, failed: Failed = warn_of) -> None:
    """Call ``register`` now if ``library`` is imported, else right after its import, before its importer continues.

    A module that is still being imported counts as not imported. If ``register`` raises, ``library`` works without qao,
    and ``failed`` gets its name and the error to report.
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
    """Whether a module in ``sys.modules`` is still being executed, so that names in it may be missing."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def register_part(module: str, function: str = "register") -> None:
    """Import a qao module and call a function of it, which must be idempotent.

    The import may import the library itself and recurse here. The function is called once the module is complete.
    """
    part = sys.modules.get(module)
    if part is not None and is_importing(part):
        when_imported(module, partial(register_part, module, function))
    else:
        getattr(importlib.import_module(module), function)()


# A module of another library, and the module of this package that defines its ``register``.
_PARTS = {
    "accelerate": "huggingface.accelerate",
    "diffusers.hooks.group_offloading": "huggingface.group_offload",
    "diffusers.models.attention": "huggingface.fused_projections",
    "diffusers.models.attention_processor": "huggingface.fused_projections",
    "diffusers.quantizers.auto": "huggingface.diffusers",
    "peft": "huggingface.peft",
    "torch._dynamo.backends.registry": "torch.compile_backend",
    "torch.distributed.checkpoint.state_dict_loader": "torch.distributed_checkpoint",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "torch.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "torch.flat_fsdp",
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
    for part in ("state_dicts", "replaced_tensors"):
        register_part(f"qao.integrations.torch.{part}")


class _Finder(MetaPathFinder):
    """Delegates to the other finders and adds a step after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        # A caller that only checks for a library never executes its module.
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _call_waiting(name)

            loader.exec_module = exec_module
        return spec


class _WatchedSpec(ModuleSpec):
    """Spec of a module that was being imported when ``when_imported`` was called. Detects the end of the import."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value and self.name in sys.modules:  # a failed import removes its module
            _call_waiting(self.name)


def _call_waiting(library: str) -> None:
    for register, failed in _waiting.pop(library, []):
        _call(library, register, failed)


def _call(library: str, register: Register, failed: Failed) -> None:
    try:
        register()
    except Exception as error:  # the library's import must not fail because of qao
        failed(library, error)
