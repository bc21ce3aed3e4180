"""What an event costs where KV heads keep tokens of their own: milliseconds of one thread.

    python scripts/bench_heads.py --json out.json

A sequence of 10,000 tokens in a model of 32 layers with 8 KV heads, as one block and as 80 of 125
tokens, with random figures; a part of the tokens stays, or all but one. Timed alone:

    token    the event of `granularity=token`: one score a token, Pooled, the tokens that stay
    heads    the event of `granularity=head`: the scores of all heads are there, as one array
             what the places of each block are worth (of several blocks), Pooled, what each head
             gives up, which slots leave, and what moves
    numpy    any of these without the native kernels
    adaptive, pyramid    the event with `heads=adaptive` and `heads=pyramid`, each cell its own
             head's, as before the first event
    lent     the same where heads hold tokens in each other's cells, as after it
    carried  K and V moved from slot to slot, float16, 64 numbers a head
    moved    heads of tokens moved, per head

Rounds take turns; thread CPU time; median and quartiles, also of the ratios of single rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arbor.heads.selection import (
    HeadScorer,
    HeadSelection,
    Mover,
    SharedCells,
    select_by_head,
)
from arbor.heads.sets import moved_cells
from arbor.heads.table import HeadMoves, HeadTable
from arbor.kernels.native_heads import head_moves, held_by_head
from arbor.memory.pool import KVPool, LayerKV
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Blocks, Tokens
from arbor.retention.head_budgets import Adaptive, HeadBudgets, Pyramid
from arbor.retention.scorers import HeavyHitters
from arbor.retention.selection import Selection, select
from arbor.retention.token_kv import NO_KV

DIM = 64


def offer(sizes: NDArray[np.int64], mass: NDArray[np.float64]) -> Blocks:
    """Blocks of these sizes, all on the device, with the attention their tokens received."""
    count = len(mass)
    tokens = Tokens.when_read(
        {name: lambda _: np.zeros(count) for name in ("latest", "queries", "activated")}
        | {name: lambda _: np.zeros(count) for name in ("recurrence", "lately", "credit", "key")}
        | {"position": lambda _: np.arange(count), "kv": lambda _: NO_KV},
        block=np.repeat(np.arange(len(sizes)), sizes),
        offset=np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes),
        mass=mass,
        protected=(np.arange(count) < 4) | (np.arange(count) >= count - 8),
    )
    floor = np.bincount(tokens.block[tokens.protected], minlength=len(sizes))
    return Blocks.when_read(
        {}, length=sizes, resident=sizes, floor=floor, see=tokens.only, ids=sizes
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of this thread, and the result."""
    began = time.thread_time()
    result = work()
    return 1e3 * (time.thread_time() - began), result


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return {"median": round(middle, 3), "q1": round(low, 3), "q3": round(high, 3)}


def measure(
    tokens: int, layers: int, heads: int, blocks: int, kept: float | None, rounds: int, move: bool
) -> dict[str, Any]:
    """Events over sequences of so many tokens.

    Args:
        tokens, layers, heads: of the model and its sequence.
        blocks: it consists of.
        kept: part of the tokens that stays; None: all but one.
        rounds: repetitions.
        move: whether K and V are moved as well.
    """
    sizes = np.full(blocks, tokens // blocks)
    room = tokens - 1 if kept is None else int(kept * tokens)
    draw = np.random.default_rng(0)
    table = HeadTable([heads] * layers, tokens)
    pool = None
    if move:
        pool = KVPool(table_layers(layers, heads), tokens, torch.float16, torch.device("cpu"))
    times: dict[str, list[float]] = {}
    lent = {
        "adaptive": lent_cells(layers, heads, tokens),
        "pyramid": lent_cells(1, layers * heads, tokens),
    }
    chosen: Selection | None = None
    for _ in range(rounds):
        figures = draw.random((len(table), tokens), np.float32)
        mass = figures.mean(0, dtype=np.float64)

        def by_head(shown: Tokens, figures: NDArray[np.float32] = figures) -> Tokens:
            return Tokens.when_read({}, block=np.empty(figures.size, np.int8), mass=figures.ravel())

        def token(mass: NDArray[np.float64] = mass) -> Selection:
            return select(offer(sizes, mass), room, Pooled(), HeavyHitters())[1]

        def head(
            mover: Mover | None,
            budgets: HeadBudgets | None = None,
            holder: NDArray[np.integer] | None = None,
            native: bool = True,
            mass: NDArray[np.float64] = mass,
            show: Any = by_head,
        ) -> Selection:
            shared = None
            if budgets is not None:
                kernels = (held_by_head, moved_cells) if native else ()
                holders = partial(shown_of, holder)
                shared = SharedCells(budgets, table.layer, holders, *kernels)
            scorer = HeadScorer(HeavyHitters(), show, mover, shared)
            return select_by_head(offer(sizes, mass), room, Pooled(), scorer)[1]

        works: dict[str, Callable[[], Selection]] = {
            "token": token,
            "numpy": partial(head, None),
            "heads": partial(head, head_moves),
        }
        named: dict[str, HeadBudgets] = {"adaptive": Adaptive(), "pyramid": Pyramid()}
        for name, budgets in named.items():
            for state, holder in {"": None, ", lent": lent[name]}.items():
                for way, native in {"": True, ", numpy": False}.items():
                    works[name + state + way] = partial(head, None, budgets, holder, native)
        for name, work in works.items():
            spent, selected = timed(work)
            times.setdefault(name, []).append(spent)
            chosen = selected if name == "heads" else chosen
        if pool is not None and isinstance(chosen, HeadSelection):
            slots = np.arange(tokens, dtype=np.int32)
            moved = chosen.moved
            moves = HeadMoves(moved.cell, slots[moved.source], moved.into, slots[moved.target])
            spent, _ = timed(lambda moves=moves: pool.copy_heads(moves, table)())  # type: ignore[misc]
            times.setdefault("carried", []).append(spent)
            times.setdefault("moved", []).append(len(moves) / len(table))
    return {
        "tokens": tokens,
        "layers": layers,
        "kv_heads": heads,
        "blocks": blocks,
        "kept": kept,
        "n": rounds,
        **{name: summary(each) for name, each in times.items()},
        "numpy, times as long": {
            name: summary(list(np.divide(times[f"{name}, numpy"], times[name])))
            for name in times
            if f"{name}, numpy" in times
        },
    }


def lent_cells(pools: int, heads: int, tokens: int) -> NDArray[np.int16]:
    """Heads whose tokens lie in the cells of each slot, [C, T]: those of each pool in any order."""
    draw = np.random.default_rng(1)
    own = np.arange(pools * heads, dtype=np.int16).reshape(pools, heads, 1)
    mixed = draw.permuted(np.repeat(own, tokens, -1), axis=1)
    return mixed.reshape(pools * heads, tokens)


def shown_of(holder: NDArray[np.integer] | None, tokens: Tokens) -> NDArray[np.integer] | None:
    """The columns of some tokens."""
    return None if holder is None else holder[:, tokens.position]


def table_layers(layers: int, heads: int) -> list[LayerKV]:
    """What the model stores."""
    return [LayerKV(heads, DIM, DIM)] * layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 80])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--move", action="store_true", help="also move K and V (0.7 GB)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = []
    for blocks in args.blocks:
        for kept in (0.5, 0.75, None):
            row = measure(
                args.tokens, args.layers, args.heads, blocks, kept, args.rounds, args.move
            )
            report.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
