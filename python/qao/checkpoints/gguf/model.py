"""The language model in a GGUF file in terms of transformers: tensor names, row order of q and k, config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..base import CheckpointError
from .architectures import ARCHITECTURES, TOP, VARIANTS
from .file import Array, GgufFile, TensorInfo
from .rows import Architecture, Stem

_REMEDY = "Open the model's own file; merge adapters (LoRA) into the float model first"
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1 and later; not a tensor of the model
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}  # Phi-3
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of their number
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_WINDOW = "attention.sliding_window"
_BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}  # which scale attention by hidden_size / heads, not by the head's size


class Container(Protocol):
    """What a model needs of a file. ``write.Planned`` is one that does not exist yet."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def bytes_of(self, tensor: TensorInfo) -> Tensor: ...


class Part(NamedTuple):
    """A tensor of transformers: all of a tensor in the file, one of the experts that it stacks, or a computed one."""

    module: str
    kind: str  # its own name: "weight" or "bias", except for sinks and fused experts
    stored: str  # name in the file
    expert: int | None = None
    fused: tuple[str, ...] = ()  # names in the file of all tensors of fused experts: gate and up, or down
    sources: tuple[str, ...] = ()  # names in the file of what it is made from
    made: Callable[..., Tensor] | None = None  # from sources in float32; None: of their rows
    stacked: bool = False  # all experts, each with the rows of the sources
    span: tuple[int, int] | None = None  # first row and end of the rows of ``stored``; None: all
    like: str = ""  # the row of the table that such rows have; "": that of ``stored``

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kind}"


