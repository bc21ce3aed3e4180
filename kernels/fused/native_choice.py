"""The choice of tokens, and sums of their logits, by the native kernels; None where they cannot."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from arbor.kernels.native import NUMBERS, ChoiceJob, Library, LogitSumsJob, native_library


class NativeChoice:
    """One token per row, by its number; a row's bits depend on nothing but the row."""

    def __init__(self, library: Library) -> None:
        self._choose = library.choose

    def __call__(
        self,
        logits: Tensor,
        uniforms: list[float],
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> Tensor | None:
        """The choice; None where the kernel does not read the logits.

        Args:
            logits: [n, V].
            uniforms: n numbers in [0, 1).
            temperature, top_k, top_p, min_p: as in `Sampling`.

        Returns:
            [5, n] float64: the fields of `Draws`; NaN as the probabilities of a row that is not
            finite.
        """
        number = _number_of(logits)
        if number is None:
            return None
        rows, vocabulary = logits.shape
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        out = torch.empty(5, rows, dtype=torch.float64)
        job = ChoiceJob(
            *(logits.data_ptr(), numbers.data_ptr(), out.data_ptr(), logits.stride(0)),
            *(temperature, top_p, min_p, top_k, rows, vocabulary, number),
        )
        self._choose(ctypes.addressof(job), torch.get_num_threads())
        return out


def native_choice() -> NativeChoice | None:
    """The choice of the library; None without one."""
    library = native_library()
    return None if library is None else NativeChoice(library)


def logit_sums(logits: Tensor) -> Tensor | None:
    """What the probabilities of each row follow from, before temperature and cut-offs.

    Args:
        logits: [n, V].

    Returns:
        [4, n] float64: the largest logit, the sum of exp(logit - largest), the entropy, and the
        first token with the largest logit. Sums of a row that is not finite are NaN.
    """
    library, number = native_library(), _number_of(logits)
    if library is None or number is None:
        return None
    rows, vocabulary = logits.shape
    out = torch.empty(4, rows, dtype=torch.float64)
    job = LogitSumsJob(
        *(logits.data_ptr(), out.data_ptr(), logits.stride(0)), *(rows, vocabulary, number)
    )
    library.sum_logits(ctypes.addressof(job), torch.get_num_threads())
    return out


def _number_of(logits: Tensor) -> int | None:
    """The kernels' number of the dtype; None for logits that they do not read."""
    if logits.is_cuda or logits.stride(-1) != 1 or not logits.shape[-1]:
        return None
    return NUMBERS.get(str(logits.dtype).removeprefix("torch."))
