"""The integers of a step, copied to the device at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import flashinfer_standin as standin
from support.models import config_of, random_model
from torch import Tensor

from arbor.kernels import staging
from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade
from arbor.kernels.staging import Staging
from arbor.memory.pool import KVPool
from arbor.model.plan import ForwardPlan, Segment, plan_forward
from arbor.model.runner import ModelRunner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Device:
    """A device whose copies take place when something waits for them.

    Attributes:
        log: "upload", "record" and "wait" in order.
        sizes: bytes of each copy.
        buffers: bytes of each pinned buffer.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []
        self.buffers: list[int] = []
        self._due: list[tuple[Tensor, Tensor]] = []
        device = self

        class Event:
            def record(self, stream: Any) -> None:
                device.log.append("record")

            def synchronize(self) -> None:
                device.log.append("wait")
                device.arrive()

        patch.setattr(staging, "pinned", self._pinned)
        patch.setattr(staging, "upload", self._upload)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)

    def arrive(self) -> None:
        """All copies take place."""
        for host, there in self._due:
            there.copy_(host)
        self._due.clear()

    def _pinned(self, size: int) -> Tensor:
        self.buffers.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def _upload(self, host: Tensor, device: torch.device) -> Tensor:
        assert device == CUDA and host.dtype == torch.uint8
        self.log.append("upload")
        self.sizes.append(host.numel())
        there = torch.full_like(host, 255)
        self._due.append((host, there))
        return there


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def parts(start: int) -> list[Tensor]:
    """Integers of several dtypes and shapes, an empty list among them."""
    return [
        torch.arange(start, start + 3),
        torch.arange(start, start + 5, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        torch.arange(start, start + 6).view(2, 3),
    ]


def test_the_buffer_is_written_only_after_it_was_read(device: Device) -> None:
    sender = Staging(CUDA)
    first = sender.send(parts(1))
    second = sender.send(parts(100))
    device.arrive()

    assert device.log == ["upload", "record", "wait", "upload", "record"]
    assert first[0].tolist() == [1, 2, 3] and second[0].tolist() == [100, 101, 102]
    assert len(device.buffers) == 1


class Eager(Device):
    """A device whose copies take place at once, because what runs next is not in its queue."""

    def _upload(self, host: Tensor, device: torch.device) -> Tensor:
        there = super()._upload(host, device)
        self.arrive()
        return there


def test_a_forward_makes_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key lists of FlashInfer's levels are in it; those planned already are not."""
    standin.install(monkeypatch)
    device = Eager(monkeypatch)
    config = config_of("llama", hidden_size=64, head_dim=64, num_hidden_layers=1)
    runner = ModelRunner(random_model(config).to(torch.bfloat16), FlashInferCascade(CPU))
    pool = KVPool(runner.layer_kv, 8, torch.bfloat16, CPU)
    wanted = runner.forward(prompt(), pool).logits
    assert device.log.count("upload") == 0
    runner._staging = Staging(CUDA)

    plan = prompt()
    for _ in range(2):
        assert torch.equal(runner.forward(plan, pool).logits, wanted)

    assert device.log.count("upload") == 2
    numbers = 3 * 5 * 8 + 2 * 8  # three of the five rows, and the logit rows, of 8 bytes
    keys = 5 * 4
    assert numbers + keys <= device.sizes[0] < numbers + keys + 5 * 16
    assert device.sizes[0] - device.sizes[1] == 32, "the level was planned already"


def prompt() -> ForwardPlan:
    slots = torch.arange(5, dtype=torch.int32).numpy()
    ids = [5, 6, 7, 8, 9]
    return plan_forward([Segment((), ids, torch.arange(5).numpy(), slots, slots, logits=2)])
