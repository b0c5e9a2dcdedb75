"""Decoding loop of ``generate()`` with a static cache and one compiled step per token.

Between two steps transformers launches some 25 small kernels: it converts the logits, chooses the token, appends
it, tests for the end and makes the arguments of the next step. Here the compiled step does all of that on buffers that
stay in place. transformers computes the prompt, the first token and the arguments of the first step. At the call of
that step the loop takes over, if it knows every argument, and an exception brings its result past the rest of
transformers' loop. Logits processors and sampling run between two steps, as in transformers.

The host reads the tokens of a step after it has launched the next one, so that the GPU never waits. Therefore the loop
computes up to two steps behind the end, and drops their tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .decoding_mask import compiles
from .loop_masks import FULL, SLIDING, STATES, Masks, types_of
from .ring_cache import ring_order, sliding_layers

if TYPE_CHECKING:
    from .compiled_step import CompiledStep

_MOST_ENDS = 16  # tokens that end a sequence
_POSITIONS = "position_ids", "cache_position"  # arguments that grow by one with every token
_CACHES = "past_key_values", "cache"  # names of a cache, by version
# Methods that models override, and classes that do with steps that are alike nevertheless: Gemma's method and its masks
# are about images in the prompt. Phi's empties the cache behind so many tokens as the configuration names.
_OWN = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "create_masks_for_generate"
_ALIKE = {
    "Gemma3ForConditionalGeneration": None,
    "Phi3ForCausalLM": "original_max_position_embeddings",
    "PhimoeForCausalLM": "original_max_position_embeddings",
}
_UPSTREAM = "return_dict_in_generate", "prefill_chunk_size", "is_assistant"  # options of transformers' loop alone
_PLAIN = {bool, int, float, str, type(None)}


class Buffers:
    """Everything that one step leaves to the next, at fixed addresses, for B sequences of up to L tokens.

    ``chosen`` [B] is the next token before it is known whether its sequence is still ``running`` [B]. ``sequences``
    has the ``length`` [1] tokens of prompt and answer, ``mask`` [B, 1, 1, L] says which of them are attended to,
    ``column`` [1] is the number of the token there, and ``report`` [B + 1] has the last token of each sequence and
    whether any of them goes on.
    """

    def __init__(self, mask: Tensor, positions: Mapping[str, Tensor]) -> None:
        batch, width, device = mask.shape[0], mask.shape[-1], mask.device

        def integers(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=device)

        self.chosen, self.report, self.sequences = integers(batch), integers(batch + 1), integers(batch, width + 1)
        self.length, self.column, self.pad, self.ends = integers(1), integers(1), integers(1), integers(_MOST_ENDS)
        self.running = torch.ones(batch, dtype=torch.bool, device=device)
        self.mask = torch.zeros_like(mask, memory_format=torch.contiguous_format)
        self.positions = {name: integers(*of.shape) for name, of in positions.items()}
        self._stream = _stream(device)  # on which they are written
        for tensor in (*vars(self).values(), *self.positions.values()):
            if isinstance(tensor, Tensor):
                torch._dynamo.mark_static_address(tensor, guard=False)

    def fits(self, mask: Tensor, positions: Mapping[str, Tensor]) -> bool:
        same = self.mask.shape == mask.shape and self.mask.device == mask.device
        same = same and self.mask.is_inference() == torch.is_inference_mode_enabled()
        same = same and self._stream == _stream(mask.device)
        return same and _shapes(self.positions) == _shapes(positions)

    def start(self, prompt: Tensor, token: Tensor, mask: Tensor, positions: Mapping[str, Tensor]) -> None:
        """Begin with the arguments of a step. Its query is the last one that the mask counts."""
        self.sequences[:, : prompt.shape[1]] = prompt
        self.length.fill_(prompt.shape[1])
        self.chosen.copy_(token)
        self.running.fill_(True)
        self.mask.copy_(mask)
        self.column.copy_((mask * torch.arange(mask.shape[-1], device=mask.device)).amax())
        for name, position in positions.items():
            self.positions[name].copy_(position)

    def end_with(self, ends: list[Tensor], pad: Tensor | None) -> None:
        """Tokens that end a sequence, which is then filled with ``pad``."""
        self.ends.fill_(-1)
        if ends and pad is not None:
            tokens = torch.cat([one.reshape(-1) for one in ends])
            self.ends[: len(tokens)] = tokens.to(self.ends)
            self.pad.copy_(pad)

    def record(self) -> Tensor:
        """Append the chosen token, or padding where the sequence has ended."""
        token = torch.where(self.running, self.chosen, self.pad)
        self.running.logical_and_((token[:, None] != self.ends).all(-1))
        self.sequences.index_copy_(1, self.length, token[:, None])
        self.report.copy_(torch.cat([token, self.running.any().to(torch.int64)[None]]))
        return token

    def advance(self) -> None:
        for counter in (self.length, self.column, *self.positions.values()):
            counter.add_(1)


def step(model: Any, buffers: Buffers, masks: Masks, others: dict[str, Any]) -> Tensor:
    """Logits [B, V] of the token behind the chosen one, which is recorded. The likeliest is chosen next."""
    token = buffers.record()
    buffers.mask.logical_or_(torch.arange(buffers.mask.shape[-1], device=token.device) == buffers.column)
    arguments = {"attention_mask": masks.make(buffers.mask, buffers.column), **buffers.positions, **others}
    logits: Tensor = model(input_ids=token[:, None], **arguments).logits[:, -1]
    buffers.chosen.copy_(logits.argmax(-1))
    buffers.advance()
    return logits


class Finished(BaseException):
    """The result of a loop, on its way past the rest of transformers' loop."""

    def __init__(self, loop: Loop, sequences: Tensor) -> None:
        super().__init__()
        self.loop, self.sequences = loop, sequences


