"""Names of devices and dtypes, checked without torch."""

from __future__ import annotations

import re

from arbor.errors import UsageError

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}  # of a number
DTYPES = tuple(BYTES_OF)
INT8 = "int8"  # K and V, or weights, in 8 bits
KV_DTYPES = ("auto", INT8)
WEIGHTS = ("auto", INT8)
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


def check_device(device: str) -> str:
    """A device by name; whether a GPU is there is checked later.

    Raises:
        UsageError: neither auto, cpu nor cuda, perhaps with a number.
    """
    if _DEVICE.fullmatch(device) is None:
        raise UsageError("device", f"unknown device: --device {device}.", "Use auto, cpu or cuda.")
    return device


def check_device_map(device_map: object) -> None:
    """Refuses a model that is spread over devices.

    Raises:
        UsageError: names what to use instead.
    """
    if device_map is not None:
        raise UsageError(
            "device-map",
            f"device_map={device_map!r:.60} spreads one model over several devices, and arbor runs "
            "a model on one.",
            "A model that fits on one device: 'arbor eval --workers N' or arbor.Workers puts a copy "
            "on each. A larger one: a smaller dtype, quantised weights, or --device cpu.",
        )


def check_dtype(dtype: str) -> None:
    """Refuses an unknown dtype, and one that no kernel computes in.

    Raises:
        UsageError: neither auto nor one of `DTYPES`.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(
            "dtype", f"--dtype {dtype} is not supported.", f"Use auto, {', '.join(DTYPES)}."
        )


def check_kv_dtype(kv_dtype: str) -> str:
    """A dtype of the KV by name.

    Raises:
        UsageError: not one of `KV_DTYPES`.
    """
    if kv_dtype not in KV_DTYPES:
        raise UsageError(
            "kv-dtype",
            f"--kv-dtype {kv_dtype} is not supported.",
            f"Use {' or '.join(KV_DTYPES)}.",
        )
    return kv_dtype


def check_weights(weights: str, device: str) -> str:
    """How weights are kept, by name.

    Args:
        weights: the name.
        device: by name.

    Raises:
        UsageError: not one of `WEIGHTS`, or not on this device.
    """
    if weights not in WEIGHTS:
        raise UsageError(
            "weights", f"--weights {weights} is not supported.", f"Use {' or '.join(WEIGHTS)}."
        )
    if weights == INT8:
        check_int8_weights(device)
    return weights


def check_int8_weights(device: str) -> None:
    """Refuses weights in 8 bits where no kernel reads them.

    Raises:
        UsageError: the device, by name, is not a CPU.
    """
    if device.startswith("cuda"):
        raise UsageError(
            "weights",
            f"--weights {INT8} runs on a CPU only, and the device is {device}.",
            "Use --device cpu, or a quantised checkpoint (docs/compatibility.md).",
        )
