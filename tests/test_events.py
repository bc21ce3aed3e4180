"""Events: frozen, named, JSON-able, and back."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from arbor.events import EVENTS, KV, Event
from arbor.trace.records import from_record
from arbor.trace.write import to_line, to_record

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, JSON-able where the type leaves it open."""
    if hint == dict[str, Any]:
        return st.dictionaries(st.text(max_size=5), json_values, max_size=3)
    if hint == dict[str, float]:
        return st.dictionaries(st.text(max_size=5), integers | finite, max_size=3)
    return st.from_type(hint)


def events_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)})


integers = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(int, integers)
st.register_type_strategy(float, finite)
st.register_type_strategy(str, st.text(max_size=10))
st.register_type_strategy(KV, events_of(KV))


def test_the_union_and_the_table_hold_the_same_events() -> None:
    assert typing.get_args(Event) == EVENTS


@given(event=st.one_of([events_of(kind) for kind in EVENTS]))
def test_an_event_survives_json(event: Event) -> None:
    line = to_line(to_record(event))

    assert from_record(json.loads(line)) == event