class Loop:
    """One call of ``generate()``, with the arguments of transformers' loop."""

    def __init__(self, given: Mapping[str, Any], longest: int, ends: list[Tensor], types: set[str]) -> None:
        config = given["generation_config"]
        self._types = types  # of layers
        self._prompt: Tensor = given["input_ids"]
        mask = given.get("model_kwargs", {}).get("attention_mask")
        self._seen: Tensor = torch.ones_like(self._prompt) if mask is None else mask
        self._processors, self._streamer = given["logits_processor"], given.get("streamer")
        self._samples, self._pad, self._ends, self._longest = config.do_sample, config._pad_token_tensor, ends, longest

    def take_over(self, compiled: CompiledStep, inputs: Mapping[str, Any]) -> None:
        """Raise ``Finished`` after the last token, or return if a step with these arguments is not the loop's."""
        _waiting.set(_none)
        others = dict(inputs)
        token, given = others.pop("input_ids", None), others.pop("attention_mask", None)
        positions = {name: others.pop(name) for name in _POSITIONS if others.get(name) is not None}
        if not self._takes(token, positions, others):
            return
        cache = next(others[name] for name in _CACHES if others.get(name) is not None)
        masks = Masks.as_in(given, self._types, cache, self._prompt.shape[0], self._longest)
        whole = masks.whole(given, self._seen, self._longest) if masks is not None else None
        if masks is None or whole is None:
            return
        held, compiled.buffers = compiled.buffers, None  # another thread gets others
        buffers = held if held is not None and held.fits(whole, positions) else Buffers(whole, positions)
        try:
            buffers.start(self._prompt, token[:, 0], whole, positions)
            buffers.end_with(self._ends, self._pad)
            if not masks.agree(buffers.mask, buffers.column, given):
                return
            with ring_order(sliding_layers(cache), buffers.column):
                sequences = self._run(buffers, lambda: compiled.decode(buffers, masks, others))
        finally:
            compiled.buffers = buffers
        raise Finished(self, sequences)

    def _takes(self, token: Any, positions: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
        tensors = all(isinstance(one, Tensor) for one in (token, *positions.values()))
        return (
            tensors
            and token.shape == (self._prompt.shape[0], 1)
            and all(one.shape[-1] == 1 for one in (token, *positions.values()))
            and all(one.dtype == torch.int64 for one in (token, *positions.values()))
            and any(others.get(name) is not None for name in _CACHES)
            and all(_is_cache(value) if name in _CACHES else type(value) in _PLAIN for name, value in others.items())
        )

    def _run(self, buffers: Buffers, step: Callable[[], Tensor]) -> Tensor:
        first = length = self._prompt.shape[1] + 1
        for length, report in enumerate(self._reports(buffers, step), first):
            if self._streamer is not None and length > first:  # transformers' loop has put the first token
                self._streamer.put(report[:-1].clone())
            if not report[-1]:
                break
        if self._streamer is not None:
            self._streamer.end()
        return buffers.sequences[:, :length].clone()

    def _reports(self, buffers: Buffers, step: Callable[[], Tensor]) -> Iterator[Tensor]:
        """For each token of the answer the buffer ``report``, read after the next step was launched."""
        sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for length in range(self._prompt.shape[1] + 1, self._longest + 1):
            if length == self._longest:
                buffers.record()
            else:
                self._choose(buffers, length, step())
            sent.append(_send(buffers.report))
            if len(sent) > 1:
                yield _received(*sent.popleft())
        while sent:
            yield _received(*sent.popleft())

    def _choose(self, buffers: Buffers, length: int, logits: Tensor) -> None:
        """Choose the next tokens by the operations of transformers. Those of the largest logits are chosen already."""
        if self._samples or self._processors:
            scores = logits.to(dtype=torch.float32, copy=True)
            scores = self._processors(buffers.sequences[:, :length].contiguous(), scores)
            chosen = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if self._samples else scores.argmax(-1)
            buffers.chosen.copy_(chosen)


def _send(report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it may be read. Every copy has memory to itself."""
    if report.device.type != "cuda":
        return report.clone(), None
    copy = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
    copy.copy_(report, non_blocking=True)
    event = torch.cuda.Event()
    event.record(_stream(report.device))
    return copy, event


def _received(copy: Tensor, event: torch.cuda.Event | None) -> Tensor:
    if event is not None:
        event.synchronize()
    return copy


# ---- when the loop applies -------------------------------------------------------------------------------------------


def _none() -> None:
    return None


_waiting: ContextVar[Callable[[], Loop | None]] = ContextVar("waiting", default=_none)


def waiting() -> Loop | None:
    """The loop that takes over at the next compiled step, if it can."""
    return _waiting.get()()


def with_decoding_loop(upstream: Any) -> Any:
    """Wrapper of ``GenerationMixin._sample``, transformers' loop of greedy decoding and sampling."""
    parameters = inspect.signature(upstream)

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = functools.cache(functools.partial(_loop_of, self, parameters.bind(self, *args, **kwargs).arguments))
        with _setting(_waiting, loop), _setting(compiles, False):
            try:
                return upstream(self, *args, **kwargs)
            except Finished as finished:
                if finished.loop is not loop():
                    raise
                return finished.sequences

    return _sample


@contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _loop_of(model: Any, given: Mapping[str, Any]) -> Loop | None:
    """The loop with these arguments of transformers' own, if nothing but them decides about the tokens."""
    if not all(name in given for name in ("input_ids", "logits_processor", "stopping_criteria", "generation_config")):
        return None
    config, prompt = given["generation_config"], given["input_ids"]
    mask = given.get("model_kwargs", {}).get("attention_mask")
    stops = _stops(given["stopping_criteria"])
    if stops is None or given.get("synced_gpus") or any(getattr(config, name, None) for name in _UPSTREAM):
        return None
    longest, ends = stops
    types = types_of(model.config)
    simple = (
        prompt.dim() == 2
        and prompt.dtype == torch.int64
        and prompt.device.type in ("cuda", "cpu")
        and (mask is None or mask.dim() == 2)
        # A cache of the caller must not get what the loop computes behind the end. transformers made the cache if the
        # configuration names its kind.
        and (not ends or (config._pad_token_tensor is not None and config.cache_implementation is not None))
        and all(type(one).__module__.startswith("transformers.") for one in given["logits_processor"])
        and all(name not in vars(model) for name in _OWN)
        and (longest <= _alike(model) or not any(_overrides(model, name) for name in _OWN))
        and not model.config.is_encoder_decoder
        and len(set(getattr(model, "hf_device_map", {}).values())) <= 1
        and types <= {FULL, SLIDING, *STATES}
        # A cache of the caller must keep the order of a window, and states get what the loop computes behind the end.
        and (types == {FULL} or config.cache_implementation is not None)
    )
    return Loop(given, longest, ends, types) if simple else None


def _overrides(model: Any, name: str) -> bool:
    from transformers import GenerationMixin

    return getattr(type(model), name, None) is not getattr(GenerationMixin, name, None)


def _alike(model: Any) -> float:
    """Tokens up to which all decoding steps of a class that overrides methods are alike."""
    kind = type(model)
    if kind.__name__ not in _ALIKE or not kind.__module__.startswith("transformers.models."):
        return 0
    limit = _ALIKE[kind.__name__]
    return math.inf if limit is None else getattr(model.config, limit, None) or math.inf


def _stops(criteria: Any) -> tuple[int, list[Tensor]] | None:
    """The length of the longest sequence and the tokens that end one, if nothing else does."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    lengths: list[int] = []
    ends: list[Tensor] = []
    for one in criteria:
        if type(one) is MaxLengthCriteria:
            if one.max_position_embeddings is not None and one.max_length > one.max_position_embeddings:
                return None  # transformers warns
            lengths.append(one.max_length)
        elif type(one) is EosTokenCriteria:
            ends.append(one.eos_token_id)
        else:
            return None
    few = sum(tokens.numel() for tokens in ends) <= _MOST_ENDS
    return (min(lengths), ends) if lengths and few else None


def _is_cache(value: Any) -> bool:
    from transformers import StaticCache

    return isinstance(value, StaticCache) and not getattr(value, "offloading", False)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
