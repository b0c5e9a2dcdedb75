"""An unmodified transformers model under every scheme: tokens per second of ``generate()`` and of a compiled step.

``python -m bench generate``. The weights are random, so nothing is downloaded. Four ways of decoding are measured:
``generate()`` as it is, ``generate(cache_implementation="static")``, which transformers compiles on a GPU, a decoding
step that the user compiles by hand, with a static cache and CUDA graphs (a quantized model with the backend "qao", the
model in bfloat16 with Inductor), and transformers' continuous batching, ``generate_batch()``, on a GPU. "prompt" is the
prompt alone, in a call that the user compiles. Their tokens, but for those of ``generate_batch()``, are compared with
the logits of an eager call.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import qao
import torch
from torch import Tensor

from .llama import BASELINE
from .llama_model import COMMON, PRESETS, cache_keyword, weights_mib
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import OF_ROWS, dated, earlier, join, write
from .schemes import LAYER_SCHEMES, without_search
from .timing import seconds_of
from .turns import Turns

HEAD = "lm_head"
# Some decoder layers here are not those that bench llama builds.
MODELS: dict[str, dict[str, Any]] = PRESETS | {
    "qwen3-8b": PRESETS["qwen3-32b"]
    | {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "mistral-small-24b": {
        **{"model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 32768},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "sliding_window": None},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
    },
    "phi-4": {
        **{"model_type": "phi3", "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17920},
        **{"num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "sliding_window": None},
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    },
    "gemma-3-12b": {
        **{"model_type": "gemma3_text", "num_hidden_layers": 48, "hidden_size": 3840, "intermediate_size": 15360},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262208},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "sliding_window": 1024},
        **{"query_pre_attn_scalar": 256, "tie_word_embeddings": True},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
CONTENDERS = (BASELINE, *sorted(LAYER_SCHEMES), *(f"{word}, bf16 head" for word in sorted(LAYER_SCHEMES)))
_UNIT = f"tokens/s (times {BASELINE})"
CONTEXT = 512  # tokens of the prompt
PROMPT = 2048  # tokens of the way "prompt"
STEPS = 256  # timed tokens of a sequence
_FIRST = 16  # new tokens of the shorter call, which the time of the longer one is compared with
_ROUNDS = 3
_SECONDS = 4.0  # for more than three rounds
_MOST_MISSING = 1.0  # standard deviations of the logits by which the chosen one may be less than the largest
WAYS = {
    "eager": "`generate()`",
    "static": '`generate(cache_implementation="static")`',
    "compiled": "step compiled by hand",
    "batched": "`generate_batch()`",
    "prompt": f"prompt of {PROMPT} tokens, compiled",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    command.add_argument("--layers", type=int, metavar="N", help="instead of as many as the model has")
    command.add_argument("--schemes", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    command.add_argument("--ways", nargs="+", choices=WAYS, default=["eager", "static", "compiled"])
    command.add_argument("--batch", type=int, default=1, metavar="B", help="sequences decoded")
    command.add_argument("--context", type=int, default=CONTEXT, metavar="T", help="tokens of the prompt")
    command.add_argument("--steps", type=int, default=STEPS, metavar="T", help=f"timed tokens of a sequence ({STEPS})")
    command.add_argument("--backend", default="qao", help="of torch.compile, for quantized models compiled by hand")
    command.add_argument(
        "--turns", type=Path, metavar="FILE", help="of several runs on one GPU: one measures while none compiles"
    )
    command.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add these results to those in --out")


@torch.no_grad()
def run(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure, print one line per case, and write the results after each of them."""
    import transformers

    meta = describe(arguments.device) | {"transformers": transformers.__version__, "context": arguments.context}
    warn_if_busy(meta)
    kept = {_key(row): row for row in earlier(path, meta, OF_ROWS)}
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(arguments.turns or Path(folder, "turns"))
        for word in arguments.schemes:
            gc.collect()
            torch._dynamo.reset()
            with turns.start():
                model = _model(arguments, word)
            backend = "inductor" if word == BASELINE else arguments.backend
            torch.manual_seed(1)
            ids = torch.randint(model.config.vocab_size, (arguments.batch, arguments.context), device=model.device)
            about = {"model": arguments.model, "layers": model.config.num_hidden_layers, "scheme": word}
            about |= {"batch": arguments.batch, "weights_mib": weights_mib(model)}
            for way in arguments.ways:
                row = _WAYS[way](Case(model, ids, arguments.steps, backend, turns))
                row = dated(meta, about | {"way": way} | row | ({"first_s": None} if arguments.turns else {}))
                print(
                    f"{arguments.model} {arguments.batch} {word:<20} {way:<9} {row['tokens_s']:9.1f} tokens/s",
                    flush=True,
                )
                kept[_key(row)] = row
                write({"meta": meta, "rows": list(kept.values())}, path)
            del model
    return {"meta": meta, "rows": list(kept.values())}


