"""Datasets of any bytes: samples, or one `ArborError` that names the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions
from arbor.errors import ArborError
from arbor.tasks.game24 import Game24
from arbor.tasks.reasoning import Reasoning

SEEDS = 150
VALUES: tuple[Any, ...] = (
    *("4 5 6 10", "", " ", "\0", "\x1b[31m4 5 6 10", "\u202e4 5 6 10", "</script>", "x" * 10**6),
    *(0, -1, 24, 10**40, 1.5, 1e308, True, False, None, [], [1], {}, {"a": 1}, "24", "\ud800"),
    *(float("nan"), float("inf"), "4,5,6,10", "4 5 6 1e999", "4 5 6 \u0661", "4 5 6 " + "9" * 5000),
)
KEYS = ("problem", "answer", "id", "", "Problem", "problem ", "\0")
EDGES = (
    b"",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\0",
    b"\r\n",
    b"\r",
    b"\n\n",
    b'"',
    b"{",
    b"[" * 99999,
    b",",
)


def jsonl(draw: random.Random) -> bytes:
    rows = []
    for _ in range(draw.randint(0, 4)):
        row: Any = {key: draw.choice(VALUES) for key in draw.sample(KEYS, draw.randint(0, 4))}
        if draw.random() < 0.6:
            row |= {"problem": "4 5 6 10", "answer": "24"}
        if draw.random() < 0.1:
            row = draw.choice(VALUES)
        rows.append(json.dumps(row).encode())
    if draw.random() < 0.1:
        rows.append(b'{"problem": ' + b"9" * 5000 + b"}")
    return draw.choice((b"\n", b"\r\n")).join(rows)


def csv(draw: random.Random) -> bytes:
    cells = [str(value) for value in VALUES if isinstance(value, str | int | float)]
    rows = [["problem", "answer", *draw.sample(KEYS, draw.randint(0, 2))]]
    rows += [[draw.choice(cells) for _ in range(draw.randint(0, 4))] for _ in range(3)]
    text = draw.choice(("\n", "\r\n")).join(",".join(row) for row in rows)
    return text.encode(errors="surrogatepass")


def damaged(draw: random.Random, data: bytes) -> bytes:
    for _ in range(draw.choice((0, 0, 1, 3))):
        at = draw.randint(0, len(data))
        data = draw.choice((data[:at], data[:at] + draw.choice(EDGES) + data[at:]))
    return draw.choice((b"", b"", b"\xef\xbb\xbf")) + data


def check(seeds: range, folder: Path) -> None:
    read = refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        suffix, make = draw.choice(((".jsonl", jsonl), (".csv", csv)))
        path = folder / f"data{suffix}"
        path.write_bytes(damaged(draw, make(draw)))
        options = DatasetOptions(
            dataset=str(path),
            split=draw.choice((None, None, "calibration", "evaluation")),
            input_key="problem",
            target_key=None,
            encoding="utf-8",
            limit=None,
            sample_id=(),
        )
        task = draw.choice((Game24(), Reasoning()))
        try:
            samples = read_samples(options, task, stop_on_error=False)
        except ArborError as error:
            refused += 1
            assert str(path) in error.message, (seed, error.message[:200])
            assert error.message.isprintable() and len(error.message) < 1000, (seed, error.message)
        except Exception as error:
            raise AssertionError(f"seed {seed} ends in {type(error).__name__}: {error}") from error
        else:
            read += 1
            assert all(each.problem is not None or each.error is not None for each in samples)
            for each in samples:
                assert each.error is None or each.error.message.isprintable(), (seed, each.error)
    assert read and refused, (read, refused)


def test_datasets_of_any_bytes_end_in_samples_or_one_error(tmp_path: Path) -> None:
    check(range(SEEDS), tmp_path)
