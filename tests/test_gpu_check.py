"""`scripts/gpu_check.py`: faulty attention and faulty engines fail it, faulty stages do not stop
it, and its floors and tables are right. Nothing here needs a GPU."""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_bundle  # noqa: E402
import gpu_check  # noqa: E402
from gpu_stages import (  # noqa: E402
    agreement,
    attention,
    decode,
    engines,
    floors,
    host,
    predictions,
    processes,
    report,
    rows,
)
from gpu_stages.table import numbers  # noqa: E402

from arbor.engine.engine import Engine  # noqa: E402
from arbor.kernels.attention.reference import ReferenceAttention  # noqa: E402
from arbor.kernels.attention.torch_cascade import TorchCascade  # noqa: E402
from arbor.kernels.native import without_native  # noqa: E402

CPU = torch.device("cpu")


# Attention


@pytest.mark.parametrize("case", attention.cases(small=True), ids=lambda case: case.name)
def test_the_float64_result_is_the_reference(case: attention.Case) -> None:
    problem = attention.problem_of(case, 3, CPU)
    backend = ReferenceAttention()
    plan = backend.plan(problem.layout, problem.shape)

    out, lse = backend.run(
        plan, problem.q.double(), problem.k.double(), problem.v.double(), problem.sinks
    )

    assert torch.allclose(out, problem.out, atol=1e-12)
    assert torch.allclose(lse.double(), problem.lse, atol=1e-5)  # a float32 number
    mass = backend.mass(plan, problem.q.double(), problem.k.double(), lse)
    assert torch.allclose(mass.double(), problem.mass, rtol=1e-4, atol=1e-5)


def test_a_device_is_checked_with_backends_that_run_on_it() -> None:
    cuda = attention.backends_of("rowwise", torch.device("cuda"))
    cpu = attention.backends_of("rowwise", CPU)
    assert cuda[0] == cpu[0] == "rowwise"
    assert "invariant" in cuda and "native" not in cuda
    assert "native" in cpu and "invariant" not in cpu
    assert attention.backends_of("flashinfer", torch.device("cuda")) == ["flashinfer"]


@pytest.mark.parametrize("wrong", [lambda mass: 1.02 * mass, lambda mass: mass.roll(1)])
def test_attention_mass_of_the_wrong_size_or_slot_fails(wrong: Any) -> None:
    class Other(TorchCascade):
        def mass(self, *args: Any, **kwargs: Any) -> Any:
            return wrong(super().mass(*args, **kwargs))

    problem = attention.problem_of(attention.cases(small=True)[0], 5, CPU)
    assert attention.errors(TorchCascade(), problem, problem.layout)["ok"]
    found = attention.errors(Other(), problem, problem.layout)
    assert not found["ok"] and found["mass_error"] > 0.01


@pytest.mark.parametrize("case", attention.cases(small=True)[::5], ids=lambda case: case.name)
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


def test_attention_that_reads_an_unused_slot_fails() -> None:
    problem = attention.problem_of(attention.cases(small=True)[0], 5, CPU)
    used = {int(slot) for level in problem.layout.levels for slot in level.kv_indices}
    unused = next(slot for slot in range(len(problem.k)) if slot not in used)
    problem.layout.levels[0].kv_indices[0] = unused

    found = attention.errors(TorchCascade(), problem, problem.layout)

    assert found["ok"] is False and found["error"] is None


def test_the_short_lists_have_every_kind_of_request() -> None:
    shapes = {(case.shape.group, case.shape.head_dim_qk) for case in attention.cases(small=False)}
    assert shapes >= set(itertools.product((1, 2, 4, 5, 7, 8), (64, 128, 256)))
    lengths, rows = set(), set()
    for seed in range(10):
        problem = attention.problem_of(attention.cases(small=True)[0], seed, CPU)
        for level in problem.layout.levels:
            lengths |= set(level.kv_indptr.diff().tolist())
            rows |= set(level.qo_indptr.diff().tolist())
        assert problem.k.isnan().any()
    assert {0, 1} < lengths and max(lengths) <= attention.LONGEST
    assert {1, 2} < rows


