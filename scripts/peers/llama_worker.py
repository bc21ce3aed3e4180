"""Decodes trees with llama.cpp on a CPU; runs in an environment of its own (see `bench_peers.py`).

    python llama_worker.py MODEL.gguf DTYPE LENGTH

A branch is a sequence whose cells are those of its parent (`llama_memory_seq_cp`, which copies
nothing in a unified cache). Flash attention is off, the faster choice on a CPU.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp as c
import numpy as np
from serving import Decoded, serve

SEQUENCES = 256  # at most, in llama.cpp
BATCH = 2048  # tokens
BF16 = 30  # GGML_TYPE_BF16, which the package does not name


# llama.cpp's messages are dropped
UNLOGGED = c.llama_log_callback(lambda level, text, given: None)


class LlamaCpp:
    """One model in llama.cpp, one thread.

    Args:
        path: of the GGUF file.
        dtype: of KV, and of the weights in the file.
        cells: the most tokens of a tree.
    """

    def __init__(self, path: str, dtype: str, cells: int) -> None:
        c.llama_log_set(UNLOGGED, ctypes.c_void_p())
        c.llama_backend_init()
        model_settings = c.llama_model_default_params()
        model_settings.n_gpu_layers = 0
        self._model = c.llama_model_load_from_file(path.encode(), model_settings)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        kv = BF16 if dtype == "bfloat16" else c.GGML_TYPE_F32
        settings = c.llama_context_default_params()
        settings.n_ctx = cells
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = SEQUENCES
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = kv
        settings.kv_unified = True
        settings.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = c.llama_init_from_model(self._model, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {cells} tokens")
        self._memory = c.llama_get_memory(self._context)
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(BATCH, 0, 1)

    def prepare(self, prompt: list[int]) -> None:
        """The prompt's KV alone, as sequence 0."""
        c.llama_memory_clear(self._memory, True)
        self._forward([(token, at, 0) for at, token in enumerate(prompt)])

    def decode(self, prompt: list[int], fans: list[int], tokens: int) -> Decoded:
        """The blocks of a tree, level by level: int [blocks][tokens]."""
        blocks: Decoded = []
        parents, length, free = [0], len(prompt), 1
        for fan in fans:
            rows = []
            for parent in parents:
                for child in range(fan):
                    c.llama_memory_seq_cp(self._memory, parent, free, 0, length)
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
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = True
        if c.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed: too few cells")
        found = ctypes.cast(c.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(found, shape=(len(rows), self._vocabulary))
        return [int(token) for token in logits.argmax(axis=1)]


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1], sys.argv[2], int(sys.argv[3])))
