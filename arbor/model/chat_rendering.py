"""transformers' renderer of chat templates, without an import of the whole package.

The package lists all of its models as it is imported, which takes longer than everything else that
a prompt needs. The renderer is in a file of its own that needs two others, so these three are
imported, under another name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "transformers"
ALONE = "arbor_transformers"  # the name of the files that are imported alone
RENDERER = "utils.chat_template_utils"


@functools.cache
def chat_renderer() -> Callable[..., Any]:
    """``render_jinja_template`` of transformers."""
    module = None if PACKAGE in sys.modules else _alone()
    module = module or importlib.import_module(f"{PACKAGE}.{RENDERER}")
    found: Callable[..., Any] = module.render_jinja_template
    return found


def _alone() -> ModuleType | None:
    """The file of the renderer; None where it needs more of the package."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    for name, path in ((ALONE, folder), (f"{ALONE}.utils", folder / "utils")):
        package = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    try:
        return importlib.import_module(f"{ALONE}.{RENDERER}")
    except Exception:  # whatever another version needs
        return None
