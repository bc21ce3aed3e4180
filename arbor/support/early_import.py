"""A module that takes long to import, imported in a thread of its own."""

from __future__ import annotations

import functools
import importlib
import threading
from concurrent.futures import Future


@functools.cache
def early_import(name: str) -> Future[None]:
    """The import of a module, begun by the first call of the process; with its error, if any."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            importlib.import_module(name)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="arbor-import").start()
    return done