def add(arguments: argparse.Namespace, path: Path) -> None:
    """Add the rows of the chosen ways in the files ``--add`` to the results at ``path``."""
    join(arguments.add, path, _key, lambda row: row["way"] in arguments.ways)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "layers", "scheme", "batch", "way"))


def _model(arguments: argparse.Namespace, word: str) -> Any:
    """A model as ``AutoModelForCausalLM`` makes it, then ``qao.quantize_``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = COMMON | MODELS[arguments.model]
    config = AutoConfig.for_model(**numbers | {"num_hidden_layers": arguments.layers or numbers["num_hidden_layers"]})
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # random weights may choose it
    model.generation_config.pad_token_id = 0
    kind, _, head = word.partition(", ")
    if kind != BASELINE:
        scheme = without_search(LAYER_SCHEMES[kind])
        qao.quantize_(model, {HEAD: None, "re:.*": scheme} if head else scheme, progress=False)
        torch.cuda.empty_cache()  # of the float weights, for other runs on the GPU
    return model


# ---- ways of decoding ------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What a way of decoding gets."""

    model: Any
    ids: Tensor  # [B, T] prompts
    steps: int  # timed tokens
    backend: str  # of torch.compile
    turns: Turns

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> str:
        return self.ids.device.type

    def seconds(self, call: Callable[[], object]) -> float:
        return seconds_of(call, 1, self.device)

    def check(self, sequences: Tensor, made: int) -> None:
        """Compare the last ``made`` tokens with logits of an eager call. The likeliest is some four deviations up."""
        for row in sequences:
            with self.turns.start():
                logits = self.model(row[None, :-1], logits_to_keep=made).logits[0].float()
            chosen = logits.gather(-1, row[-made:, None])[:, 0]
            missing = ((logits.amax(-1) - chosen) / logits.std(-1)).mean().item()
            if not missing < _MOST_MISSING:
                raise RuntimeError(f"chosen tokens are {missing:.3g} standard deviations below the likeliest")


def _generate(options: dict[str, Any], case: Case) -> dict[str, Any]:
    """Seconds of a token are those by which a longer call takes longer than a shorter one: both contain the prompt."""

    def call(tokens: int) -> Tensor:
        return case.model.generate(  # type: ignore[no-any-return]
            case.ids, attention_mask=torch.ones_like(case.ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, **options,
        )  # fmt: skip

    row = _marginal(call, case)
    case.check(call(_FIRST), _FIRST)
    return row


def _compiled(case: Case) -> dict[str, Any]:
    """A decoding step and the choice of the likeliest token in one compiled function. All rounds have one context."""
    forward, reset = _with_cache(case, case.ids.shape[1] + case.steps + _FIRST)
    with case.turns.start():
        token = forward(case.ids)
    tokens = [token.clone()]
    compiled = _compile(forward, case.backend)

    def steps(count: int) -> None:
        for _ in range(count):
            token.copy_(compiled(token))
            if len(tokens) < _FIRST:
                tokens.append(token.clone())

    with case.turns.start():
        first_s = case.seconds(partial(steps, 1))
        steps(_FIRST - 1)  # among them, those that record the CUDA graph

    def round() -> float:
        reset()
        token.copy_(forward(case.ids))
        return case.seconds(partial(steps, case.steps))

    with case.turns.measure():
        seconds = median(round() for _ in range(_ROUNDS))
    case.check(torch.cat([case.ids, *tokens], 1), len(tokens))
    return {"tokens_s": case.batch * case.steps / seconds, "first_s": first_s}


def _prompt(case: Case) -> dict[str, Any]:
    """The prompt, up to the choice of the first token."""
    ids = torch.randint(case.model.config.vocab_size, (case.batch, PROMPT), device=case.ids.device)
    forward, reset = _with_cache(case, PROMPT)
    with case.turns.start():
        forward(ids)  # makes the cache, which a graph must not
    compiled = _compile(forward, case.backend)
    tokens: list[Tensor] = []

    def seconds() -> float:
        reset()
        return case.seconds(lambda: tokens.append(compiled(ids).clone()))

    with case.turns.start():
        first_s, *_ = (seconds() for _ in range(3))  # the others record the CUDA graph
    with case.turns.measure():
        typical = median(seconds() for _ in range(3 * _ROUNDS))
    case.check(torch.cat([ids, tokens[-1]], 1), 1)
    return {"tokens_s": case.batch * PROMPT / typical, "first_s": first_s}


def _with_cache(case: Case, longest: int) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    """The model as a function of tokens [B, T] that appends them to a static cache and returns the next [B, 1].

    The other function empties the cache.
    """
    from transformers import StaticCache

    cache = StaticCache(config=case.model.config, max_cache_len=longest)
    keyword = {cache_keyword(case.model): cache}

    def forward(tokens: Tensor) -> Tensor:
        logits: Tensor = case.model(tokens, logits_to_keep=1, **keyword).logits[:, -1]
        return logits.argmax(-1, keepdim=True)

    return forward, cache.reset


def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    mode = "reduce-overhead" if backend in ("inductor", "qao") else None
    return torch.compile(function, mode=mode, fullgraph=True, backend=backend)


def _batched(case: Case) -> dict[str, Any]:
    """Requests that transformers batches by itself. Seconds of a token as in ``_generate``."""
    prompts = case.ids.tolist()

    def call(tokens: int) -> None:
        made = case.model.generate_batch(prompts, max_new_tokens=tokens, persistent_manager=True)
        counts = [len(one.generated_tokens) for one in made.values()]
        if counts != [tokens] * len(prompts):
            raise RuntimeError(f"generate_batch() made {counts} tokens instead of {tokens}")

    row = _marginal(call, case)
    case.model.destroy_cached_continuous_batching_manager()
    return row


def _marginal(call: Callable[[int], Any], case: Case) -> dict[str, Any]:
    """Seconds of the first call, and tokens/s by which a call with ``case.steps`` more tokens takes longer."""
    with case.turns.start():
        first_s = case.seconds(partial(call, _FIRST + case.steps))  # first the longer: its cache serves both
        call(_FIRST)
    rounds: list[list[float]] = []
    with case.turns.measure():
        begin = time.perf_counter()
        # A prompt takes as long as many tokens and not always the same time: more rounds where they are short.
        while len(rounds) < _ROUNDS or (len(rounds) < 5 * _ROUNDS and time.perf_counter() - begin < _SECONDS):
            rounds.append([case.seconds(partial(call, _FIRST + more)) for more in (case.steps, 0)])
    long, short = (median(times) for times in zip(*rounds, strict=True))
    return {"tokens_s": case.batch * case.steps / (long - short), "first_s": first_s}


_WAYS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "eager": partial(_generate, {}),
    "static": partial(_generate, {"cache_implementation": "static"}),
    "compiled": _compiled,
    "batched": _batched,
    "prompt": _prompt,
}