def test_the_bundle_has_the_kernel_of_every_case() -> None:
    kernels = set(gpu_bundle.KERNELS.values())
    for case in attention.cases(small=False):
        one = case.shape
        assert (
            gpu_bundle.Kernel(one.head_dim_qk, one.window is not None, one.softcap is not None)
            in kernels
        ), case.name


# The engine


@pytest.fixture(scope="module")
def exact() -> Any:
    return engines.random_model(floors.TINY, CPU).float()


@pytest.fixture
def engine(exact: Any) -> Engine:
    model = engines.random_model(floors.TINY, CPU)
    return engines.make_engine(model, engines.Variant("on"), "torch", policy="lru", debug=True)


SMALL_SLOTS = agreement.PROMPT + 4 * agreement.BLOCK


def test_an_engine_that_agrees_passes(engine: Engine, exact: Any) -> None:
    full = agreement.agreement(engine, exact, 4096)
    small = agreement.agreement(engine, exact, SMALL_SLOTS)

    assert full["ok"] and small["ok"]
    assert full["recomputed"] == 0 < small["recomputed"]


@pytest.mark.parametrize("wrong", [lambda logits: logits + 1, lambda logits: logits * math.nan])
def test_an_engine_with_other_logits_fails(
    engine: Engine, exact: Any, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]
) -> None:
    ask = Engine.ask
    monkeypatch.setattr(Engine, "ask", lambda *given: wrong(ask(*given)))

    assert agreement.agreement(engine, exact, 4096)["ok"] is False


def test_an_engine_that_chooses_other_tokens_fails(
    engine: Engine, exact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.runner.forward

    def reversed_logits(*given: Any, **settings: Any) -> Any:
        result = forward(*given, **settings)
        return SimpleNamespace(logits=-result.logits, mass=None)

    monkeypatch.setattr(engine.runner, "forward", reversed_logits)

    assert agreement.agreement(engine, exact, 4096)["gap"] > 10 * agreement.GAP


# Processes


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def writes(out: Path, **content: Any) -> str:
    return f"open({str(out)!r}, 'a').write({rows.json.dumps(content)!r} + '\\n')\n"


def part(name: str, limit_s: float = 60) -> processes.Part:
    return processes.Part(2, "attention", name, limit_s)


def test_parts_that_fail_hang_or_die_lose_no_rows_and_stop_nothing(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    first = writes(out, name="first")
    commands = [
        (part("fails"), python(first + "raise SystemExit(3)")),
        (part("hangs", 2), python(first + "import time\ntime.sleep(60)")),
        (part("dies"), python(first + "import os\nos.abort()")),
        (part("works"), python(first)),
    ]

    processes.run_all(commands, out, {})

    found = rows.read(out)
    ends = {row["part"]: row for row in found if row["name"] == "process"}
    assert [row["name"] for row in found] == ["first", "process"] * 4
    assert {name: row["ok"] for name, row in ends.items()} == {
        "fails": False,
        "hangs": False,
        "dies": False,
        "works": True,
    }
    assert ends["fails"]["reason"] == "exit code 3"
    assert ends["hangs"]["reason"] == "killed after 2 s"
    assert ends["dies"]["reason"] == "died of SIGABRT"


@pytest.mark.slow
def test_what_a_part_started_ends_with_it(tmp_path: Path) -> None:
    out, late = tmp_path / "rows.jsonl", tmp_path / "late"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(late)!r}).touch()"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"

    processes.run_part(part("hangs", 1), python(code), out, {})
    time.sleep(3)

    assert not late.exists()


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


def checked(backend: str, ok: bool = True, stage: str = "attention") -> dict[str, Any]:
    return {"stage": stage, "part": "all", "name": backend, "backend": backend, "ok": ok}