class Model:
    """A language model in a GGUF file, under its names in transformers.

    Attributes:
        architecture: the row of the table.
        blocks: number of blocks.
        config: the content of config.json.
        parts: the tensors.
        computed: tensors that come from the metadata.

    Raises:
        CheckpointError: an unknown architecture, tensor or type of rotary embedding.
    """

    def __init__(self, file: Container) -> None:
        self._file = file
        arch, kind = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
        if kind == "mmproj" or arch == "clip":
            raise CheckpointError(
                f"{file.path}: the vision or audio encoder of a multimodal model (mmproj), which is not supported. "
                "Open the file of its language model, which reads text"
            )
        if kind not in (None, "model"):
            raise CheckpointError(f"{file.path}: a file of type {kind!r}, which is not a whole model. {_REMEDY}")
        if arch not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(
                f"{file.path}: architecture {arch!r} is not supported. Open the float model of transformers with a "
                f"scheme instead. Supported are {known}"
            )
        if isinstance(file, GgufFile) and file.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{file.path}: one part of several, under a name that does not end in -00001-of-0000N.gguf. Restore "
                "the names of the parts, or join them with llama-gguf-split --merge"
            )
        self._arch = str(arch)
        self.architecture: Architecture = ARCHITECTURES[self._arch]
        self.blocks = self.number("block_count") - self.number("nextn_predict_layers", 0, least=0)
        if self.blocks < 1:
            raise self.error(f"all {self.number('block_count')} blocks predict further tokens")
        if self.blocks > len(file.tensors):  # before anything is made for each of them
            raise self.error(f"it says {self.blocks} blocks, but has {len(file.tensors)} tensors")
        if self._arch in VARIANTS:
            self.architecture = VARIANTS[self._arch](self)
        self._stems = {name: self._stem(name) for name in file.tensors if not self._is_skipped(name)}
        self.config = self._config()
        self._sizes: dict[int, dict[str, int]] = {}
        self._check_shapes()
        self.parts = [part for name in self._stems for part in self._parts(name)]
        computed = self.architecture.computed
        self.computed = computed(self) if computed is not None else {}
        read = {source for part in self.parts for source in (part.stored, *part.fused, *part.sources)}
        for name in self._stems:
            if name not in read:
                raise self.error(f"it has {name}, but not the tensor that is read with it")

    def is_linear(self, part: Part) -> bool:
        """Whether a part is the weight of an nn.Linear. A tied head, a router and an expert are not."""
        rows = self._symbols(part.stored)
        if part.stored.endswith("_embd.weight"):
            return False
        if len(rows) == 3 and rows[0] == "e" and part.made is not None:
            return True
        return part.kind == "weight" and len(rows) == 2 and rows[0] not in ("e", "1")

    def _symbols(self, stored: str) -> list[str]:
        """Of the tensor in transformers, or of all experts."""
        stem = self._stems[stored][1]
        return (stem.shape if stem.made is None else stem.made.shape).split(" ")

    def row_order(self, name: str, like: str = "") -> Tensor | None:
        """int64 [N]: index in the file of each row of the transformers tensor; None: same order.

        ``like``: the row of the table, if not that of the tensor ``name``.

        llama.cpp interleaves the halves of a head's rotary pairs: rows 0, D/2, 1, D/2 + 1, …
        """
        made = self._stems[name][1].made
        if made is not None and made.rows is not None:
            return made.rows(self.sizes(_block(name)))
        stem = like or name.split(".")[-2]
        if not self.architecture.permuted or stem not in ("attn_q", "attn_k"):
            return None
        heads = self.config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        rows = torch.arange(heads * self.config["head_dim"], device="cpu")
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def norm_offset(self, name: str) -> float:
        """What llama.cpp adds to the tensor of transformers. The norm of a gated delta net is as it is."""
        return self.architecture.norm_offset if name.endswith("norm.weight") and "ssm_" not in name else 0.0

    # ---- names

    def _is_skipped(self, name: str) -> bool:
        """Factors of rotary embeddings, and what transformers leaves out: blocks that predict further tokens."""
        parts = name.split(".")
        if parts[0] != "blk" or len(parts) < 3 or not parts[1].isdecimal():
            return name in (ROPE_FACTORS, *LONG_FACTORS.values())
        block, skipped = int(parts[1]), self.architecture.skipped
        if skipped is not None and skipped(self, block, parts[2]):
            return True
        return block in range(self.blocks, self.number("block_count"))

    def _stem(self, name: str) -> tuple[str, Stem]:
        """The module with its block, and the row of the table."""
        own, kind = _split(name)
        parts, top = own.split(".", 2), {**TOP, **self.architecture.top}
        if own in top and self._has(top[own], kind):
            return top[own].module, top[own]
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal():
            block, stem = int(parts[1]), self.architecture.stems.get(parts[2])
            if stem is not None and self._has(stem, kind) and block < self.blocks:
                return f"{self.architecture.layers}.{block}.{stem.module}".rstrip("."), stem
        raise self.error(
            f"tensor {name} is unknown in a model of architecture {self._arch!r} with {self.blocks} blocks"
        )

    def _has(self, stem: Stem, kind: str) -> bool:
        """Whether transformers may have this tensor: norms have biases in some models only."""
        if stem.module == "mlp.experts":
            return kind in ("weight", "bias")
        if kind != "bias":
            own = stem.names[:1]
            plain = kind == "weight" or "norm" in stem.module  # llama.cpp leaves out the ending of a norm of Falcon-H1
            return own != ("",) and (plain or own not in ((), ("weight",)))
        without = "{}" in stem.module or stem is TOP["token_embd"] or len(stem.names) < 2
        return not (without or ("norm" in stem.module and not self.architecture.norm_bias))

    def _parts(self, name: str) -> Iterator[Part]:
        module, stem = self._stems[name]
        stored, kind = _split(name)
        if stem.module == "mlp.experts":
            own = stem.names[kind == "bias" :][:1]
            gate = stored.endswith("ffn_gate_exps")
            fused = (name, name.replace("ffn_gate_exps", "ffn_up_exps")) if gate else (name,)
            self._require(name, fused)
            yield from (Part(module, one, name, fused=fused) for one in own)
            return
        if not stem.names:
            return
        if stem.split:
            yield from self._split_parts(name, module, kind, stem)
            return
        own_kind = stem.names[kind == "bias"]
        if stem.made is not None:
            sources = self._sources(name, stem)
            self._require(name, sources)
            made: Callable[..., Tensor] | None = None
            if stem.made.function is not None:
                made = partial(stem.made.function, self.sizes(_block(name)))
            elif len({self._file.tensors[one].type for one in sources}) > 1:
                assert stem.made.rows is not None
                made = partial(_joined, stem.made.rows(self.sizes(_block(name))))
            yield Part(module, own_kind, name, sources=sources, made=made, stacked=stem.made.stacked)
        elif "{}" not in module:
            yield Part(module, own_kind, name)
        else:
            count = self.sizes(_block(name))[stem.shape.split(" ")[0]]
            yield from (Part(module.format(one), kind, name, one) for one in range(count))

    def _split_parts(self, name: str, module: str, kind: str, stem: Stem) -> Iterator[Part]:
        begin, sizes = 0, self.sizes(_block(name))
        for like in stem.split:
            one = self.architecture.stems[like]
            end = begin + sizes[one.shape.split(" ")[0]]
            yield Part(f"{module}.{one.module}", kind, name, span=(begin, end), like=like)
            begin = end

    def _sources(self, name: str, stem: Stem) -> tuple[str, ...]:
        assert stem.made is not None
        own, _ = _split(name)
        block = own.split(".", 2)[:2]
        return (name, *(".".join((*block, one)) + ".weight" for one in stem.made.sources))

    def _require(self, name: str, others: Iterable[str]) -> None:
        for other in others:
            if other not in self._file.tensors:
                raise self.error(f"it has {name}, but no {other}")

    # ---- config.json

    def number(self, key: str, default: Any = None, kind: Any = int, least: int = 1) -> Any:
        """A number of the metadata, ``<architecture>.<key>``."""
        value: Any = self._file.metadata.get(f"{self._arch}.{key}", default)
        if isinstance(value, (Array, list)) and key in self.architecture.arrays:
            value = max(self.per_block(key))
        in_range = type(value) is kind and (kind is bool or least <= value < 2**31 or (kind is float and value > 0))
        if not in_range:
            what = "positive " * (least == 1 and kind is not bool)
            raise self.error(f"{self._arch}.{key} must be a {what}{kind.__name__}, not {value!r}")
        return value

    def per_block(self, key: str, default: Any = None) -> list[Any]:
        """The number of each block, which the metadata may have once for all."""
        value = self._file.metadata.get(f"{self._arch}.{key}", default)
        value = value.values or () if isinstance(value, Array) else value
        values = list(value) if isinstance(value, (list, tuple)) else [value] * self.blocks
        if len(values) < self.blocks or not all(isinstance(one, int) and 0 <= one < 2**31 for one in values):
            raise self.error(f"{self._arch}.{key} must have a number for each of {self.blocks} blocks")
        return values[: self.blocks]

    def has_key(self, key: str) -> bool:
        """Whether a number is there that is not 0, which llama.cpp writes for None."""
        return bool(self._file.metadata.get(f"{self._arch}.{key}", 0) != 0)

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def rows(self, name: str) -> int:
        return self._file.tensors[name].shape[0]

    def floats(self, key: str) -> list[float]:
        """The number of each block, which the metadata may have once for all; ``key`` has no architecture."""
        value = self._file.metadata.get(key)
        value = value.values or () if isinstance(value, Array) else value
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * self.blocks
        if len(values) < self.blocks or not all(isinstance(one, float) and math.isfinite(one) for one in values):
            raise self.error(f"{key} must have a number for each of {self.blocks} blocks")
        return values[: self.blocks]

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {what}")

    def _config(self) -> dict[str, Any]:
        about, tensors = self.architecture, self._file.tensors
        hidden: int = self.number("embedding_length")
        heads: int = self.number("attention.head_count")
        head_dim: int = self.number(about.head_dim, hidden // heads)
        rotated: int = self.number(about.rotated, head_dim)
        plain = about.head_dim == "attention.key_length"
        for key, value, allowed in (
            (
                "attention.value_length",
                self.number("attention.value_length", head_dim) if plain else head_dim,
                head_dim,
            ),
            (about.rotated, rotated, min(rotated, head_dim) if about.partial_rotary else head_dim),
        ):
            if value != allowed or head_dim % 2 or value % 2:
                raise self.error(f"{self._arch}.{key} is {value}, but heads have {head_dim}")
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise self.error("it has no token_embd.weight. Is it a language model?")
        norm = "attention.layer_norm_epsilon" if about.layer_norm else "attention.layer_norm_rms_epsilon"
        experts = self.number("expert_feed_forward_length") if self.has_key("expert_feed_forward_length") else None
        config: dict[str, Any] = {
            "architectures": [about.cls],
            "model_type": about.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.number("feed_forward_length", experts),
            "num_hidden_layers": self.blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": self.number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.number("context_length"),
            about.epsilon: self.number(norm, kind=float),
            "rope_theta": self.number("rope.freq_base", 10000.0, float),
            "tie_word_embeddings": "output.weight" not in tensors,
            **about.fixed,
            **{name: self._is_present(tensor) for name, tensor in about.present.items()},
        }
        for entry in about.entries:
            if not entry.optional or self.has_key(entry.key):
                config[entry.name] = self.number(entry.key, entry.default, entry.kind, entry.least)
        for key, value in about.constants.items():
            if self.number(key, value) != value:
                raise self.error(f"{self._arch}.{key} is {self.number(key)}; only {value} is supported")
        if self.has_key(_WINDOW) and all(entry.key != _WINDOW for entry in about.entries):
            raise self.error(f"{self._arch} with a sliding window is not supported")
        if self._arch in _BLOCKS_OF_27B:
            large = config["num_hidden_layers"] == _BLOCKS_OF_27B[self._arch]
            config["query_pre_attn_scalar"] = hidden // heads if large else head_dim
        if about.partial_rotary:
            config["partial_rotary_factor"] = rotated / head_dim
        for name in ("bos", "eos", "padding"):
            value = self._file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            fits = isinstance(value, int) and 0 <= value < embedding.shape[0]  # defaults of transformers may not
            config[f"{name.replace('padding', 'pad')}_token_id"] = value if fits else None
        more = about.configure(self) if about.configure is not None else {}
        if "rope_parameters" in more:  # of several kinds of blocks
            del config["rope_theta"]
            return config | more
        scaling, changes = self._rope_scaling(rotated, config), more.pop("rope_scaling", {})
        if about.local_theta is not None:
            theta = config["rope_theta"]
            local = self.number("rope.freq_base_swa", theta, float)
            if local != about.local_theta:
                del config["rope_theta"]
                whole = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
                windows = {"rope_type": "default", "rope_theta": local}
                more["rope_parameters"] = {"full_attention": whole, "sliding_attention": windows}
                return config | more
        if scaling is not None:
            more["rope_scaling"] = scaling | changes
        return config | more

    def _is_present(self, name: str) -> bool:
        """Whether block 0 has a tensor, alone or in rows of another one."""
        own, kind = _split(name)
        fused = (stem for stem, one in self.architecture.stems.items() if own in one.split)
        return any(self.has_tensor(f"blk.0.{stem}.{kind}") for stem in (own, *fused))

    def _rope_scaling(self, rotated: int, config: dict[str, Any]) -> dict[str, Any] | None:
        about, kind = self.architecture, self._file.metadata.get(f"{self._arch}.rope.scaling.type", "none")
        if all(name in self._file.tensors for name in LONG_FACTORS.values()):
            factors = {key: self.divisors(name, rotated).tolist() for key, name in LONG_FACTORS.items()}
            key = "type" if about.model_type == "phi3" else "rope_type"  # Phi-3 of transformers 4 takes no other keys
            return {key: "longrope", **factors}
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor", kind=float)}
        if kind == "yarn":
            original = self.number("rope.scaling.original_context_length")
            factor = self.number("rope.scaling.factor", kind=float)
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if self.has_key(f"rope.scaling.yarn_{name}"):
                    scaling[name] = self.number(f"rope.scaling.yarn_{name}", kind=float)
            return {**scaling, **about.yarn}
        if kind != "none":
            raise self.error(f"rotary embeddings scaled by {kind!r} are not supported")
        if ROPE_FACTORS not in self._file.tensors:
            return None
        stored = self.divisors(ROPE_FACTORS, rotated)
        # The file stores the factors but not their parameters. Every Llama from 3.1 on has these constants.
        for high in about.high_frequency:
            scaling = {"factor": stored.max().item(), "low_freq_factor": 1.0, "high_freq_factor": high}
            scaling["original_max_position_embeddings"] = 8192
            if torch.allclose(stored, llama3_factors(rotated, config["rope_theta"], **scaling), rtol=1e-4):
                return {"rope_type": "llama3", **scaling}
        raise self.error(f"{ROPE_FACTORS} are not those of Llama 3.1 to 3.3")

    def divisors(self, name: str, rotated: int) -> Tensor:
        """float32 [rotated / 2]: divisors of frequencies in the file."""
        info = self._file.tensors.get(name)
        if info is None:
            raise self.error(f"it has no {name}")
        if info.type != "F32" or info.shape != (rotated // 2,):
            raise self.error(f"{name} must be F32[{rotated // 2}], not {info}")
        return self._file.bytes_of(info).view(torch.float32)

    # ---- shapes

    def sizes(self, block: int = 0) -> dict[str, int]:
        """The numbers for the symbols in the shapes of the table."""
        if block in self._sizes:
            return self._sizes[block]
        c = self.config
        shared = next((c[name] for name in _SHARED_EXPERTS if name in c), 0)
        q, k = (c[f"num_{heads}_heads"] * c["head_dim"] for heads in ("attention", "key_value"))
        f = c["intermediate_size"]
        experts = next((c[name] for name in EXPERTS if name in c), 0)
        x = c.get("moe_intermediate_size", f)
        sizes = {
            **{"h": c["hidden_size"], "v": c["vocab_size"], "f": f, "2f": 2 * f, "1": 1},
            **{"q": q, "k": k, "q+2k": q + 2 * k, "d": c["head_dim"]},
            **{"n": c["num_attention_heads"], "m": c["num_key_value_heads"]},
            **{"e": experts, "x": x, "s": c.get("shared_expert_intermediate_size", x * shared)},
        }
        more = self.architecture.sizes
        self._sizes[block] = sizes if more is None else sizes | more(c, block)
        return self._sizes[block]

    def shape(self, part: Part) -> tuple[int, ...]:
        """The shape of a tensor in transformers."""
        symbols, sizes = self._symbols(part.stored), self.sizes(_block(part.stored))
        if part.fused:
            experts, rows, columns = (sizes[one] for one in symbols)
            rows *= len(part.fused)
            return (experts, rows) if part.kind.endswith("bias") else (experts, columns, rows)
        if self._is_bias(part.stored):
            symbols = self._stems[part.stored][1].shape.split(" ")[:1]
        elif part.expert is not None:
            symbols = symbols[1:]
        shape = tuple(sizes[one] for one in symbols)
        return shape if part.span is None else (part.span[1] - part.span[0], *shape[1:])

    def _is_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of another one, with its rows."""
        return name.endswith(".bias") and self._stems[name][1].names[:1] != ("",)

    def _check_shapes(self) -> None:
        for name, (module, stem) in self._stems.items():
            sizes, symbols = self.sizes(_block(name)), stem.shape.split(" ")
            if self._is_bias(name):
                symbols = symbols[: 2 if module.endswith("mlp.experts") else 1]
            expected = [sizes[one] for one in symbols]
            found = list(self._file.tensors[name].shape)
            if found != expected and found != [one for one in expected if one != 1]:  # llama.cpp drops dimensions of 1
                raise self.error(f"tensor {name} ({module}) has shape {found}; the metadata requires {expected}")
        blocks = {name.split(".")[1] for name in self._stems if name.startswith("blk.")}
        if len(blocks) != self.config["num_hidden_layers"]:
            raise self.error(f"{len(blocks)} of {self.config['num_hidden_layers']} blocks have tensors")


def _joined(rows: Tensor, *sources: Tensor) -> Tensor:
    return torch.cat(sources)[rows]


def _split(name: str) -> tuple[str, str]:
    """A tensor's name without its ending, and "weight", "bias" or ""."""
    own, _, kind = name.rpartition(".")
    return (own, kind) if kind in ("weight", "bias") else (name, "")


def _block(name: str) -> int:
    """Number of a tensor's block; 0 outside of blocks."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else 0


def llama3_factors(
    rotated: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """float32 [rotated / 2]: divisor of each wavelength; see transformers' rope_type "llama3"."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turns = original_max_position_embeddings / wavelengths
    width = max(high_freq_factor - low_freq_factor, 1e-9)  # Llama 4 has none
    smooth = ((turns - low_freq_factor) / width).clamp(0, 1)
    return (1 / (smooth + (1 - smooth) / factor)).float()