# ---- documents -------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file: tokens per second by scheme and way, in relation to bfloat16."""
    return f"{render_first(results)}\n\n{render_others(results)}".strip()


def render_first(results: dict[str, Any]) -> str:
    """A table of the first model and batch."""
    rows, of = results["rows"], _model_and_batch(results["rows"][0])
    mine = [row for row in rows if _model_and_batch(row) == of]
    return f"{_caption(results, mine)}\n\n**{of[0]}**, batch {of[1]}: {_UNIT}\n\n{_table(mine, rows, [])}"


def render_others(results: dict[str, Any]) -> str:
    """A table of all other models and batches; nothing without them."""
    rows, of = results["rows"], _model_and_batch(results["rows"][0])
    others = [row for row in rows if _model_and_batch(row) != of]
    if not others:
        return ""
    return f"{_caption(results, others)} {_UNIT}:\n\n{_table(others, rows, ['model', 'batch'])}"


def _model_and_batch(row: dict[str, Any]) -> tuple[str, int]:
    return row["model"], row["batch"]


def _caption(results: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    meta = results["meta"]
    return f"{caption(meta, rows)}; transformers {meta['transformers']}, a prompt of {meta['context']} tokens."


def _table(shown: list[dict[str, Any]], rows: list[dict[str, Any]], names: list[str]) -> str:
    cells = {(row["model"], row["batch"], row["scheme"], row["way"]): row for row in rows}
    ways = [way for way in WAYS if any(row["way"] == way for row in shown)]
    weights = {(row["model"], row["batch"], row["scheme"]): row["weights_mib"] for row in shown}
    lines = []
    for (model, batch, scheme), mib in weights.items():
        word, comma, head = scheme.partition(",")
        about = [value for name, value in (("model", model), ("batch", str(batch))) if name in names]
        speeds = _speeds(cells, model, batch, scheme, ways)
        lines.append([*about, f"`{word}`{comma}{head}", f"{mib / 1024:.1f}", *speeds])
    return table([*names, "scheme", "weights GiB", *(WAYS[way] for way in ways)], lines)


def _speeds(cells: dict[Any, dict[str, Any]], model: str, batch: int, scheme: str, ways: list[str]) -> Iterator[str]:
    for way in ways:
        row, base = cells.get((model, batch, scheme, way)), cells.get((model, batch, BASELINE, way))
        if row is None:
            yield "–"
        else:
            yield f"{row['tokens_s']:.0f}" + (f" ({row['tokens_s'] / base['tokens_s']:.2f})" if base else "")