def test_only_a_check_of_flashinfer_itself_passes_on_cuda(run: Callable[..., int]) -> None:
    assert run(checked("flashinfer")) == 0
    assert run(checked("torch")) == 1  # rows of the run before do not count
    assert run(checked("flashinfer"), checked("torch", ok=False)) == 1
    assert run(checked("flashinfer", stage="decode")) == 1
    assert run() == 1


def test_another_backend_can_be_required(run: Callable[..., int]) -> None:
    assert run(checked("torch"), require="torch") == 0
    assert run(require="none") == 0
    assert run(checked("torch", ok=False), require="none") == 1


def test_without_a_gpu_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(gpu_check, "has_cuda", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out)])

    assert gpu_check.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "wrong", ["--stages 1,9", "--stages all", "--bundle missing", "--report missing"]
)
def test_invalid_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *wrong.split()])

    with pytest.raises(SystemExit) as refused:
        gpu_check.main()

    assert refused.value.code == 2


def test_the_limits_are_under_nine_minutes_and_every_part_can_run() -> None:
    assert sum(part.limit_s for part in gpu_check.PARTS) <= 9 * 60 - 15
    for part in gpu_check.PARTS:
        assert (ROOT / "scripts/gpu_stages" / f"{part.stage}.py").is_file()
    assert {part.number for part in gpu_check.PARTS} == set(range(1, 8))


def test_a_bundle_comes_first_and_compiles_nothing(tmp_path: Path) -> None:
    found = gpu_check.environment(tmp_path, "cuda")

    assert found["PYTHONPATH"].split(":")[:2] == [str(tmp_path), str(ROOT)]
    assert found["FLASHINFER_DISABLE_JIT"] == "1"


def test_a_part_that_raises_or_warns_leaves_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: rows.Job) -> None:
        logging.getLogger("arbor.model").warning("decode steps run without CUDA graphs: %s", "x")
        raise RuntimeError("no CUDA")

    out = tmp_path / "rows.jsonl"
    handlers = list(logging.getLogger("arbor").handlers)
    monkeypatch.setattr(attention, "run", broken)
    monkeypatch.setattr(logging.getLogger("arbor"), "handlers", handlers)
    given = ["--part", "attention.torch", "--device", "cpu", "--out", str(out), "--seconds", "9"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *given])

    assert gpu_check.main() == 0

    warning, failure = rows.read(out)
    assert warning["reason"] == "decode steps run without CUDA graphs: x" and "ok" not in warning
    assert failure["ok"] is False and failure["reason"] == "RuntimeError: no CUDA"


# Rows


@pytest.fixture
def job(tmp_path: Path) -> rows.Job:
    return rows.Job("attention", "torch", "cpu", tmp_path / "rows.jsonl", 60.0, 0)


def test_a_check_that_raises_becomes_a_row(job: rows.Job) -> None:
    with job.checking("broken", backend="torch"):
        raise ValueError("no such kernel")
    with job.checking("absent"):
        raise rows.NotAvailable("no option cuda_graphs")
    job.row("fine", predicted={"wall_ms": predictions.Range(high=2)}, wall_ms=1.23456, ok=True)
    job.end(["late"])

    broken, absent, fine, late = rows.read(job.out)
    assert broken["ok"] is False and broken["backend"] == "torch"
    assert broken["reason"] == "ValueError: no such kernel" and "raise" in broken["traceback"]
    assert absent["status"] == "not available" and "ok" not in absent
    assert fine["wall_ms"] == 1.235 and fine["predicted"] == {"wall_ms": "at most 2"}
    assert fine["as_predicted"] == {"wall_ms": True}
    assert late["status"] == "skipped"


