"""Block-by-block forward passes of calibration data, with a check that they match the whole model.

A model with sequential decoder blocks runs once per sample with its blocks bypassed, to record the blocks' other
arguments; equal tensors are stored once. Then all samples go through one block before the next block starts, so that
memory holds only the hidden states and the statistics of one block, and each block sees quantized predecessors.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from ..ops.modes import callers

_RANDOM = 4, 128  # samples of random tokens, and their length
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a module


def samples_of(data: Any, model: nn.Module) -> list[Call]:
    """Calls of the model: a tensor is the only argument, a tuple the arguments, a mapping the keyword arguments.

    Raises:
        TypeError: a sample has another type, or data is not an iterable of samples.
        ValueError: data or a sample is empty, on meta, or holds NaN or Inf.
    """
    if isinstance(data, (str, bytes, Mapping)) or not hasattr(data, "__iter__"):
        raise TypeError(
            f"calibrate: data must be an iterable of samples, not {type(data).__name__}; see docs/calibrate.md"
        )
    if isinstance(data, Tensor) and data.dim() == 0:
        raise ValueError("calibrate: data is a tensor without dimensions; give samples [tokens] or [batch, tokens]")
    # An integer sample [T] is one text; models take batches.
    calls = [_call(sample, index) for index, sample in enumerate(data)]
    if not calls:
        raise ValueError("calibrate: data is empty. Pass a few hundred texts, or use qao.quantize_, which needs none")
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return [tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, (args, extra | kw)) for args, kw in calls]


def random_samples(model: nn.Module) -> list[Tensor]:
    """Ids of random tokens of the model's vocabulary, int64 [1, 128] each, always the same.

    Raises:
        ValueError: the model has no embedding of tokens.
    """
    find = getattr(model, "get_input_embeddings", None)
    try:
        embedding = find() if find is not None else None
    except NotImplementedError:  # of transformers, for models of pictures and others
        embedding = None
    count = getattr(embedding, "num_embeddings", None)
    if count is None:
        raise ValueError(
            "calibrate: data is None, which stands for random tokens, and get_input_embeddings() of "
            f"{type(model).__name__} gives no embedding of tokens. Pass samples, or use qao.quantize_"
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None) or _RANDOM[1]
    size = _RANDOM[0], 1, min(_RANDOM[1], longest)
    return list(torch.randint(0, count, size, generator=torch.Generator().manual_seed(0)))


def _call(sample: Any, index: int) -> Call:
    if isinstance(sample, Tensor):
        whole = not sample.is_floating_point() and sample.dim() == 1
        args: tuple[Any, ...] = (sample[None] if whole else sample,)
        call: Call = (args, {})
    elif isinstance(sample, Mapping):
        call = ((), dict(sample))
    elif isinstance(sample, (tuple, list)) and sample and all(isinstance(v, int) for v in sample):
        call = ((torch.tensor([sample]),), {})
    elif isinstance(sample, tuple):
        call = (sample, {})
    else:
        raise TypeError(
            f"calibrate: sample {index} must be a tensor, a list of token ids, a tuple of arguments or a mapping of "
            f"keywords, not {type(sample).__name__}"
        )
    tensors = [v for v in tree_flatten(call)[0] if isinstance(v, Tensor)]
    if not tensors or any(v.numel() == 0 for v in tensors):
        raise ValueError(f"calibrate: sample {index} is empty")
    for value in tensors:
        if value.is_meta:
            raise ValueError(f"calibrate: sample {index} is on meta and has no data")
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"calibrate: sample {index} {list(value.shape)} ({value.dtype}) holds NaN or Inf")
    return call


def called(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The module's output under the caller's torch modes, for example autocast."""
    with callers():
        return module(*args, **keywords)


def check_first(model: nn.Module, samples: Sequence[Call]) -> None:
    """Raises ValueError if the model cannot run the first sample."""
    args, keywords = samples[0]
    try:
        called(model, args, keywords)
    except Exception as error:
        given = [f"{list(v.shape)} {v.dtype}" for v in tree_flatten((args, keywords))[0] if isinstance(v, Tensor)]
        raise ValueError(
            f"calibrate: the model cannot run sample 0: {type(error).__name__}: {error}. It was given "
            f"{', '.join(given)}"
        ) from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disables gradients and training mode; restores every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass
