"""`scripts/gpu_check.py`: faulty attention and faulty engines fail it, faulty stages do not stop
it, and its floors and tables are right. Nothing here needs a GPU."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import flashinfer_standin as standin
from support.slow_cases import every

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_concurrency  # noqa: E402
import gpu_check  # noqa: E402
from gpu_stages import (  # noqa: E402
    agreement,
    attention,
    engines,
    environment,
    floors,
    processes,
    report,
    rows,
    trees,
)

from arbor.engine.engine import Engine  # noqa: E402
from arbor.kernels.attention.rowwise import RowwiseAttention  # noqa: E402
from arbor.kernels.attention.torch_cascade import TorchCascade  # noqa: E402

CPU = torch.device("cpu")


# Attention


@pytest.mark.parametrize("case", attention.cases(small=True), ids=lambda case: case.name)
def test_the_float64_result_is_the_reference(case: attention.Case) -> None:
    problem = attention.problem_of(case, 3, CPU)
    backend = RowwiseAttention()
    plan = backend.plan(problem.layout, problem.shape)

    out, lse = backend.run(
        plan, problem.q.double(), problem.k.double(), problem.v.double(), problem.sinks
    )

    assert torch.allclose(out, problem.out, atol=1e-12)
    assert torch.allclose(lse.double(), problem.lse, atol=1e-5)  # a float32 number
    mass = backend.mass(plan, problem.q.double(), problem.k.double(), lse)
    assert torch.allclose(mass.double(), problem.mass, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case", every(3, attention.cases(small=True)[::5]), ids=lambda case: case.name
)
def test_attention_that_misses_any_one_key_fails(case: attention.Case) -> None:
    problem = attention.problem_of(case, 4, CPU)
    backend = TorchCascade()
    assert attention.errors(backend, problem, problem.layout)["ok"]
    slots, mask = attention.visible(problem.layout, problem.shape)
    read = set(slots[mask.any(0)].tolist())  # a window hides the others
    tried = 0
    for index, level in enumerate(problem.layout.levels):
        for place in range(0, len(level.kv_indices), 3):
            layout = attention.without_key(problem.layout, index, place)
            rows = layout.levels[index].qo_indptr.diff()
            keys = layout.levels[index].kv_indptr.diff()
            if int(level.kv_indices[place]) not in read:
                continue
            if level.causal and (keys < rows).any():  # then a row would read nothing
                continue
            tried += 1

            assert not attention.errors(backend, problem, layout)["ok"], (index, place)
    assert tried > 10


def test_8_bit_kv_is_checked_against_the_numbers_that_it_holds() -> None:
    case = next(case for case in attention.cases(small=True) if case.shape.group == 4)
    problem = attention.problem_of(case, 6, CPU)
    rounded = attention.stored(problem)

    assert rounded.k.dtype == torch.int8
    assert attention.errors(TorchCascade(), rounded, problem.layout)["ok"]
    of_others = replace(rounded, out=problem.out, lse=problem.lse)
    assert not attention.errors(TorchCascade(), of_others, problem.layout)["ok"]


def test_attention_that_reads_an_unused_slot_fails() -> None:
    problem = attention.problem_of(attention.cases(small=True)[0], 5, CPU)
    used = {int(slot) for level in problem.layout.levels for slot in level.kv_indices}
    unused = next(slot for slot in range(len(problem.k)) if slot not in used)
    problem.layout.levels[0].kv_indices[0] = unused

    found = attention.errors(TorchCascade(), problem, problem.layout)

    assert found["ok"] is False and found["error"] is None


# The engine


@pytest.fixture(scope="module")
def exact() -> Any:
    return engines.random_model(floors.TINY, CPU).float()


@pytest.fixture
def engine(exact: Any) -> Engine:
    model = engines.random_model(floors.TINY, CPU)
    return engines.make_engine(model, engines.Variant("on"), "torch", policy="lru", debug=True)


@pytest.mark.parametrize("wrong", [lambda logits: logits + 1, lambda logits: logits * math.nan])
def test_an_engine_with_other_logits_fails(
    engine: Engine, exact: Any, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    ask = Engine.ask
    monkeypatch.setattr(Engine, "ask", lambda *given: wrong(ask(*given)))

    assert agreement.agreement(engine, exact, 4096)["ok"] is False


# Processes


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def writes(out: Path, **content: Any) -> str:
    return f"open({str(out)!r}, 'a').write({rows.json.dumps(content)!r} + '\\n')\n"


def part(name: str, limit_s: float = 60) -> processes.Part:
    return processes.Part(2, "attention", name, limit_s)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`gpu_check` with one part that writes these rows; returns the exit code."""

    def run_rows(*contents: dict[str, Any], require: str | None = None) -> int:
        def command(part: Any, arguments: argparse.Namespace, out: Path) -> list[str]:
            return python("".join(writes(out, **content) for content in contents))

        monkeypatch.setattr(gpu_check, "command", command)
        monkeypatch.setattr(gpu_check, "PARTS", (part("all"),))
        monkeypatch.setattr(gpu_check, "has_cuda", lambda: True)
        given = ["gpu_check", "--out", str(tmp_path / "rows.jsonl")]
        monkeypatch.setattr(sys, "argv", [*given, *(("--require", require) if require else ())])
        return gpu_check.main()

    return run_rows


