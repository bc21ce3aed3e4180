"""Modules of Triton kernels, imported where they are needed alone."""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)


def triton_module(name: str, what: str) -> Any:
    """A module of this folder that imports triton; None without Triton, or, with a warning, where
    it cannot be imported.

    Args:
        name: of the module.
        what: is not used then, as the warning says it.

    Example:
        >>> triton_module("no_such_module", "an example") is None
        True
    """
    if find_spec("triton") is None:
        return None
    try:
        return importlib.import_module(f"arbor.kernels.{name}")
    except Exception as error:  # a damaged installation fails in any way
        logger.warning("no kernels for %s: %s: %s", what, type(error).__name__, error)
        return None
