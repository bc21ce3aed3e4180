"""Tree attention on the CPU: `TorchCascade` against simpler designs, one layer and decode step.

    python scripts/bench_attention.py --json attention.json

Trees: a root of P tokens, then four levels of 64-token nodes; 8 leaves grow from widths (2, 4, 4,
8), 32 from (2, 4, 8, 32). One thread, CPU time of that thread, contestants in turn (rounds), KV of
so many layers in rotation that it is cold in the caches. A ratio is the median over rounds of
contestant / cascade, with a 95 % bootstrap interval; a round's times are medians over its steps.

Contestants:
    cascade       TorchCascade, planned once per step; `plan_us` is that planning, of all layers
    native        NativeCascade, planned once per step, where the native kernels are built
    copies        a contiguous copy of its path per leaf, one batched SDPA, group in rows ("a1b")
    gather        the same from the shared pool: the paths are gathered at each step ("a2")
    union         all keys of the tree, one masked SDPA ("b")
    union_bmm     the same as two batched matmuls and a softmax ("bm")
    two_level     root by one flash call, the rest per leaf from private copies ("c2", Hydragen)
    levels        one flash call per node, merged by logsumexp ("c")
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.native import native_library, native_state
from arbor.measure.statistics import bootstrap

NODE_TOKENS = 64
WIDTHS = {8: (2, 4, 4, 8), 32: (2, 4, 8, 32), 64: (4, 8, 16, 64)}
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Tree:
    """Slots of a root and four levels of nodes, level after level.

    Attributes:
        spans: per level, per node: (first row, end row, first slot, end slot).
        paths: int64 [leaves, path length] slots of every leaf.
    """

    def __init__(self, root_tokens: int, leaves: int) -> None:
        self.leaves, self.slots = leaves, root_tokens
        self.spans = [[(0, leaves, 0, root_tokens)]]
        for width in WIDTHS[leaves]:
            share = leaves // width
            level = []
            for node in range(width):
                level.append(
                    (node * share, (node + 1) * share, self.slots, self.slots + NODE_TOKENS)
                )
                self.slots += NODE_TOKENS
            self.spans.append(level)
        self.paths = torch.stack(
            [
                torch.cat(
                    [
                        torch.arange(a, b)
                        for level in self.spans
                        for r, e, a, b in level
                        if r <= leaf < e
                    ]
                )
                for leaf in range(leaves)
            ]
        )

    def layout(self) -> CascadeLayout:
        """The cascade layout with one level per tree level."""
        levels = []
        for depth, level in enumerate(self.spans):
            rows = [0] + [end for _, end, _, _ in level]
            keys = [0]
            for _, _, first, end in level:
                keys.append(keys[-1] + end - first)
            slots = [slot for _, _, first, end in level for slot in range(first, end)]
            row_bounds, key_bounds, indices = (
                torch.tensor(x, dtype=torch.int32) for x in (rows, keys, slots)
            )
            causal = depth == len(self.spans) - 1
            levels.append(CascadeLevel(row_bounds, key_bounds, indices, causal))
        return CascadeLayout(self.leaves, tuple(levels))


Step = Callable[[int], Tensor]


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the sets' results: [T, H, D], finite [T, H]."""
    merged = torch.logaddexp(lse, lse2)
    safe = torch.where(torch.isinf(merged), torch.zeros_like(merged), merged)
    weight = torch.exp(lse - safe).unsqueeze(-1)
    weight2 = torch.exp(lse2 - safe).unsqueeze(-1)
    return (out * weight + out2 * weight2).to(out.dtype), merged