def test_parts_end_with_the_time_of_all_and_those_left_are_named(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    commands = [
        (part("first"), python("import time; time.sleep(60)")),
        (part("second"), python("")),
    ]

    processes.run_all(commands, out, {**os.environ}, total_s=1.0)

    first, second = rows.read(out)
    assert first["ok"] is False and first["reason"].startswith("killed after 1")
    assert second["part"] == "second" and second["reason"] == "out of time"
    assert second["status"] == rows.SKIPPED


def test_what_a_part_started_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(started)!r}, 'w').write(str(child.pid))\n"
        "sys.exit(3)"
    )

    processes.run_part(part("all"), python(code), tmp_path / "rows.jsonl", {**os.environ})

    (row,) = rows.read(tmp_path / "rows.jsonl")
    assert row["reason"] == "exit code 3"
    child = int(started.read_text())
    until = time.monotonic() + 5
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.01)
    running = is_running(child)
    if running:
        os.kill(child, signal.SIGKILL)
    assert not running


def is_running(process: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


# Trees


@pytest.mark.parametrize("tree", trees.TREES)
def test_a_trees_leaves_read_one_node_of_every_level(tree: str) -> None:
    layout = trees.layout_of(tree)
    counts, lengths = ([int(word) for word in half.split(",")] for half in tree.split("/"))

    assert layout.rows == counts[-1] and len(layout.levels) == len(counts)
    for level, count, length in zip(layout.levels, counts, lengths, strict=True):
        assert level.kv_indptr.tolist() == [node * length for node in range(count + 1)]
        ends = level.qo_indptr.tolist()
        assert ends[0] == 0 and ends[-1] == layout.rows and ends == sorted(set(ends))
    slots = torch.cat([level.kv_indices for level in layout.levels])
    assert slots.tolist() == list(range(len(slots)))


def test_the_floor_of_a_tree_is_that_of_the_tables() -> None:
    shape = trees.AttentionShape(32, 8, 128, 128, 128**-0.5)
    machine = floors.H200
    assert trees.floor_us(trees.layout_of("1,4,8,256/8,256,256,32"), shape, machine) == (
        pytest.approx(10.7, abs=0.05)
    )
    assert trees.floor_us(trees.layout_of("1,1024/2048,32"), shape, machine) == (
        pytest.approx(44.2, abs=0.1)  # of operations
    )


def test_trees_are_timed_compared_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = rows.Job("trees", "all", "cpu", tmp_path / "rows.jsonl", 60, 1)
    trees.run(job)
    found = rows.read(job.out)
    assert [row["ok"] for row in found[:-1]] == [True] * len(trees.HEADS) * len(trees.SMALL_TREES)
    assert found[-1]["predicted"] == {"times_as_fast": "at least 1.25"}
    assert "geometric mean" in report.trees(found)

    wrong = RowwiseAttention.run
    monkeypatch.setattr(RowwiseAttention, "run", lambda *given: (1.1 * wrong(*given)[0], None))
    trees.run(job)
    assert not any(row["ok"] for row in rows.read(job.out)[len(found) : -1])


def test_the_last_level_by_the_decode_kernel_is_a_row_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, _ = standin.install(monkeypatch)
    job = rows.Job("trees", "all", "cpu", tmp_path / "rows.jsonl", 60, 1)
    layout = trees.layout_of("1,2,6/8,16,3")
    shape = trees.AttentionShape(8, 2, 64, 64, 0.125)
    torch.manual_seed(0)
    q, *kv = (torch.randn(size).bfloat16() for size in ((6, 8, 64), (58, 2, 64), (58, 2, 64)))
    base = trees.timed(RowwiseAttention(), layout, shape, (q, *kv))
    plans: list[Any] = []
    plan = standin.DecodeWrapper.plan
    monkeypatch.setattr(
        standin.DecodeWrapper, "plan", lambda *given, **named: plans.append(plan(*given, **named))
    )

    def row(wanted: trees.Timed) -> dict[str, Any]:
        backend = trees.DecodeLast(CPU)
        trees.by_decoding(job, "tree", backend, layout, shape, (q, *kv), wanted)
        return rows.read(job.out)[-1]

    assert row(base)["ok"] is True and plans
    assert "decode kernel, us" in report.trees(rows.read(job.out))
    assert row(replace(base, out=1.1 * base.out))["ok"] is False
    monkeypatch.delattr(package, "BatchDecodeWithPagedKVCacheWrapper")
    assert row(base)["status"] == rows.NOT_AVAILABLE


# Without FlashInfer


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(environment, "versions", lambda device: {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)


@pytest.mark.usefixtures("without_flashinfer")
def test_where_flashinfer_is_not_installed_the_others_pass(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for stage, name in ((environment, "all"), (attention, "flashinfer")):
        job = rows.Job(stage.__name__.split(".")[1], name, "cuda", out, 60, 1)
        with job.checking("stage"):
            stage.run(job)
    with job.checking("stage"):
        engines.make_engine(None, engines.Variant(), "flashinfer")
    with job.checking("stage"):
        engines.make_engine(None, engines.Variant(flashinfer=True))
    found = rows.read(out)

    missing = [row for row in found if row.get("status") == rows.NOT_AVAILABLE]
    assert [row["reason"] for row in missing] == ["flashinfer is not installed"] * 4
    assert not [row for row in found if row.get("ok") is False]
    rows.append(out, {"stage": "attention", "backend": "triton", "ok": True})
    for required, passes in (("triton", True), ("flashinfer", False)):
        reasons = processes.verdict(rows.read(out), required, gpu_check.CHECKING)
        assert (not reasons) is passes


def test_trees_are_timed_by_the_backends_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = attention.backend_of

    def backend_of(name: str, device: torch.device) -> Any:
        if name in missing:
            raise rows.NotAvailable(name)
        return made(name, device)

    monkeypatch.setattr(attention, "backend_of", backend_of)
    job = rows.Job("trees", "all", "cpu", tmp_path / "rows.jsonl", 60, 1)

    missing = {"rowwise"}
    trees.run(job)
    first, *found = rows.read(job.out)
    assert first["status"] == rows.NOT_AVAILABLE
    assert len(found) == len(trees.HEADS) * len(trees.SMALL_TREES)
    assert all(row["tree_us"] > 0 and "ok" not in row for row in found)
    assert "two launches, us" in report.trees(found)

    missing = {"rowwise", "torch"}
    trees.run(job)
    assert len(rows.read(job.out)) == 1 + len(found) + 2


def test_problems_together_are_timed_by_the_wall_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bench_concurrency.clock() == ("cpu_s", time.thread_time)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench_concurrency.clock() == ("wall_s", time.perf_counter)


# Floors: milliseconds on an H200 for 1, B, 16, 64 and 256 leaves


# Predictions and tables


@pytest.fixture(autouse=True)
def path_is_kept() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
