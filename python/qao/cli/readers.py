"""Readers of the output of ``quantize`` and ``convert``: vLLM, transformers, with or without qao."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .common import Failure

if TYPE_CHECKING:
    from ..schemes import Scheme

READERS = ("vllm", "transformers", "qao")


def layout_text(format: str) -> str:
    """A format and its readers, for people."""
    if format == "compressed-tensors":
        return "the layout of compressed-tensors, which vLLM, transformers and qao load"
    return "qao's layout, which vLLM and transformers load if qao is installed"


def scheme_for(args: argparse.Namespace, scheme: Scheme) -> Scheme:
    """The scheme for --for: vLLM needs integer zero points for int4.

    Also sets ``args.to``, to the layout of readers without qao.

    Raises:
        Failure: the reader does not support such layers.
    """
    from ..schemes import Int4Weight

    layout_for(args)
    if args.reader in (None, "qao"):
        return scheme
    if isinstance(scheme, Int4Weight) and not scheme.symmetric and args.reader == "vllm":
        scheme = replace(scheme, whole_zeros=True)
    check_reader(args.reader, [scheme])
    return scheme


def layout_for(args: argparse.Namespace) -> None:
    """Set ``args.to`` from --for."""
    if args.reader in (None, "qao"):
        return
    if args.to in ("qao", "gguf"):
        args.parser.error(f"--to {args.to}: {args.reader} cannot load this layout without qao")
    args.to = "compressed-tensors"


def check_reader(reader: str | None, schemes: Iterable[Scheme]) -> None:
    """Raise Failure if vLLM or transformers without qao does not support these layers."""
    for scheme in schemes:
        reason = _unsupported_reason(reader, scheme)
        if reason is not None:
            raise Failure(f"--for {reader}: {reason}")


def _unsupported_reason(reader: str | None, scheme: Scheme) -> str | None:
    from ..checkpoints.compressed_tensors.write import unread_by_engines
    from ..schemes import Int4Weight

    if not isinstance(scheme, Int4Weight):
        return None
    if reader == "vllm" and (reason := unread_by_engines(scheme)):
        return f"{reason}: add --symmetric"
    if reader == "vllm" and scheme.activations == "fp8" and scheme.group_size != 128:
        return f"vLLM supports {scheme.word} only in groups of 128: add --group-size 128"
    if reader == "transformers" and not scheme.symmetric:
        return f"transformers refuses the zero points of {scheme} in compressed-tensors: add --symmetric"
    return None