def contestants(
    tree: Tree, shape: AttentionShape, dtype: torch.dtype, layers: int
) -> dict[str, Step]:
    """One function per design: layer number -> out [leaves, H_q, D]."""
    n, h, g, d = tree.leaves, shape.num_kv_heads, shape.group, shape.head_dim_qk
    random_state = torch.Generator().manual_seed(0)
    pools = torch.randn(layers, 2, tree.slots, h, d, generator=random_state).to(dtype)
    queries = torch.randn(layers, n, h * g, d, generator=random_state).to(dtype)
    copies = pools[:, :, tree.paths].transpose(3, 4).contiguous()  # [layers, 2, n, h, path, d]
    root = tree.spans[0][0][3]
    visible = torch.zeros(n, tree.slots, dtype=torch.bool).scatter_(1, tree.paths, True)
    mask = torch.zeros(n, tree.slots, dtype=dtype).masked_fill_(~visible, -torch.inf)
    mask = mask.repeat_interleave(g, 0)  # rows x group
    backend = TorchCascade()
    plan = backend.plan(tree.layout(), shape)
    every = tree.paths.view(-1)

    def folded(layer: int) -> Tensor:
        return queries[layer].view(n, h, g, d).transpose(0, 1).reshape(h, n * g, d)

    def unfold(out: Tensor) -> Tensor:
        return out.reshape(h, n, g, d).transpose(0, 1).reshape(n, h * g, d)

    def cascade(layer: int) -> Tensor:
        return backend.run(plan, queries[layer], pools[layer, 0], pools[layer, 1])[0]

    def from_copies(layer: int) -> Tensor:
        q = queries[layer].view(n, h, g, d)
        k, v = copies[layer]
        return scaled_dot_product_attention(q, k, v, scale=shape.scaling).reshape(n, h * g, d)

    def gather(layer: int) -> Tensor:
        q = queries[layer].view(n, h, g, d)
        k, v = (
            pools[layer, i].index_select(0, every).view(n, -1, h, d).transpose(1, 2) for i in (0, 1)
        )
        return scaled_dot_product_attention(q, k, v, scale=shape.scaling).reshape(n, h * g, d)

    def union(layer: int) -> Tensor:
        k, v = (pools[layer, i].transpose(0, 1).unsqueeze(0) for i in (0, 1))
        q = folded(layer).unsqueeze(0)
        return unfold(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scaling))

    def union_bmm(layer: int) -> Tensor:
        k, v = pools[layer, 0].permute(1, 2, 0), pools[layer, 1].transpose(0, 1)
        logits = torch.baddbmm(mask, folded(layer), k, alpha=shape.scaling)
        return unfold(torch.bmm(torch.softmax(logits, -1), v))

    def two_level(layer: int) -> Tensor:
        k, v = (pools[layer, i, :root].transpose(0, 1).unsqueeze(0) for i in (0, 1))
        out, lse = flash(folded(layer).unsqueeze(0), k, v, 0.0, False, scale=shape.scaling)
        k, v = copies[layer, :, :, :, root:]
        own, own_lse = flash(queries[layer].view(n, h, g, d), k, v, 0.0, False, scale=shape.scaling)
        lse = lse.view(h, n, g).transpose(0, 1).reshape(n, h * g)
        return merge_states(unfold(out), lse, own.reshape(n, h * g, d), own_lse.reshape(n, h * g))[
            0
        ]

    def by_levels(layer: int) -> Tensor:
        out, lse = torch.empty(0), torch.empty(0)
        for level in tree.spans:
            parts, parts_lse = [], []
            for first, end, begin, stop in level:
                m = end - first
                q = (
                    queries[layer, first:end]
                    .view(m, h, g, d)
                    .transpose(0, 1)
                    .reshape(1, h, m * g, d)
                )
                k, v = (pools[layer, i, begin:stop].transpose(0, 1).unsqueeze(0) for i in (0, 1))
                part, part_lse = flash(q, k, v, 0.0, False, scale=shape.scaling)
                parts.append(part.view(h, m, g, d).transpose(0, 1).reshape(m, h * g, d))
                parts_lse.append(part_lse.view(h, m, g).transpose(0, 1).reshape(m, h * g))
            level_out, level_lse = torch.cat(parts), torch.cat(parts_lse)
            if len(out):
                out, lse = merge_states(out, lse, level_out, level_lse)
            else:
                out, lse = level_out, level_lse
        return out

    designs: dict[str, Step] = {
        "cascade": cascade,
        "copies": from_copies,
        "gather": gather,
        "union": union,
        "union_bmm": union_bmm,
        "two_level": two_level,
        "levels": by_levels,
    }
    if native_library() is not None:
        native = NativeCascade()
        native_plan = native.plan(tree.layout(), shape)
        designs["native"] = lambda layer: native.run(
            native_plan, queries[layer], pools[layer, 0], pools[layer, 1]
        )[0]
    return designs


