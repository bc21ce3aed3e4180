"""Configurations at random: every one runs or ends with one deliberate error, never as a bug."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.run_cli import Arbor

from arbor import Solver
from arbor.errors import ArborError

KEYS = (
    *("task", "controller", "verifier", "policy", "sampling", "model", "revision", "budget"),
    *("mode", "rehydrate", "msve", "max_depth", "step_tokens", "max_expansions", "dtype"),
    *("device", "backend", "seed", "deterministic", "cuda_graphs", "timeout", "max_tokens"),
    *("first", "confidence"),
    *("problem", "expected", "trace", "trace_level", "set", "threads", "html", "encoding", "x"),
)
SETTINGS = ("name", "width", "beam", "tail", "allocator", "scorer", "temperature", "top_k", "eta")
VALUES = (
    *("true", "false", "0", "1", "-1", "3", "0.5", "nan", "inf", "-inf", "1e400", "9" * 5000),
    *("9223372036854775807", "9223372036854775808", "1979-05-27", "1979-05-27T07:32:00Z"),
    *(
        "07:32:00",
        "[]",
        "[1, 2]",
        "[[]]",
        "[[[1979-05-27]]]",
        "{}",
        "{ name = 3 }",
        "{ a = 07:32:00 }",
    ),
    *("''", "'game24'", "'tot'", "'tot,beam=2'", "'lru'", "'meta'", "'xpu'", "'cuda:99'"),
    *("'float8_e4m3fn'", "'int8'", "'arbor.errors:ArborError'", "'pathlib:Path'", "'os:getcwd'"),
    *("'nowhere:X'", "'/etc/passwd'", "'../x'", "':'", "','", "'a=b'", "'tot,='", "'é\\u0000'"),
    *("'lossy'", "'off'", "'auto'", "'none'", "'1,2'", "'[1'", "'{'", "[" * 40 + "]" * 40),
    *("[" * 5000 + "]" * 5000, "{ a = " * 60 + "1" + " }" * 60),
)


def configuration(seed: int) -> str:
    """The text of a configuration, mostly valid TOML."""
    draw = random.Random(seed)
    lines = [f"{key} = {draw.choice(VALUES)}" for key in draw.sample(KEYS, draw.randint(1, 3))]
    if draw.random() < 0.4:
        lines.append(f"[{draw.choice(KEYS)}]")
        names = draw.sample(SETTINGS, draw.randint(1, 3))
        lines += [f"{name} = {draw.choice(VALUES)}" for name in names]
    if draw.random() < 0.05:
        lines.insert(draw.randrange(len(lines)), draw.choice(["[", "x", "=", "[a.b", "\x00"]))
    return "\n".join(lines) + "\n"


def check(command: Arbor, real: type, first: int, last: int) -> None:
    for seed in range(first, last):
        text = configuration(seed)
        Path("run.toml").write_text(text, encoding="utf-8")
        ran = command("solve", "4 5 6 10", "--config", "run.toml", "--dry-run")
        assert ran.code in (0, 2, 4, 5, 6), (seed, text[:300], ran.err)
        assert len(ran.err.splitlines()) <= 1 or ran.code == 0, (seed, text[:300], ran.err)
        try:
            real.from_config("run.toml").close()
        except ArborError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {text[:300]}: {error!r}") from error


@pytest.fixture
def real() -> type:
    return Solver


@pytest.mark.slow
def test_random_configurations_end_deliberately(real: type, command: Arbor) -> None:
    check(command, real, 0, 400)
