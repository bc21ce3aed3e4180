"""CPU time and memory of choosing tokens, per step.

    git show COMMIT:arbor/engine/sampling.py > before.py
    python scripts/bench_sampling.py --before before.py --json out.json

One thread, thread CPU time, contestants interleaved. Logits are normal with a few probable tokens
(peaked) or without (flat, where nuclei are wide); bfloat16 ones are converted to float32 first, as
the model's are, and are often equal. Memory is the peak of what the call allocates, by the
operations of PyTorch. The ratio is before / now: the median of per-round ratios with its 95 %
interval (bootstrap).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbor.engine.sampling import sample
from arbor.measure.timing import interleaved
from arbor.model.sampling_params import Sampling

Sampler = Callable[[Tensor, list[float], Sampling], Any]
RESAMPLES = 2000


class Allocated(TorchDispatchMode):
    """Bytes of the storages that operations create: held now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                self._see(each, 0)
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self._see(each, each.untyped_storage().nbytes())
        return made

    def _see(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def peak_mb(sampler: Sampler, logits: Tensor, uniforms: list[float], sampling: Sampling) -> float:
    """Largest memory that one call holds besides its arguments."""
    with Allocated() as allocated:
        sampler(logits, uniforms, sampling)
    return allocated.peak / 1e6


def make_logits(shape: str, dtype: torch.dtype, rows: int, vocabulary: int) -> Tensor:
    """Random logits, float32, on the grid of `dtype`."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    if shape == "peaked":
        logits[:, :40] += 12 + 6 * torch.rand(rows, 40, generator=generator)
    return logits.to(dtype).float()


def loaded(path: Path) -> Sampler:
    """`sample` of another version of the module."""
    spec = importlib.util.spec_from_file_location("sampling_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    sampler: Sampler = module.sample
    return sampler


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled rounds."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(low), float(high)


def measure(
    samplers: dict[str, Sampler], logits: Tensor, sampling: Sampling, rounds: int
) -> dict[str, Any]:
    """Median milliseconds of each sampler, and the ratio if there are two."""
    uniforms = np.random.default_rng(1).random(len(logits)).tolist()
    calls = {
        name: lambda sampler=sampler: sampler(logits, uniforms, sampling)
        for name, sampler in samplers.items()
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Any] = {}
    for lap in interleaved(calls, 1, rounds, cpu=time.thread_time):
        times[lap.name].append(lap.cpu_s)
        results[lap.name] = lap.result
    row: dict[str, Any] = {"n": rounds}
    for name, sampler in samplers.items():
        row[f"{name}_ms"] = round(1e3 * statistics.median(times[name]), 2)
        row[f"{name}_peak_mb"] = round(peak_mb(sampler, logits, uniforms, sampling), 1)
    if "before" in samplers:
        ratios = [b / a for b, a in zip(times["before"], times["now"], strict=True)]
        low, high = interval(ratios)
        row |= {"ratio": round(statistics.median(ratios), 2)}
        row |= {"ratio_low": round(low, 2), "ratio_high": round(high, 2)}
        row["same_draws"] = fields(results["before"]) == fields(results["now"])
    return row


def fields(drawn: Any) -> list[list[float]]:
    return [drawn.tokens, drawn.logprob, drawn.top1, drawn.left, drawn.share]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[32_000, 128_256])
    parser.add_argument("--shapes", nargs="*", default=["peaked", "flat"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, help="another version of sampling.py")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    samplers: dict[str, Sampler] = {"now": sample}
    if asked.before:
        samplers["before"] = loaded(asked.before)
    report = []
    for shape in asked.shapes:
        for vocabulary in asked.vocabularies:
            for rows in asked.rows:
                for dtype in (torch.float32, torch.bfloat16):
                    logits = make_logits(shape, dtype, rows, vocabulary)
                    row = {"shape": shape, "dtype": str(dtype).removeprefix("torch.")}
                    row |= {"rows": rows, "vocabulary": vocabulary}
                    row |= measure(samplers, logits, Sampling(), asked.rounds)
                    report.append(row)
                    print(json.dumps(row), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"rows": report}, indent=2))


if __name__ == "__main__":
    main()
