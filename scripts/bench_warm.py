"""Time to load a prompt's KV from files of an earlier run (`keep_kv`), against computing it.

    python scripts/bench_warm.py --prompt 1000 --rounds 15 --csv rows.csv

One prompt of random tokens on a random model, one thread. Methods take turns within a round:

    compute     the prefill of the prompt
    load        the same with a folder that holds it: whole files are read, checked and copied to
                slots, the rest and the last token are computed
    keep        the prefill in an empty folder: computed and written

Times are CPU time of the thread; the files are in the system's cache, so `wall_ms` shows no slow
disk either. The ratio is the median over rounds of a method's time to that of `compute`. Loaded KV
is compared with what was stored, bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from random_llama import SIZES, NoText, fused_runner, prefix, random_llama
from rounds import RATIO, ratio_columns

from arbor.engine.engine import Engine
from arbor.kernels.native import native_state
from arbor.measure.timing import turned
from arbor.memory.prompt_files import PromptFiles
from arbor.retention.policy import POLICIES
from arbor.tree import ThoughtTree

METHODS = ("compute", "load", "keep")
LIMIT = 1 << 32


class Bench:
    """Prefills one prompt in different ways.

    Args:
        size: of `SIZES`.
        dtype: of the model.
        prompt: tokens.
        folder: for the files; empty.
    """

    def __init__(self, size: str, dtype: torch.dtype, prompt: int, folder: Path) -> None:
        self._runner = fused_runner(random_llama(size, dtype))
        self._tokens = prefix(prompt, SIZES[size]["vocab_size"])
        self._kept, self._empty = folder / "kept", folder / "empty"
        engine, tree = self._extended(self._files(self._kept))
        self._stored = self._bits(engine, tree)
        self._engines = {
            "compute": self._engine(None),
            "load": self._engine(self._files(self._kept)),
            "keep": self._engine(None),
        }

    def run(self, method: str) -> tuple[float, float]:
        """CPU and wall seconds of a prefill."""
        engine = self._engines[method]
        if method == "keep":
            shutil.rmtree(self._empty, ignore_errors=True)
            engine = self._engine(self._files(self._empty))
        tree = ThoughtTree(self._tokens)
        engine.open(tree, len(self._tokens) + 1)
        began, wall = time.thread_time(), time.perf_counter()
        engine.extend(tree.root)
        seconds = time.thread_time() - began, time.perf_counter() - wall
        if method == "load":
            assert self._bits(engine, tree) == self._stored, "other KV than was stored"
        engine.finish()
        return seconds

    @property
    def file_bytes(self) -> int:
        """Bytes of the prompt's files."""
        return sum(path.stat().st_size for path in self._kept.rglob("*.kv"))

    def _files(self, folder: Path) -> PromptFiles:
        return PromptFiles(folder, "0" * 32, LIMIT)

    def _engine(self, files: PromptFiles | None) -> Engine:
        """An engine in which nothing of a closed tree stays on the device."""
        policy = POLICIES["reentry"]
        return Engine(self._runner, NoText(), policy=policy, share="off", prompts=files)

    def _extended(self, files: PromptFiles) -> tuple[Engine, ThoughtTree]:
        engine, tree = self._engine(files), ThoughtTree(self._tokens)
        engine.open(tree, len(self._tokens) + 1)
        engine.extend(tree.root)
        return engine, tree

    def _bits(self, engine: Engine, tree: ThoughtTree) -> bytes:
        """The KV of the prompt's whole files, its last token excepted."""
        slots = tree.root.span.slot[: (len(self._tokens) - 1) // 32 * 32]
        rows = engine.memory.pool.gather(slots)
        return rows.view(torch.uint8).numpy().tobytes()


def main() -> None:
    """Measure, print, and append rows to a CSV file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--rounds", type=int, default=15)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    for name in given.dtypes:
        with tempfile.TemporaryDirectory(prefix="arbor-warm-") as folder:
            for row in measured(given, name, Path(folder)):
                table.show(row, f"native kernels: {native_state()}")


def measured(given: argparse.Namespace, dtype: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    bench = Bench(given.size, getattr(torch, dtype), given.prompt, folder)
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for method in METHODS:  # warm up
        bench.run(method)
    for round_ in range(given.rounds):
        for method in turned(METHODS, round_):
            taken[method].append(bench.run(method))
    for method in METHODS:
        cpu = [1e3 * each for each, _ in taken[method]]
        ratios = [
            own / base for (own, _), (base, _) in zip(taken[method], taken["compute"], strict=True)
        ]
        low, middle, high = np.percentile(cpu, (25, 50, 75)).tolist()
        yield {
            "model": f"{given.size} Llama, random",
            "dtype": dtype,
            "prompt_tokens": given.prompt,
            "file_mib": round(bench.file_bytes / 2**20, 2),
            "method": method,
            "cpu_ms": round(middle, 2),
            "cpu_q1_ms": round(low, 2),
            "cpu_q3_ms": round(high, 2),
            "wall_ms": round(1e3 * statistics.median(wall for _, wall in taken[method]), 2),
            **ratio_columns(ratios, RATIO, 4),
            "n": given.rounds,
            "n_of": "rounds",
        }


if __name__ == "__main__":
    main()
