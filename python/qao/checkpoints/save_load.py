"""qao.save and qao.load: the state dict of any module as safetensors with markers of quantized layers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _moved
from ..nn import marker
from ..nn.model_check import check_module
from ..nn.packed_module import PackedModule
from ..nn.saved_codes import SavedCodes
from ..ops import modes
from ..quantization.module_swap import WrappedNames, unwrapped, without_wrappers
from ..quantization.skeleton import Undo, prepare_layers, undo
from . import native
from .offloading import onloaded
from .shard_writer import ShardWriter

if TYPE_CHECKING:
    from .files import TensorFiles  # imports safetensors, and ``import qao`` does not


@_moved.renamed
@modes.neutral()
def save(model: nn.Module, path: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000) -> list[Path]:
    """Write the state dict of a model, with quantized and other layers, as safetensors.

    Each file is written under a temporary name and then renamed, so that no reader sees a partial file. Tensors on a
    GPU are copied one at a time; values that accelerate offloads are read where it keeps them. Tensors that several
    names share are written once; ``load`` shares them again.

    Names are those of the model itself, without the prefixes of ``torch.compile`` and data parallelism (``_orig_mod.``,
    ``module.``). ``load`` finds them in models with and without these prefixes.

    Args:
        model: any module, on any device.
        path: a name that ends in ``.safetensors`` for one file, otherwise a directory, which is created. It gets
            model.safetensors, or several files with an index if the tensors exceed ``max_shard_size``.
        max_shard_size: bytes of tensors per file in a directory. A larger tensor gets a separate file.

    Returns:
        The paths of the files.

    Raises:
        TypeError: an entry of the state dict is no plain tensor, or is sharded.
        ValueError: a tensor is on meta and has no values, or its dtype is not written.
        OSError: for example, the disk is full. Files of an earlier save are unchanged.
    """
    check_module(model, "save")
    path = Path(path)
    with onloaded(model):
        state = unwrapped(model).state_dict()
    bare = without_wrappers(state)
    tensors, aliases = unshared({bare[name]: tensor for name, tensor in state.items()})
    single = path.suffix == ".safetensors"
    directory = path.parent if single else path
    directory.mkdir(parents=True, exist_ok=True)
    limit, only = (math.inf, path.name) if single else (max_shard_size, None)
    with ShardWriter(directory, native.header(aliases), limit, name=only, compact=True) as writer:
        for name, tensor in tensors.items():
            writer.add({name: tensor})
    return writer.files


@_moved.renamed
@modes.neutral(defaults=False)
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> nn.Module:
    """Load a file or directory written by ``save``.

    Args:
        path: a .safetensors file, or a directory. A directory with a config.json needs no ``model``.
        model: the float model, best created on the meta device, or one that is already quantized. Every linear layer
            that is quantized in the checkpoint becomes a QuantLinear of its scheme, in place. All tensors come from the
            file, with its dtypes. A transformers model also takes files of ``save_pretrained`` and any checkpoint that
            ``qao.from_pretrained`` reads. None: ``qao.from_pretrained(path)``.
        device: target device; None: the model's device, or the CPU if that is meta.
        options: without ``model``, the options of ``qao.from_pretrained``.

    Returns:
        ``model``, or the model of ``from_pretrained``.

    Raises:
        CheckpointError: a damaged file.
        OSError: the file cannot be opened, for example without permission.
        ValueError: the checkpoint does not match the model: missing or unexpected tensors, another shape, or buffers
            on meta that no checkpoint holds. If it is raised before values are loaded, the model is unchanged.
        TypeError: there is neither a model nor a config.json.
    """
    path = Path(path)
    if model is None:
        if not (path.is_dir() and (path / "config.json").exists()) and path.suffix != ".gguf":
            raise TypeError(
                f"load: {path} has no config.json that describes the model. Pass the model, made on meta: "
                "qao.load(path, model)."
            )
        from ..integrations.huggingface.from_pretrained import from_pretrained

        return from_pretrained(path, device=device, **options)  # type: ignore[no-any-return]
    check_module(model, "load")
    if options:
        raise TypeError(f"load: {', '.join(options)} are for models that a config.json describes, not for a model")
    from .files import TensorFiles

    inner = unwrapped(model)
    own = next(inner.parameters(), None)
    home = device if device is not None else "cpu" if own is None or own.is_meta else own.device
    files = TensorFiles(path)
    native.add_aliases(files)
    try:
        names = _fit(inner, files)
    except ValueError:
        loaded = _by_transformers(path, inner)
        if loaded is None:
            raise
        files = loaded
        names = _fit(inner, files)
    _load(inner, files, names, home)
    return model


def _by_transformers(path: Path, module: nn.Module) -> TensorFiles | None:
    """The tensors of a checkpoint under the names of ``module``, renamed, joined and tied by transformers.

    None if ``module`` is no transformers model, or the checkpoint belongs to another model.
    """
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    from .files import HeldTensors, read_json

    file = path / "config.json"
    config: Any = module.config
    if not (path.is_dir() and file.exists()) or read_json(file).get("model_type") != config.model_type:
        return None
    from ..integrations.huggingface.from_pretrained import from_pretrained

    try:
        model, info = from_pretrained(path, auto_class=type(module), output_loading_info=True)
    except (ValueError, RuntimeError):  # the first error gives the reason
        return None
    if info["missing_keys"] or info["unexpected_keys"]:
        return None
    tensors, aliases = unshared(model.state_dict())
    held = HeldTensors(path, tensors)
    for name, stored in aliases.items():
        held.alias(name, stored)
    return held


def _fit(model: nn.Module, files: TensorFiles) -> dict[str, str]:
    """Replace layers by quantized ones of the file. Returns names in the file by names in the model.

    Raises ValueError and leaves the model unchanged if the tensors do not match.
    """
    places = WrappedNames(model)
    names = {places[bare]: files.stored(name) for name, bare in without_wrappers(files.names, model).items()}
    done = _prepare_layers(model, files, names)
    try:
        _check(model, files, names)
    except ValueError:
        undo(done)
        raise
    return names


def unshared(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and the first name of each shared tensor by its further names."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    views: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if isinstance(tensor, SavedCodes):
            tensor = tensor.plain()
        if type(tensor) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"save: {name} is a {type(tensor).__name__}, and only plain tensors can be written. Gather sharded "
                "tensors first (torch.distributed.checkpoint.state_dict), and leave out extra state."
            )
        if tensor.is_meta:
            raise ValueError(f"save: {name} is on meta and has no data to write")
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and view in views:
            aliases[name] = views[view]
            continue
        views[view] = name
        # Other views of memory that is already written are stored as copies.
        tensors[name] = tensor.detach().clone() if storage in storages else tensor.detach()
        storages.add(storage)
    return tensors, aliases


def _prepare_layers(module: nn.Module, files: TensorFiles, names: Mapping[str, str]) -> Undo:
    schemes, sizes, dtypes = {}, {}, {}
    for name, stored in names.items():
        prefix, _, last = name.rpartition(".")
        if last != marker.MARKER:
            continue
        found = marker.decode(files.read(stored), name)
        schemes[prefix] = marker.scheme_of(found, name)
        sizes[prefix] = found.out_features, found.in_features
        dtypes[prefix] = found.dtype
    if "" in schemes and not isinstance(module, PackedModule):
        raise ValueError(
            f"load: the checkpoint holds a single quantized layer, and a {type(module).__name__} cannot replace itself "
            "in place. Pass qao.QuantLinear.empty(...)."
        )
    return prepare_layers(module, schemes, sizes=sizes, dtypes=dtypes)


def _check(module: nn.Module, files: TensorFiles, names: Mapping[str, str]) -> None:
    """Check everything that is known before values are read."""
    expected = module.state_dict()
    problems = [f"missing: {name}" for name in expected if name not in names]
    problems += [f"unexpected: {name}" for name in names if name not in expected]
    for name, stored in names.items():
        own = expected.get(name)
        if isinstance(own, Tensor) and not name.endswith(marker.MARKER) and tuple(own.shape) != files.shape(stored):
            problems.append(f"{name}: {list(files.shape(stored))} in the checkpoint, {list(own.shape)} in the module")
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        text = "".join(f"\n  {line}" for line in [*problems[:20], *more])
        raise ValueError(f"load: {files.directory}: not a checkpoint of this {type(module).__name__}:{text}")


def _load(module: nn.Module, files: TensorFiles, names: Mapping[str, str], home: torch.device | str) -> None:
    read: dict[str, Tensor] = {}
    for stored in dict.fromkeys(names.values()):
        tensor = files.read(stored)
        read[stored] = tensor if stored.endswith(marker.MARKER) else tensor.to(home)
    try:
        module.load_state_dict({name: read[stored] for name, stored in names.items()}, strict=True, assign=True)
    except RuntimeError as error:  # dtypes that do not match
        raise ValueError(f"load: {files.directory}: {error}") from error
    first: dict[str, str] = {}
    for name, stored in names.items():
        if first.setdefault(stored, name) != name:
            _share(module, name, first[stored])
    left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if left:
        raise ValueError(
            f"load: {', '.join(left[:8])} are on meta and not in the checkpoint (buffers that are not saved). Make the "
            "module on the CPU instead of on meta."
        )
    module.to(home)


def _share(module: nn.Module, name: str, first: str) -> None:
    """Use one Parameter for both names of a tensor: loading created two."""
    (path, _, last), (owner, _, own) = name.rpartition("."), first.rpartition(".")
    parameter = module.get_submodule(owner)._parameters.get(own)
    target = module.get_submodule(path)._parameters
    if parameter is not None and last in target:
        target[last] = parameter
