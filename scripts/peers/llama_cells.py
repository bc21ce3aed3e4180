"""A GGUF model in llama.cpp, and the cells of its sequences; runs in llama.cpp's environment."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp as c

# llama.cpp's messages are dropped
UNLOGGED = c.llama_log_callback(lambda level, text, given: None)


class Cells:
    """One model in llama.cpp on a CPU, whose sequences share cells: a unified cache.

    Flash attention is off, the faster choice on a CPU.

    Args:
        path: of the GGUF file.
        kv: ggml's number of the type of KV.
        count: of cells, a token's KV each.
        sequences: at most.
        batch: the most tokens of a forward.
        threads: that compute it.

    Raises:
        SystemExit: llama.cpp cannot load the file, or has no room.
    """

    def __init__(
        self, path: str, kv: int, count: int, *, sequences: int, batch: int, threads: int
    ) -> None:
        c.llama_log_set(UNLOGGED, ctypes.c_void_p())
        c.llama_backend_init()
        model_settings = c.llama_model_default_params()
        model_settings.n_gpu_layers = 0
        self._model = c.llama_model_load_from_file(path.encode(), model_settings)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = c.llama_context_default_params()
        settings.n_ctx = count
        settings.n_batch = settings.n_ubatch = batch
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = kv
        settings.kv_unified = True
        settings.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = c.llama_init_from_model(self._model, settings)
        if not self.context:
            raise SystemExit(f"llama.cpp has no room for {count} tokens")
        self._memory = c.llama_get_memory(self.context)
        self._batch = c.llama_batch_init(batch, 0, 1)
        self.vocabulary: int = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        """Give up every sequence."""
        c.llama_memory_clear(self._memory, True)

    def copy(self, parent: int, child: int, end: int) -> None:
        """Let a sequence begin with the first `end` cells of another one; nothing is copied."""
        c.llama_memory_seq_cp(self._memory, parent, child, 0, end)

    def remove(self, sequence: int) -> None:
        """Give up a sequence; cells that no other one has become free."""
        c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def forward(self, rows: Sequence[tuple[int, int, int]], *, only_last: bool = False) -> None:
        """Compute (token, position, sequence) of each row, and its logits.

        Args:
            rows: as many as a batch holds, at most.
            only_last: of the last row alone.

        Raises:
            RuntimeError: there are too few cells.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = not only_last or at == len(rows) - 1
        if c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed: too few cells")
