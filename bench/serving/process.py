"""Process of one serving engine, which answers requests of the benchmark over a local connection.

``python -m bench.serving.process ENGINE ADDRESS``, started by ``Engine`` in engine.py. The first message is the
engine's arguments; then each request is a method name with keyword arguments. An answer is a dictionary, with "error"
if the request failed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

from .in_worker import kernels_of, memory, refit

Prompts = list[list[int]]


class Vllm:
    """vLLM's offline engine. Its own processes find qao's plugin by the entry point, as in any other start."""

    def __init__(self, **options: Any) -> None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for functions that run in vLLM's workers
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        started = time.perf_counter()
        from vllm import LLM

        self.import_s = time.perf_counter() - started
        self.folder = options["model"]
        self.llm = LLM(skip_tokenizer_init=True, seed=0, max_logprobs=64, **options)
        self.start_s = time.perf_counter() - started

    def describe(self) -> dict[str, Any]:
        """Version, seconds until ready, kernels by number of layers, peak GPU memory in MiB of the first process."""
        import vllm

        kernels = self.llm.apply_model(kernels_of)[0]
        return {"version": vllm.__version__, "start_s": self.start_s, "import_s": self.import_s, "kernels": kernels} | (
            self.llm.collective_rpc(memory)[0]
        )

    def generate(
        self, prompts: Prompts, tokens: int, logprobs: int | None = None, adapter: str = "", adapted: int = 0
    ) -> dict[str, Any]:
        """Greedy decoding: seconds of the call; tokens and, if asked for, log-probabilities by token id.

        ``adapter``: path of a LoRA adapter for the first ``adapted`` prompts.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        more: dict[str, Any] = {}
        if adapter:
            from vllm.lora.request import LoRARequest

            more["lora_request"] = [
                LoRARequest("adapter", 1, adapter) if i < adapted else None for i in range(len(asked))
            ]
        started = time.perf_counter()
        made = self.llm.generate(asked, sampling, use_tqdm=False, **more)
        seconds = time.perf_counter() - started
        outputs = [one.outputs[0] for one in made]
        if any(len(one.token_ids) != tokens for one in outputs):
            raise RuntimeError(f"{[len(one.token_ids) for one in outputs]} tokens instead of {tokens}")
        answer: dict[str, Any] = {"seconds": seconds, "tokens": [list(one.token_ids) for one in outputs]}
        if logprobs:
            answer["logprobs"] = [
                [{token: one.logprob for token, one in step.items()} for step in output.logprobs] for output in outputs
            ]
        return answer

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """A method of ``LLM``: sleep, wake_up, reset_prefix_cache."""
        getattr(self.llm, method)(**arguments)
        return {}

    def reload(self) -> dict[str, Any]:
        """Load the checkpoint's weights again in place: from the files, and from tensors on the GPU."""
        started = time.perf_counter()
        self.llm.collective_rpc("reload_weights")
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "refit_s": max(self.llm.collective_rpc(refit, args=(self.folder,)))}


class Sglang:
    """SGLang's offline engine."""

    def __init__(self, **options: Any) -> None:
        started = time.perf_counter()
        import sglang

        self.import_s = time.perf_counter() - started
        self.version = sglang.__version__
        self.engine = sglang.Engine(skip_tokenizer_init=True, random_seed=0, **options)
        self.start_s = time.perf_counter() - started

    def describe(self) -> dict[str, Any]:
        return {"version": self.version, "start_s": self.start_s, "import_s": self.import_s}

    def generate(self, prompts: Prompts, tokens: int, logprobs: int | None = None) -> dict[str, Any]:
        """As ``Vllm.generate``."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        asked = {"return_logprob": True, "top_logprobs_num": logprobs} if logprobs else {}
        started = time.perf_counter()
        made = self.engine.generate(input_ids=prompts, sampling_params=sampling, **asked)
        seconds = time.perf_counter() - started
        answer: dict[str, Any] = {"seconds": seconds, "tokens": [list(one["output_ids"]) for one in made]}
        if any(len(one) != tokens for one in answer["tokens"]):
            raise RuntimeError(f"{[len(one) for one in answer['tokens']]} tokens instead of {tokens}")
        if logprobs:
            answer["logprobs"] = [
                [{token: value for value, token, _ in step} for step in one["meta_info"]["output_top_logprobs"]]
                for one in made
            ]
        return answer


ENGINES: dict[str, type] = {"vllm": Vllm, "sglang": Sglang}


def main(engine: str, address: str) -> None:
    with Client(address, family="AF_UNIX") as connection:
        made: Any = None
        while (request := connection.recv()) is not None:
            name, arguments = request
            try:
                if name == "start":
                    made = ENGINES[engine](**arguments)
                    answer = made.describe()
                else:
                    answer = getattr(made, name)(**arguments)
            except Exception as error:  # the benchmark reports it and goes on with other engines
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.send(answer)
        del made
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
