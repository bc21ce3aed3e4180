"""Names of devices and dtypes, checked without torch."""

from __future__ import annotations

import re

from arbor.errors import UsageError

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # of a number
DTYPES = tuple(BYTES_OF)
INT8 = "int8"  # K and V, or weights, in 8 bits
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def check_device(device: str) -> str:
    """A device by name; whether a GPU is there is checked later.

    Raises:
        UsageError: neither auto, cpu nor cuda, perhaps with a number.
    """
    if _DEVICE.fullmatch(device) is None:
        raise UsageError("device", f"unknown device: --device {device}.", "Use auto, cpu or cuda.")
    return device


def check_dtype(dtype: str) -> str:
    """A dtype by name.

    Raises:
        UsageError: neither auto nor one of `DTYPES`.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(
            "dtype", f"--dtype {dtype} is not supported.", f"Use auto, {', '.join(DTYPES)}."
        )
    return dtype


def check_int8_weights(device: str) -> None:
    """Refuses weights in 8 bits where no kernel reads them.

    Raises:
        UsageError: the device, by name, is not a CPU.
    """
    if device.startswith("cuda"):
        raise UsageError(
            "weights",
            f"weights={INT8} runs on a CPU only, and the device is {device}.",
            "Use --device cpu, or a quantised checkpoint (docs/compatibility.md).",
        )
