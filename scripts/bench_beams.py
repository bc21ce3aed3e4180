"""Token-level beam search against transformers' `generate`, on the same weights.

    python scripts/bench_beams.py --size 100m --beams 4 16 64 400 --rounds 3 --csv rows.csv
    python scripts/bench_beams.py --size 5m --beams 4 --prompt 64 --tokens 8 --rounds 1

A random Llama in float32, by arbor's default kernels on a CPU, continues a random prompt; both ways
give the same tokens, which is checked. The ways take turns within a round; times are CPU time of
the thread, one thread, prefill included. A row of the CSV is one measurement; the table gives the
median of the ratios of transformers to arbor, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from experiment_table import ExperimentTable, add_options
from random_llama import NoText, fused_runner, random_llama

from arbor.engine.beam_hypotheses import BeamSettings
from arbor.engine.engine import Engine
from arbor.retention.policy import POLICIES
from arbor.tree import ThoughtTree

Way = Callable[[int], list[list[int]]]


def ways(given: argparse.Namespace) -> dict[str, Way]:
    """Name -> a function from the number of beams to the tokens of each."""
    generator = torch.Generator().manual_seed(1)
    reference: Any = random_llama(given.size, torch.float32)
    ids = torch.randint(5, reference.config.vocab_size, (1, given.prompt), generator=generator)
    runner = fused_runner(random_llama(given.size, torch.float32))
    engine = Engine(runner, NoText(), policy=POLICIES["reentry"])

    def transformers(beams: int) -> list[list[int]]:
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=given.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return [row[given.prompt :] for row in out.tolist()]

    def arbor(beams: int) -> list[list[int]]:
        settings = BeamSettings(beams=beams, max_tokens=given.tokens)
        tree = ThoughtTree(ids[0].tolist())
        engine.open(tree, given.prompt + beams * given.tokens)
        found = engine.search_beams(settings, ())
        engine.close(tree)
        engine.memory.free_kept_prompts(engine.memory.slots)  # the next prompt is computed
        return [list(each.tokens) for each in found]

    return {"transformers": transformers, "arbor": arbor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["5m", "100m"], default="100m")
    parser.add_argument("--beams", type=int, nargs="+", default=(4, 16, 64, 400))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    both = ways(given)
    for beams in given.beams:
        ratios = []
        for turn in range(given.rounds):
            taken, results = {}, {}
            for name in list(both)[:: 1 if turn % 2 else -1]:
                began = time.thread_time()
                results[name] = both[name](beams)
                taken[name] = time.thread_time() - began
                table.add(
                    {
                        "model": given.size,
                        "prompt": given.prompt,
                        "tokens": given.tokens,
                        "beams": beams,
                        "way": name,
                        "round": turn,
                        "cpu_s": round(taken[name], 4),
                        "n": 1,
                        "n_of": "searches",
                    }
                )
            assert results["arbor"][0] == results["transformers"][0], "the best beams differ"
            same = sum(a == b for a, b in zip(*results.values(), strict=True))
            ratios.append(taken["transformers"] / taken["arbor"])
        print(
            f"{given.size} {beams:>4} beams: transformers / arbor "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{same} of {beams} beams the same",
            flush=True,
        )


if __name__ == "__main__":
    main()