def test_no_further_check_begins_once_the_time_is_up(job: rows.Job) -> None:
    job.seconds = 0.0

    attention.run(job)

    found = rows.read(job.out)
    assert len(found) == len(attention.cases(small=True))
    assert {row["status"] for row in found} == {"skipped"}


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"name": "first"}\n{"name": "sec', encoding="utf-8")

    assert rows.read(out) == [{"name": "first"}]


# Floors: milliseconds on an H200 for 1, B, 16, 64 and 256 leaves


@pytest.mark.parametrize(
    ("model", "tree", "shared"),
    [
        ("llama-3.1-8b", "config-s", {1: 3.55, 3: 3.55, 16: 3.63, 64: 3.91}),
        ("llama-3.1-8b", "config-l", {1: 3.55, 5: 3.57, 16: 3.62, 64: 3.85, 256: 5.21}),
        ("qwen2.5-7b", "config-s", {1: 3.31, 3: 3.32, 16: 3.35, 64: 3.47}),
        ("qwen2.5-7b", "config-l", {1: 3.32, 5: 3.32, 16: 3.35, 64: 3.45, 256: 4.85}),
    ],
)
def test_floors_are_those_of_the_design(model: str, tree: str, shared: dict[int, float]) -> None:
    for leaves, floor_ms in shared.items():
        found = floors.tree_floor_ms(floors.MODELS[model], floors.TREES[tree], leaves, floors.H200)
        assert found == pytest.approx(floor_ms, abs=0.006)


def test_floors_without_sharing_are_those_of_the_design() -> None:
    llama = floors.LLAMA_8B
    assert llama.kv_bytes == 128 << 10 and floors.QWEN_7B.kv_bytes == 56 << 10
    assert 2 * llama.weights_read == pytest.approx(15.01e9, rel=1e-3)
    assert floors.CONFIG_S.unique_tokens(64) == 13_696
    assert floors.CONFIG_L.unique_tokens(256) == 42_752
    for tree, leaves, floor_ms in (
        (floors.CONFIG_S, 64, 6.99),
        (floors.CONFIG_L, 64, 7.49),
        (floors.CONFIG_L, 256, 19.5),
    ):
        found = floors.unshared_floor_ms(llama, tree, leaves, floors.H200)
        assert found == pytest.approx(floor_ms, abs=0.04)


def test_the_weights_that_are_counted_are_the_models() -> None:
    model = engines.random_model(floors.TINY, CPU)
    embedding = model.get_input_embeddings().weight.numel()

    counted = sum(weight.numel() for weight in model.parameters()) - embedding

    assert floors.TINY.weights_read == counted


# Trees, steps and kernels


@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_the_planted_tree_has_the_shape(engine: Engine, leaves: int) -> None:
    tree = floors.SMALL

    children = engines.plant(engine, tree, leaves, tree.block, 8, floors.TINY.vocabulary)

    parents = [child.parent for child in children]
    assert len(children) == leaves and all(parent is not None for parent in parents)
    assert {parent.end for parent in parents if parent} == {tree.path_tokens}
    assert engine.memory.used == tree.unique_tokens(leaves)


def test_the_stopwatch_counts_only_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 0.001)  # two looks at the clock per step
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(ticks))
    watch = decode.Stopwatch(decode.Steps(warm=2, timed=3, profiled=1), cuda=False)

    for _ in range(9):
        assert watch() is False

    assert watch.wall_ms == pytest.approx([1.0, 1.0, 1.0])


def test_kernels_are_summed_per_step() -> None:
    def event(name: str, us: float, cuda: bool) -> Any:
        kind = decode.DeviceType.CUDA if cuda else decode.DeviceType.CPU
        return SimpleNamespace(
            name=name, device_type=kind, time_range=SimpleNamespace(elapsed_us=lambda: us)
        )

    found = decode.kernels(
        [
            event("gemm", 3000, True),
            event("gemm", 1000, True),
            event("attention", 500, True),
            event("cudaGraphLaunch", 9, False),
            event("cudaLaunchKernel", 9, False),
            event("cudaDeviceSynchronize", 900, False),
        ],
        steps=2,
    )

    assert found == {
        "busy_ms": 2.25,
        "kernels": 2,
        "launches": 1,
        "longest": [["gemm", 2.0], ["attention", 0.25]],
    }


