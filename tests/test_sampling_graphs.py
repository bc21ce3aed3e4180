"""Draws by CUDA graphs, on a tape of tensor operations: the same tokens, checked on first use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.graph_tape import Tape
from test_invariant_triton import run_check
from torch import Tensor

from arbor.engine import sampling_graphs
from arbor.engine.sampling import drawn, sample
from arbor.engine.sampling_graphs import SamplingGraphs
from arbor.model.graphs import Recording
from arbor.model.sampling_params import Sampling

VOCABULARY = 2000
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, top_p=1.0),
    Sampling(temperature=1.3, top_k=40, top_p=0.95),
    Sampling(temperature=3.0, top_p=0.999),  # needs more tokens than are examined first
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is captured when it is first met."""
    monkeypatch.setattr(sampling_graphs, "PATIENCE", 0)


def rows_of(count: int, seed: int) -> tuple[Tensor, list[float]]:
    """Random logits, some impossible, and numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, VOCABULARY, generator=generator)
    logits[0, 7:] = -torch.inf
    return logits, torch.rand(count, generator=generator).double().tolist()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draws_by_graphs_are_those_without(sampling: Sampling) -> None:
    tape = Tape()
    graphs = SamplingGraphs(tape)
    for seed, count in enumerate((3, 5, 4, 3, 13, 16, 1)):
        logits, numbers = rows_of(count, seed)

        found = sample(logits, numbers, sampling, graphs.draw)

        assert found == sample(logits, numbers, sampling, drawn)
    assert sorted(bucket.rows for bucket in graphs.buckets) == [1, 4, 8, 16]
    assert tape.recorded == 4 and tape.replays == 7


def test_a_bucket_is_captured_after_some_draws_and_the_least_used_graph_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling_graphs, "PATIENCE", 2)
    monkeypatch.setattr(sampling_graphs, "MOST_GRAPHS", 2)
    tape = Tape()
    graphs = SamplingGraphs(tape)

    def draw(count: int) -> None:
        sample(*rows_of(count, count), Sampling(), graphs.draw)

    for expected in (0, 0, 1, 1):
        draw(4)
        assert tape.recorded == expected
    for count in (8, 8, 8, 4, 16, 16, 16):
        draw(count)
    assert [bucket.rows for bucket in graphs.buckets] == [4, 16]


def test_a_capture_that_fails_ends_the_use_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        tried = 0

        def record(self, step: Callable[[], None]) -> Recording:
            self.tried += 1
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    recorder = Refusing()
    graphs = SamplingGraphs(recorder)

    for count in (3, 3, 9):
        logits, numbers = rows_of(count, 0)
        found = sample(logits, numbers, Sampling(), graphs.draw)
        assert found == sample(logits, numbers, Sampling(), drawn)

    assert caplog.messages == ["tokens are drawn without CUDA graphs: operation not permitted"]
    assert recorder.tried == 1


@pytest.mark.slow
def test_the_interpreted_kernels_of_the_sums_agree() -> None:
    run_check("row_sums", interpreted=True)


@pytest.mark.slow
def test_the_kernels_of_the_sums_compile_for_hopper() -> None:
    run_check("row_sums_hopper", interpreted=False)
