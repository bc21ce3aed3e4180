"""Decodes trees with llama.cpp on a CPU; runs in an environment of its own (see `bench_peers.py`).

    python llama_worker.py MODEL.gguf DTYPE LENGTH

A branch is a sequence whose cells are those of its parent (`llama_memory_seq_cp`, which copies
nothing in a unified cache).
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as c
import numpy as np
from llama_cells import Cells
from serving import Decoded, serve

SEQUENCES = 256  # at most, in llama.cpp
BATCH = 2048  # tokens
BF16 = 30  # GGML_TYPE_BF16, which the package does not name


class LlamaCpp:
    """One model in llama.cpp, one thread.

    Args:
        path: of the GGUF file.
        dtype: of KV, and of the weights in the file.
        cells: the most tokens of a tree.
    """

    def __init__(self, path: str, dtype: str, cells: int) -> None:
        kv = BF16 if dtype == "bfloat16" else c.GGML_TYPE_F32
        self._cells = Cells(path, kv, cells, sequences=SEQUENCES, batch=BATCH, threads=1)

    def prepare(self, prompt: list[int]) -> None:
        """The prompt's KV alone, as sequence 0."""
        self._cells.clear()
        self._forward([(token, at, 0) for at, token in enumerate(prompt)])

    def decode(self, prompt: list[int], fans: list[int], tokens: int) -> Decoded:
        """The blocks of a tree, level by level: int [blocks][tokens]."""
        blocks: Decoded = []
        parents, length, free = [0], len(prompt), 1
        for fan in fans:
            rows = []
            for parent in parents:
                for child in range(fan):
                    self._cells.copy(parent, free, length)
                    rows.append((5 + child, length, free))
                    free += 1
            found: Decoded = [[] for _ in rows]
            for _ in range(tokens):
                chosen = self._forward(rows)
                for block, token in zip(found, chosen, strict=True):
                    block.append(token)
                rows = [
                    (token, at + 1, sequence)
                    for token, (_, at, sequence) in zip(chosen, rows, strict=True)
                ]
            blocks += found
            parents, length = [sequence for _, _, sequence in rows], length + tokens
        return blocks

    def _forward(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """The likeliest token after each (token, position, sequence)."""
        self._cells.forward(rows)
        found = ctypes.cast(c.llama_get_logits(self._cells.context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(found, shape=(len(rows), self._cells.vocabulary))
        return [int(token) for token in logits.argmax(axis=1)]


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1], sys.argv[2], int(sys.argv[3])))
