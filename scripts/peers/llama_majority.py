"""Samples chains with llama.cpp on a CPU; runs in its own environment (see `bench_majority.py`).

    python llama_majority.py MODEL.gguf CELLS CHAINS --threads 2

Read, a JSON object per line: ``{"prompt": [...], "samples": k, "temperature": t, "top_p": p,
"max_tokens": m, "stop": [...], "seed": s}``, with token ids. Written: ``{"texts": [[...], ...],
"cpu_seconds": of the process, "wall_seconds": s, "cells_peak": n}``.

The chains are sequences that share the cells of the prompt; each step computes all that go on in
one batch. A chain ends with a token of `stop`, which its text has, or after `max_tokens`; its cells
are free then. KV is float16, llama.cpp's default.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import Any

import llama_cpp as c
from llama_cells import Cells
from serving import answer_lines

BATCH = 512  # tokens
SEEDS = 2**32 - 1  # the last number means a random one


class Majority:
    """One model in llama.cpp that continues a prompt several times.

    Args:
        path: of the GGUF file.
        cells: the most tokens of a prompt and all its chains.
        chains: at most.
        threads: that compute.
    """

    def __init__(self, path: str, cells: int, chains: int, threads: int) -> None:
        sequences = max(chains, 1)
        self._cells = Cells(
            path,
            c.GGML_TYPE_F16,
            cells,
            sequences=sequences,
            batch=max(BATCH, sequences),
            threads=threads,
        )

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The chains of one prompt, and what they cost; see the module."""
        began, process = time.perf_counter(), time.process_time()
        with ExitStack() as stack:
            samplers = []
            for chain in range(asked["samples"]):
                samplers.append(
                    sampler(asked["temperature"], asked["top_p"], (asked["seed"] + chain) % SEEDS)
                )
                stack.callback(c.llama_sampler_free, samplers[-1])
            texts, peak = self._decode(asked, samplers)
        return {
            "texts": texts,
            "cpu_seconds": time.process_time() - process,
            "wall_seconds": time.perf_counter() - began,
            "cells_peak": peak,
        }

    def _decode(self, asked: dict[str, Any], samplers: list[Any]) -> tuple[list[list[int]], int]:
        """Token ids of each chain, and the most cells in use."""
        cells, prompt, stop = self._cells, asked["prompt"], {*asked["stop"]}
        texts: list[list[int]] = [[] for _ in samplers]
        cells.clear()
        rows = [(token, at, 0) for at, token in enumerate(prompt)]
        for begin in range(0, len(rows), BATCH):
            cells.forward(rows[begin : begin + BATCH], only_last=True)
        for chain in range(1, len(texts)):
            cells.copy(0, chain, len(prompt))
        peak = len(prompt)
        # chains that go on, and where the last forward has the logits of each
        going, places = list(range(len(texts))), [-1] * len(texts)
        while True:
            ended = set()
            for chain, place in zip(going, places, strict=True):
                token = c.llama_sampler_sample(samplers[chain], cells.context, place)
                texts[chain].append(token)
                if token in stop or len(texts[chain]) == asked["max_tokens"]:
                    cells.remove(chain)
                    ended.add(chain)
            going = [chain for chain in going if chain not in ended]
            if not going:
                return texts, peak
            computed = len(prompt) - 1
            cells.forward([(texts[i][-1], computed + len(texts[i]), i) for i in going])
            peak = max(peak, len(prompt) + sum(len(texts[chain]) for chain in going))
            places = list(range(len(going)))


def sampler(temperature: float, top_p: float, seed: int) -> Any:
    """A sampler of llama.cpp: temperature, nucleus, then the distribution; greedy at 0."""
    chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    if temperature == 0:
        parts = [c.llama_sampler_init_greedy()]
    else:
        parts = [
            c.llama_sampler_init_temp(temperature),
            c.llama_sampler_init_top_p(top_p, 1),
            c.llama_sampler_init_dist(seed),
        ]
    for part in parts:
        c.llama_sampler_chain_add(chain, part)
    return chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("cells", type=int, help="tokens of a prompt and its chains, at most")
    parser.add_argument("chains", type=int, help="of a prompt, at most")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    answer_lines(Majority(given.model, given.cells, given.chains, given.threads).answer)


if __name__ == "__main__":
    main()
