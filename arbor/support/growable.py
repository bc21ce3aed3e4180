"""Arrays that grow as blocks are added."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)
_FIRST = 64  # entries


def grown(values: NDArray[Number], size: int, fill: Any = 0) -> NDArray[Number]:
    """An array with room for at least `size` entries along its last axis.

    It is the array itself if that is long enough, and otherwise a copy of at least twice its
    length, so that growing entry by entry copies each entry a constant number of times.

    Args:
        values: [..., N].
        size: entries needed.
        fill: value of new entries; broadcasts to them.
    """
    length = values.shape[-1]
    if size <= length:
        return values
    longer = np.full((*values.shape[:-1], max(size, 2 * length, _FIRST)), fill, values.dtype)
    longer[..., :length] = values
    return longer
