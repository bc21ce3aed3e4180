"""RecordedEvents: every event in memory, in order, packed, up to its limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_run import fake_run

from arbor.run.listeners import PACK_EVENTS, RecordedEvents


def ticking() -> Iterator[float]:
    second = 100.0
    while True:
        yield second
        second += 0.5


def recorded(count: int, most_bytes: int = 2**20) -> RecordedEvents:
    """A recording of the first events of a made-up run, repeated, half a second apart."""
    events = list(fake_run(seed=1))
    recording = RecordedEvents(most_bytes, iter(ticking()).__next__)
    for number in range(count):
        recording(events[number % len(events)])
    return recording


@pytest.mark.parametrize("count", [0, 1, PACK_EVENTS - 1, PACK_EVENTS, 3 * PACK_EVENTS + 7])
@pytest.mark.parametrize("closed", [False, True])
def test_events_come_back_as_they_were(count: int, closed: bool) -> None:
    events = list(fake_run(seed=1))
    recording = recorded(count)
    if closed:
        recording.close()

    for _ in range(2):
        kept = list(recording)
        assert kept == [(0.5 * n, events[n % len(events)]) for n in range(count)]
    assert recording.events == count and recording.whole


def test_beyond_the_limit_nothing_is_kept_and_events_are_counted() -> None:
    whole = recorded(3 * PACK_EVENTS)
    most = whole.bytes

    assert recorded(3 * PACK_EVENTS, most).whole
    beyond = recorded(5 * PACK_EVENTS, most)
    beyond.close()

    assert not beyond.whole and list(beyond) == [] and beyond.bytes == 0
    assert beyond.events == 5 * PACK_EVENTS