def thread_us(step: Callable[[], object]) -> float:
    """CPU time of this thread for one call, in microseconds."""
    begin = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - begin) / 1e3


def measure(
    leaves: int, root: int, shape: AttentionShape, dtype: torch.dtype, rounds: int, steps: int
) -> dict[str, Any]:
    """One cell: every contestant's time and its ratio to the cascade."""
    tree = Tree(root, leaves)
    kv_bytes = 2 * tree.slots * shape.num_kv_heads * shape.head_dim_qk * dtype.itemsize
    layers = max(2, min(24, -(-(64 << 20) // kv_bytes)))
    designs = contestants(tree, shape, dtype, layers)
    expected = designs["levels"](0).float()
    for name, step in designs.items():
        error = (step(0).float() - expected).abs().max().item()
        assert error < (1e-4 if dtype == torch.float32 else 5e-2), f"{name} is off by {error}"
    times: dict[str, list[float]] = {name: [] for name in designs}
    names = list(designs)
    for number in range(rounds):
        first = number % len(names)  # who begins finds the least of a layer in the caches
        for name in names[first:] + names[:first]:
            step = designs[name]
            samples = [
                thread_us(partial(step, layer % layers)) for layer in range(number, number + steps)
            ]
            times[name].append(statistics.median(samples))
    layout, backend = tree.layout(), TorchCascade()
    plan_us = statistics.median(
        thread_us(lambda: backend.plan(layout, shape).tasks) for _ in range(20)
    )
    results: dict[str, dict[str, Any]] = {}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["cascade"], strict=True)]
        results[name] = {
            "us": round(statistics.median(values), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_ci95": [round(x, 3) for x in bootstrap(ratios, "median")],
        }
    return {
        "leaves": leaves,
        "root_tokens": root,
        "unique_tokens": tree.slots,
        "path_tokens": tree.paths.shape[1],
        "dtype": str(dtype).removeprefix("torch."),
        "heads": [shape.num_qo_heads, shape.num_kv_heads],
        "head_dim": shape.head_dim_qk,
        "layers_rotated": layers,
        "rounds": rounds,
        "plan_us": round(plan_us, 1),
        "contestants": results,
    }


def main() -> int:
    """Runs the cells, prints one line each, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--leaves", type=int, nargs="+", default=[8, 32], choices=sorted(WIDTHS))
    parser.add_argument(
        "--root", type=int, nargs="+", default=[512, 2048], help="tokens of the root"
    )
    parser.add_argument("--heads", type=int, nargs=2, default=[8, 4], metavar=("QO", "KV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=8, help="steps per round and contestant")
    parser.add_argument("--json", type=Path, default=None, help="file; default: standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dim = options.head_dim
    shape = AttentionShape(options.heads[0], options.heads[1], dim, dim, scaling=dim**-0.5)
    dtype = getattr(torch, options.dtype)
    cells = []
    for root in options.root:
        for leaves in options.leaves:
            cell = measure(leaves, root, shape, dtype, options.rounds, options.steps)
            cells.append(cell)
            line = "  ".join(
                f"{name} {result['us']:.0f} ({result['ratio']:.2f}x)"
                for name, result in cell["contestants"].items()
            )
            print(f"P={root} n={leaves} plan {cell['plan_us']} us: {line}", file=sys.stderr)
    report = {
        "torch": torch.__version__,
        "machine": platform.processor(),
        "native": native_state(),
        "unit": "us",
        "cells": cells,
    }
    text = json.dumps(report, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
