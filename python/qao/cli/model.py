"""A language model with its tokenizer, and streamed answers, for the commands that run a model."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import DTYPES, Failure, add_source_options, counted, device_of, dtype_of, local_path, one_line

if TYPE_CHECKING:
    import torch

_CACHE_STEP = 1024  # The step is compiled for one size of the cache. A conversation grows, so sizes are multiples.


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a directory, quantized or float, a .gguf file, or owner/name on the hub"
    )
    add_source_options(parser)
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of float parts (default: as in the file)")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="per answer (default: 512)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the most likely token (default: as in the model's generation_config.json)",
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; 0: all")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling (default: 0)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the decoding step before the first answer (default: on a GPU; on a CPU it takes longer than it "
        "saves in thousands of tokens)",
    )


def load_model(args: argparse.Namespace, path: str, scheme: Any = None, **options: Any) -> Any:
    """A model ready to be called. Without a scheme, transformers loads a float model unchanged.

    ``options``: options of ``qao.from_pretrained``, for other models.
    """
    import torch

    from .. import from_pretrained
    from ..checkpoints import open_checkpoint

    device = device_of(args, "cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype_of(args)
    local = local_path(path, args.revision)
    transformers = _transformers()
    code: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    opened = open_checkpoint(local)
    if scheme is None and opened.format == "gguf" and not opened.layers:
        options = {"dequantize": True, **options}
    if scheme is None and opened.format in ("float", "mxfp4"):
        code |= {"dtype": dtype or "auto", "device_map": {"": device}}
        model = transformers.AutoModelForCausalLM.from_pretrained(str(local), **code)
    else:
        model = from_pretrained(local, scheme=scheme, device=device, dtype=dtype, **code, **options)
    if not hasattr(model, "generate") or not model.can_generate():
        raise Failure(f"{path} is a {type(model).__name__}, not a model that generates text")
    if not args.quiet:
        print(f"qao: {path}: {_about(model, device)}", file=sys.stderr)
    return model.eval()


def _about(model: Any, device: torch.device) -> str:
    """Device, dtype and schemes: "cuda:0 (NVIDIA H100), int8, bfloat16 for the rest"."""
    import torch

    from ..nn.packed_module import PackedModule

    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    schemes = Counter(str(module.scheme) for module in model.modules() if isinstance(module, PackedModule))
    dtype = str(model.dtype).removeprefix("torch.")
    if not schemes:
        return f"{name}, {dtype}, not quantized"
    words = [
        f"{word} ({counted(count, 'layer')})" if len(schemes) > 1 else word for word, count in schemes.most_common()
    ]
    return f"{name}, {', '.join(words)}, {dtype} for the rest"


def load_tokenizer(args: argparse.Namespace, path: str) -> Any:
    file = local_path(path, args.revision)
    _check_config(path, file)
    transformers = _transformers()
    options: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    if file.suffix == ".gguf":
        from ..checkpoints import load_tokenizer as of_file

        return of_file(file)
    try:
        return transformers.AutoTokenizer.from_pretrained(str(file if file.is_dir() else file.parent), **options)
    except Exception as error:  # transformers raises many types if there is no readable tokenizer
        raise Failure(f"{path}: transformers cannot read its tokenizer: {one_line(error)}") from error


def _check_config(path: str, file: Path) -> None:
    """Raise Failure if there is no config.json, or CheckpointError if it cannot be read.

    Without it, transformers asks for packages that have nothing to do with the problem.
    """
    from ..checkpoints.files import read_json

    folder = file if file.is_dir() else file.parent
    if file.suffix == ".gguf" or (folder / "adapter_config.json").exists():
        return
    if not (folder / "config.json").exists():
        raise Failure(f"{path} has no config.json, which names the model's architecture; use a Hugging Face directory")
    read_json(folder / "config.json")


def _transformers() -> Any:
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise Failure("transformers is needed to run models: pip install transformers accelerate") from None
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return transformers


class Answer:
    """Collects the tokens of one answer from ``generate``: a streamer of transformers.

    Attributes:
        text: the answer so far.
        tokens: their number.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []  # since the last line break, which later tokens do not change
        self._shown = 0
        self._prompt = True
        self.text, self.tokens = "", 0
        self._begun = self._first = self._last = time.perf_counter()

    def put(self, ids: Any) -> None:
        if self._prompt:  # generate passes the prompt first
            self._prompt = False
            return
        self._last = time.perf_counter()
        if not self.tokens:
            self._first = self._last
        self.tokens += ids.numel()
        self._ids += ids.flatten().tolist()
        self._show(final=False)

    def end(self) -> None:
        self._show(final=True)

    def _show(self, final: bool) -> None:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not final:  # incomplete character
            return
        self._write(text[self._shown :])
        self.text += text[self._shown :]
        self._shown = len(text)
        if text.endswith("\n"):
            self._ids, self._shown = [], 0

    @property
    def seconds(self) -> float:
        return self._last - self._begun

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first, which includes the prompt."""
        return (self.tokens - 1) / (self._last - self._first) if self.tokens > 1 else 0.0

    def __str__(self) -> str:
        if self.tokens <= 1:
            return f"{counted(self.tokens, 'token')} after {self._first - self._begun:.2f} s"
        rate = f"{self.tokens_per_second:.1f} tokens/s"
        return f"{self.tokens} tokens, first after {self._first - self._begun:.2f} s, then {rate}"


def generate(args: argparse.Namespace, model: Any, ids: Any, answer: Answer) -> None:
    """Continue ids [1, T] with the model."""
    import torch

    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature is not None:
        sampling = args.temperature > 0
        options |= {"do_sample": sampling, "temperature": args.temperature if sampling else None}
        options |= {} if sampling else {"top_k": None, "top_p": None}
    if args.top_p is not None or args.top_k is not None:
        options["do_sample"] = True
        options |= {} if args.top_p is None else {"top_p": args.top_p}
        options |= {} if args.top_k is None else {"top_k": args.top_k}
    end = model.generation_config.eos_token_id
    padding = end[0] if isinstance(end, list) else end
    if model.generation_config.pad_token_id is None and padding is not None:
        options["pad_token_id"] = padding
    ids = ids.to(model.device)
    if model.device.type == "cuda" if args.compile is None else args.compile:
        options |= _compiled(args, model, ids)
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=answer, **options)


def _compiled(args: argparse.Namespace, model: Any, ids: Any) -> dict[str, Any]:
    """Options of ``generate`` for an answer by the compiled decoding step."""
    end = ids.shape[1] + args.max_new_tokens
    length = -(-end // _CACHE_STEP) * _CACHE_STEP
    _compile(model, length, args.quiet)
    return _static(ids.shape[1], end, length)


@functools.lru_cache
def _compile(model: Any, length: int, quiet: bool) -> None:
    """Compile the decoding step before an answer, which would otherwise stop after its first token."""
    import torch

    if not quiet:
        print("qao: compiling the decoding step (--no-compile: run it as it is)", file=sys.stderr, flush=True)
    begun = time.perf_counter()
    steps = 4  # the prompt, and three of the compiled step: the last one replays a CUDA graph
    prompt = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    options = {"attention_mask": prompt, "do_sample": False, "min_new_tokens": steps}
    try:
        with torch.inference_mode():
            model.generate(prompt, **options, **_static(1, 1 + steps, length))
    except Exception as error:  # torch raises many types
        raise Failure(f"{type(model).__name__} cannot be compiled; use --no-compile: {one_line(error)}") from error
    if not quiet:
        print(f"qao: compiled in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def _static(tokens: int, end: int, length: int) -> dict[str, Any]:
    """Options of ``generate`` that continue ``tokens`` tokens up to ``end`` in a static cache of ``length``."""
    import torch
    from transformers import CompileConfig

    def stop(ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full(ids.shape[:1], ids.shape[1] >= end, device=ids.device)

    compile_config: Any = CompileConfig(backend="qao")
    compile_config._compile_all_devices = True  # also on a CPU
    options = {"cache_implementation": "static", "compile_config": compile_config}
    return {**options, "max_new_tokens": length - tokens, "stopping_criteria": [stop]}


def check_generation(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 1:
        args.parser.error(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        args.parser.error(f"--top-p {args.top_p}: must be above 0 and at most 1")
    if args.top_k is not None and args.top_k < 0:
        args.parser.error(f"--top-k {args.top_k}: must be 0 or a positive number")
    if args.temperature == 0 and (args.top_p is not None or args.top_k is not None):
        args.parser.error("--temperature 0 always takes the most likely token; leave out --top-p and --top-k")
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        args.parser.error(f"--temperature {args.temperature}: must be 0 or a positive number")
