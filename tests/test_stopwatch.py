"""Seconds of work on a device: what its queue took, not what queueing it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models import Words, build
from support.trees import LENGTH, PROMPT, SAMPLED, Lab

from arbor.engine import forward_pass
from arbor.engine.forward_pass import Stopwatch
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Forwarded
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

CUDA = torch.device("cuda")
FORWARD_S = 2.0
SAMPLING_S = 0.5


class Device:
    """A device with a queue of work and a clock of its own; the host's work takes it no time.

    Attributes:
        clock: seconds it has worked.
        queue: seconds of each piece of work it has not done, and events between them.
        waits: how often the host waited for it.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.queue: list[float | Event] = []
        self.waits = 0

    def work(self, until: Event | None = None) -> None:
        """Do what is queued, up to an event or all of it."""
        while self.queue:
            first = self.queue.pop(0)
            if isinstance(first, Event):
                first.time = self.clock
                if first is until:
                    break
            else:
                self.clock += first


class Event:
    """The part of `torch.cuda.Event` that is used."""

    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "without timing an event has no time"
        self.time: float | None = None

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda"
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.time is not None

    def synchronize(self) -> None:
        self.device.waits += self.time is None
        self.device.work(self)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self.time is not None and end.time is not None, "not ready"
        return 1e3 * (end.time - self.time)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A stand-in for the GPU."""
    device = Device()
    monkeypatch.setattr(Event, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: f"stream of {where}")
    yield device


@pytest.fixture
def lab(device: Device, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """An engine whose forwards and choices also occupy the stand-in; choosing reads the tokens."""
    monkeypatch.setattr(forward_pass, "Stopwatch", lambda _: Stopwatch(CUDA))
    lab = Lab(build("llama"))

    def occupying(work: Callable[..., Any], seconds: float, *, reads: bool) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            device.queue.append(seconds)
            if reads:
                device.work()
            return work(*args, **kwargs)

        return called

    monkeypatch.setattr(
        lab.runner, "forward", occupying(lab.runner.forward, FORWARD_S, reads=False)
    )
    monkeypatch.setattr(
        lab._source, "choose", occupying(lab._source.choose, SAMPLING_S, reads=True)
    )
    return lab


def test_on_a_cpu_seconds_are_those_of_its_clock() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        watch.stop(watch.start())
    assert watch.take() > 0
    assert watch.take() == 0


def test_the_engine_reports_the_device_s_seconds_of_every_kind_of_forward(
    lab: Lab, device: Device
) -> None:
    tree = lab.plant()
    children = lab.sprout([(tree.root, 2)])
    lab.memory.evict(tree.root, tree.root.span.resident.nonzero()[0])
    lab.state.changed([tree.root])
    lab.extend(children[0])
    lab.ask(children, [(7,), (8,)])

    found = [(e.kind, e.elapsed_s) for e in lab.events if isinstance(e, Forwarded)]
    decoded = LENGTH * (FORWARD_S + SAMPLING_S)
    assert found == [
        ("prefill", pytest.approx(FORWARD_S)),
        ("decode", pytest.approx(decoded)),
        ("rehydrate", pytest.approx(FORWARD_S)),
        ("verify", pytest.approx(FORWARD_S)),
    ]
    # one for each report: no decode step waits for its own end
    assert device.waits <= len(found)


def test_the_seconds_of_a_forward_are_divided_among_its_rows(lab: Lab) -> None:
    heard: dict[ThoughtTree, list[Any]] = {ThoughtTree(PROMPT[begin:]): [] for begin in (0, 3, 6)}
    first, second, late = heard
    for tree, events in heard.items():
        lab.open(tree, 200, alone=False, pool=200, emit=events.append)
    stop = StopRule(Words(), BlockLimits((), LENGTH, 8), ())
    growing = [
        lab.begin_grow([(tree.root, width)], Growth(3, SAMPLED, stop))
        for tree, width in ((first, 1), (second, 3))
    ]
    for _ in range(3):
        lab.step()
    lab.begin_extend(late.root)
    while lab.busy:
        lab.step()

    assert all(operation.done for operation in growing)
    seconds = {
        tree: {e.kind: e.elapsed_s for e in events if isinstance(e, Forwarded)}
        for tree, events in heard.items()
    }
    both = first.root.end + second.root.end
    assert seconds[first]["prefill"] == pytest.approx(FORWARD_S * first.root.end / both)
    assert seconds[second]["prefill"] == pytest.approx(FORWARD_S * second.root.end / both)
    # it joined the four rows that decode
    share = FORWARD_S / (4 + late.root.end)
    assert seconds[late] == {"prefill": pytest.approx(share * late.root.end)}
    decoded = LENGTH * (FORWARD_S + SAMPLING_S) - share * late.root.end
    assert seconds[first]["decode"] == pytest.approx(decoded / 4)
    assert seconds[second]["decode"] == pytest.approx(decoded * 3 / 4)
