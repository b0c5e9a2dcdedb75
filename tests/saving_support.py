"""Models saved in every way, and the processes that load them, with or without qao.

``python saving_support.py load DIR`` and ``... refuse DIR`` print what came of each case as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = ("qao", "torch", "safetensors", "dcp", "transformers", "transformers_ct", "diffusers")


def importable(container: str) -> bool:
    """Whether its library is installed and works (diffusers and transformers may need conflicting versions)."""
    library = container.partition("_")[0]
    entry = {"transformers": "transformers", "diffusers": "diffusers.models.modeling_utils"}
    try:
        importlib.import_module(entry.get(library, "safetensors"))
    except (ImportError, RuntimeError):
        return False
    return True


IDS = torch.arange(9)[None]


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False)).bfloat16()


def plain_input() -> Tensor:
    return torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()


def llama(hidden: int) -> Any:
    """hidden = 128: every scheme can be written as compressed-tensors; 96: int4 in groups of 128 cannot."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False, attention_bias=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def transformer() -> Any:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "sample_size": 4}
    return DiTTransformer2DModel(**sizes, norm_num_groups=4, num_embeds_ada_norm=10).eval()


def run(model: Any, container: str) -> Tensor:
    with torch.no_grad():
        if container.startswith("transformers"):
            return model(IDS).logits
        if container == "diffusers":
            x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))
            return model(x, timestep=torch.tensor([3]), class_labels=torch.tensor([1])).sample
        return model(plain_input())


def load(container: str, scheme: Any, path: Path) -> Any:
    import qao

    if container == "transformers":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    if container == "transformers_ct":
        return qao.from_pretrained(path)
    if container == "diffusers":
        from diffusers import DiTTransformer2DModel

        return DiTTransformer2DModel.from_pretrained(path)
    with torch.device("meta"):
        model = plain_model()
    if container == "qao":
        return qao.load(path, model)
    qao.quantize_(model, scheme)
    load_plain(container, path, model, assign=True)
    return model


def load_plain(container: str, path: Path, model: nn.Module, **options: Any) -> None:
    """Loads into an existing model, with or without qao."""
    if container == "torch":
        model.load_state_dict(torch.load(path / "x.pt", weights_only=True), **options)
    elif container == "dcp":
        import torch.distributed.checkpoint as dcp

        state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.state_dict().items()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        model.load_state_dict(state, **options)
    else:
        from safetensors.torch import load_file

        file = path / ("model.safetensors" if container == "qao" else "x.safetensors")
        model.load_state_dict(load_file(file), **options)


def refuse(container: str, path: Path) -> Any:
    """The result of loading without qao: an error, or a model."""
    if container.startswith("transformers"):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if container == "diffusers":
        from diffusers import DiTTransformer2DModel

        return DiTTransformer2DModel.from_pretrained(path)
    model = plain_model()
    load_plain(container, path, model)
    return model


class _Blocked:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "qao":
            raise ModuleNotFoundError("No module named 'qao'")


def main(what: str, directory: Path) -> None:
    import contextlib
    import io
    import logging

    if what == "refuse":
        sys.meta_path.insert(0, _Blocked())  # type: ignore[arg-type]
    results: dict[str, Any] = {}
    for case in sorted(directory.iterdir()):
        container, _, word = case.name.partition("-")
        log = io.StringIO()
        handler = logging.StreamHandler(log)
        for library in ("transformers", "diffusers"):
            logging.getLogger(library).addHandler(handler)
        expected = torch.load(case / "expected.pt")
        try:
            with contextlib.redirect_stderr(log):
                if what == "refuse":
                    model = refuse(container, case)
                else:
                    import qao

                    model = load(container, qao.schemes.SCHEMES[word](), case)
                found = run(model, container)
            error = (found.float() - expected.float()).abs().max().item() / expected.float().abs().max().item()
            results[case.name] = {"equal": torch.equal(found, expected), "error": error}
        except BaseException as raised:  # torch.distributed.checkpoint raises a BaseException
            results[case.name] = {"raised": f"{type(raised).__name__}: {raised}", "log": log.getvalue()}
        for library in ("transformers", "diffusers"):
            logging.getLogger(library).removeHandler(handler)
    print("RESULT" + json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
