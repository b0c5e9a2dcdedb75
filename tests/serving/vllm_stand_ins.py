"""Stand-ins that make vLLM importable on a CPU without its compiled part; imports nothing from it."""

from __future__ import annotations

import os
import sys

import stand_ins
import torch

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
torch.cpu._is_amx_tile_supported = lambda: False  # or vLLM wants AMX kernels of its compiled part
sys.path.insert(0, os.environ["QAO_TEST_ENGINE"])
stand_ins.install(
    *("zmq", "cachetools", "msgspec", "openai", "openai_harmony", "fastapi", "prometheus_client", "cbor2", "pybase64"),
    *("uvloop", "cpuinfo", "xgrammar", "partial_json_parser", "llguidance", "torchao"),
)
