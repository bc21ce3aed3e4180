"""Stages of reading and loading a model, for the line that shows them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]  # takes a stage in words, and an empty text at the end
_listeners: list[Listener] = []
_shown = ""  # in a notebook


def show(stage: str) -> None:
    """Shows a stage; an empty text ends the last one."""
    for listener in _listeners or [_in_notebook]:
        listener(stage)


@contextmanager
def stage_of(what: str) -> Iterator[None]:
    """Shows that a stage begins, and in the end that it is over, whatever comes between."""
    show(what)
    try:
        yield
    finally:
        show("")


@contextmanager
def showing(listener: Listener) -> Iterator[None]:
    """While it lasts, a listener takes every stage."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _in_notebook(stage: str) -> None:
    """Shows a stage below the cell of a notebook, in the place of the one before."""
    global _shown
    if "ipykernel" not in sys.modules or stage == _shown:
        return
    sys.stderr.write(f"\r{stage:{len(_shown)}}" + ("" if stage else "\r"))
    sys.stderr.flush()
    _shown = stage