def test_a_part_within_another_counts_for_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])
    clock = host.Clock()

    def spend(seconds: float) -> None:
        now[0] += seconds

    def outer() -> None:
        spend(1.0)
        clock.around("attention", spend)(2.0)
        spend(4.0)

    spend(8.0)
    clock.around("model", outer)()
    spend(16.0)

    assert clock.seconds == {"model": 5.0, "attention": 2.0}


def test_every_part_of_a_step_on_the_host_is_found() -> None:
    model = engines.random_model(floors.TINY, CPU)
    shipped = decode.Cell("tiny", "small", 4, engines.Variant())
    before = host.planning()

    with without_native():  # which calls the attention of all layers at once
        found = host.host_parts(shipped, model, decode.Steps(2, 3, 0), CPU)

    for name in ("plan", "backend_plan", "model", "attention", "sampling", "waiting"):
        assert 0 < found[f"{name}_ms"] < found["wall_ms"], name
    assert [getattr(*place) for place in before] == [getattr(*place) for place in host.planning()]
    assert not any("timed" in getattr(*place).__qualname__ for place in before)


def test_settings_that_the_code_lacks_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "accepts", lambda maker, setting: False)

    with pytest.raises(rows.NotAvailable, match="cuda_graphs"):
        engines.make_engine(None, engines.Variant(graphs=True))


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_are_switched_by_the_solver(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    given: dict[str, Any] = {}

    def solver(model: Any, **settings: Any) -> Any:
        given.update(settings)
        return SimpleNamespace(engine=SimpleNamespace())

    monkeypatch.setattr(engines, "Solver", solver)
    monkeypatch.setattr(engines, "accepts", lambda maker, setting: maker is solver)

    engines.make_engine(None, engines.Variant(graphs=graphs))

    assert given["cuda_graphs"] is graphs


@pytest.mark.parametrize("number", [None, 0, 2])
def test_a_cell_that_asks_for_graphs_is_measured_only_if_there_are_some(
    engine: Engine, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "captured", lambda engine: number)
    monkeypatch.setattr(decode, "make_engine", lambda model, variant: engine)
    wanted = decode.Cell("tiny", "small", 2, engines.Variant(graphs=True))
    steps = decode.Steps(1, 2, 0)

    if number == 0:
        with pytest.raises(rows.NotAvailable, match="captured"):
            decode.measure(wanted, None, steps, CPU)
    else:
        assert decode.measure(wanted, None, steps, CPU)["graphs"] == number


@pytest.mark.parametrize(
    ("graphs", "number"),
    [(None, None), (SimpleNamespace(buckets=()), 0), (SimpleNamespace(buckets=(1, 2)), 2)],
)
def test_captured_graphs_are_counted(graphs: Any, number: int | None) -> None:
    runner = SimpleNamespace(graphs=graphs)
    stand_in: Any = SimpleNamespace(runner=runner)

    assert engines.captured(stand_in) == number


# Predictions and tables


@pytest.fixture(scope="module")
def cell_names() -> set[str]:
    parts = ("llama", "transformers", "qwen")
    return {cell.name for part in parts for cell in decode.cells(part, small=False)}


def test_every_prediction_is_of_something_that_is_measured(cell_names: set[str]) -> None:
    assert set(predictions.CELLS) | set(predictions.HOST) <= cell_names
    assert set(predictions.RATIOS) <= {one.name for one in report.COMPARISONS}
    for one in report.COMPARISONS:
        assert {f"llama-3.1-8b {rest}" for rest in (one.slower, one.faster)} <= cell_names


def test_predicted_floors_are_computed_ones() -> None:
    for name, expected in predictions.CELLS.items():
        model, tree, leaves, _ = name.split()
        found = floors.tree_floor_ms(
            floors.MODELS[model], floors.TREES[tree], int(leaves), floors.H200
        )
        assert found in expected["floor_ms"]
        if "of_floor" in expected:
            most = expected["of_floor"].high * found
            assert expected["wall_ms"].high == pytest.approx(most, abs=0.05)


def test_all_leaves_trees_sharings_and_graphs_are_measured(cell_names: set[str]) -> None:
    for model, tree, leaves, sharing, graphs in itertools.product(
        ("llama-3.1-8b", "qwen2.5-7b"),
        ("config-s", "config-l"),
        (1, 8, 64, 256),
        ("shipped", "on", "off"),
        ("", "+graphs"),
    ):
        assert f"{model} {tree} {leaves} {sharing}{graphs}" in cell_names


def cell(variant: str, **numbers: float) -> dict[str, Any]:
    name = f"llama-3.1-8b config-s 64 {variant}"
    return {"stage": "decode", "part": "llama", "name": name, "backend": "flashinfer", **numbers}


MEASURED = (
    {
        "stage": "environment",
        "part": "all",
        "name": "versions",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": None,
    },
    {**checked("flashinfer"), "error": 0.003, "lse_error": 1e-5},
    {**checked("flashinfer", ok=False), "name": "sinks", "error": 0.3, "lse_error": 0.1},
    {**checked("flashinfer", stage="agreement"), "error": 0.01},
    cell("on+graphs", wall_ms=5.0, floor_ms=4.0, of_floor=1.25, busy_ms=4.9),
    cell("off+graphs", wall_ms=8.0, floor_ms=4.0, of_floor=2.0),
    {"stage": "decode", "part": "llama", "name": "late", "status": "skipped", "reason": "time"},
)


def test_the_tables_show_measured_predicted_floor_and_ratio() -> None:
    text = report.render(MEASURED)

    assert "Machine: device NVIDIA H200, torch 2.11.0." in text
    assert "| attention | flashinfer | 2 | 1 | 0.3 | 0.1 |" in text
    assert "- failed: attention all, sinks: error 0.3, lse_error 0.1" in text
    assert "| llama-3.1-8b config-s 64 on+graphs | flashinfer | 5 | 4 | 1.25 | 4.9 |" in text
    ratio = "| llama-3.1-8b | sharing off / on, config-s 64, graphs | 1.6 | at least 1.4 |"
    assert ratio in text
    assert "- skipped: decode llama, late: time" in text


@pytest.mark.parametrize("ok", [None, False])
def test_without_agreement_no_speed_is_reported(ok: bool | None) -> None:
    kept = [row for row in MEASURED if row["stage"] != "agreement"]
    if ok is False:
        kept.append({**checked("flashinfer", ok=False, stage="agreement"), "error": 0.04})

    text = report.render(kept)

    assert report.NO_CLAIMS in text
    assert "on+graphs" not in text


def test_a_file_is_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    for row in MEASURED:
        rows.append(out, row)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--report", str(out)])

    assert gpu_check.main() == 0
    assert capsys.readouterr().out == report.render(MEASURED) + "\n"


def test_numbers_of_a_run_are_appended_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, table = tmp_path / "rows.jsonl", tmp_path / "gpu.csv"
    for row in MEASURED:
        rows.append(out, row)
    words = ["--report", str(out), "--csv", str(table), "--machine", "h200", "--commit", "abc1234"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--stages", "4,5"])

    assert gpu_check.main() == 0

    with table.open(encoding="utf-8", newline="") as lines:
        found = list(csv.DictReader(lines))
    named = {(row["stage"], row["cell"], row["number"]): row["value"] for row in found}
    assert named["decode", "llama-3.1-8b config-s 64 on+graphs", "wall_ms"] == "5.0"
    assert {(row["commit"], row["machine"]) for row in found} == {("abc1234", "h200")}
    assert {row["command"] for row in found} == {"gpu_check.py --stages 4,5"}
    assert [row for row in found if row["stage"] == "agreement" and row["number"] == "passed"]
    wrong = [{**row, "ok": False} if row["stage"] == "agreement" else row for row in MEASURED]
    assert not [row for row in numbers(wrong) if row["stage"] == "decode"], "no speed claims"


@pytest.fixture(autouse=True)
def path_is_kept() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