class Blocks:
    """Sequential blocks of a model, their arguments and the hidden states."""

    name: str  # of the list
    modules: list[nn.Module]
    rest: list[list[Call]]  # by sample, by block: arguments with None for the hidden states
    hidden: list[Tensor]  # by sample

    def run(self, index: int, after: Callable[[], None], keep: bool) -> None:
        """Runs all samples through one block and calls ``after`` for each; ``keep``: outputs become hidden states."""
        block = self.modules[index]
        for sample, states in enumerate(self.hidden):
            args, keywords = self.rest[sample][index]
            made = called(block, (states, *args[1:]), keywords)
            after()
            if keep:
                self.hidden[sample] = _states(made)


def find_blocks(model: nn.Module, samples: Sequence[Call]) -> tuple[Blocks | None, str]:
    """The blocks of a model, ready to run; or None, and why samples must run through the whole model."""
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and len({type(child) for child in module}) == 1
    ]
    if not lists:
        return None, "the model has no list of blocks"
    name, modules = max(lists, key=lambda pair: sum(p.numel() for block in pair[1] for p in block.parameters()))
    if len({id(block) for block in modules}) < len(modules):
        return None, f"the blocks {name} share modules"
    real: list[list[tuple[Call, Any]]] = [[] for _ in modules]
    with _forwards(modules, lambda index, forward: _recorded(real[index], forward)):
        called(model, *samples[0])
    if reason := _no_row(real):
        return None, f"the blocks {name} {reason}"
    outputs = [calls[0][1] for calls in real]
    blocks = Blocks(name, modules, [], [])
    pool: dict[tuple[Any, ...], list[Tensor]] = {}
    for args, keywords in samples:
        cut: list[list[tuple[Call, Any]]] = [[] for _ in modules]
        with _forwards(modules, partial(_cut, cut, outputs)):
            called(model, args, keywords)
        if any(len(calls) != 1 or not calls[0][0][0] for calls in cut):
            return None, f"the blocks {name} are not called once each when they run alone"
        blocks.hidden.append(cut[0][0][0][0][0])
        calls = [calls[0][0] for calls in cut]
        blocks.rest.append([_pooled(((None, *a[1:]), k), pool) for a, k in calls])
    real_calls = [((None, *calls[0][0][0][1:]), calls[0][0][1]) for calls in real]
    if not all(_same(a, b) for a, b in zip(real_calls, blocks.rest[0], strict=True)):
        return None, f"the blocks {name} take results of earlier blocks as other arguments"
    return blocks, ""


def _cut(
    calls: list[list[tuple[Call, Any]]], outputs: list[Any], index: int, _: Callable[..., Any]
) -> Callable[..., Any]:
    return _recorded(calls[index], _passing(outputs[index]))


def _recorded(calls: list[tuple[Call, Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        result = forward(*args, **keywords)
        calls.append(((args, keywords), result))
        return result

    return run


def _passing(like: Any) -> Callable[..., Any]:
    """A bypassed block: it returns its hidden states in the structure of ``like``."""

    def run(states: Tensor, *_: Any, **__: Any) -> Any:
        return states if isinstance(like, Tensor) else (states, *like[1:])

    return run


@contextlib.contextmanager
def _forwards(
    modules: list[nn.Module], wrap: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Temporarily overrides the forwards on the instances."""
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for index, module in enumerate(modules):
            module.__dict__["forward"] = wrap(index, module.forward)
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _no_row(real: list[list[tuple[Call, Any]]]) -> str:
    """Why the blocks are not a chain in which each gets the output of the previous one; "" if they are."""
    states = None
    for calls in real:
        if len(calls) != 1:
            return "are not called once each"
        (args, _), result = calls[0]
        if not args or not isinstance(args[0], Tensor):
            return "do not get hidden states as their first argument"
        if states is not None and args[0] is not states and not torch.equal(args[0], states):
            return "do not get the output of the previous block"
        if not isinstance(result, Tensor) and not (isinstance(result, tuple) and isinstance(result[0], Tensor)):
            return f"return a {type(result).__name__}"
        states = _states(result)
    return ""


def _states(result: Any) -> Tensor:
    states: Tensor = result if isinstance(result, Tensor) else result[0]
    return states


def _pooled(call: Any, pool: dict[tuple[Any, ...], list[Tensor]]) -> Any:
    """The call with equal tensors (masks, positions) stored once."""

    def once(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        held = pool.setdefault((value.shape, value.dtype, value.device), [])
        for other in held:
            if other is value or torch.equal(other, value):
                return other
        held.append(value)
        return value

    return tree_map(once, call)


def _same(a: Any, b: Any) -> bool:
    left, right = tree_flatten(a), tree_flatten(b)
    if left[1] != right[1]:
        return False
    return all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or bool(x == y)
        for x, y in zip(left[0], right[0], strict=True)
    )
