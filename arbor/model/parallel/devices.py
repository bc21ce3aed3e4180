"""Devices of ranks: a GPU each, or a CPU for all; named and checked before anything loads."""

from __future__ import annotations

import os

from arbor.errors import UsageError

SHARE = "ARBOR_TP_SHARE_GPU"  # "1", for tests: ranks share the GPUs that there are, in turn


def devices_of(device: str, count: int) -> list[str]:
    """The device of each rank, by name: ``cuda:0``, ``cuda:1`` … or ``cpu``.

    Args:
        device: by name, or ``auto``: GPUs where there are any.
        count: of ranks.

    Raises:
        UsageError: one GPU is named for all, there are fewer GPUs than ranks, or torch has no
            NCCL.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return ["cpu" if device == "auto" else device] * count
    if ":" in device:
        raise UsageError(
            "tp",
            f"--tp {count} with --device {device}: each process has a GPU of its own.",
            "Use --device cuda; CUDA_VISIBLE_DEVICES selects GPUs.",
            tp=count,
        )
    if not torch.distributed.is_nccl_available():
        raise UsageError(
            "tp",
            f"--tp {count} on GPUs needs NCCL, and this torch was built without it.",
            "Use --device cpu, or another build of torch.",
            tp=count,
        )
    there = torch.cuda.device_count()
    if there < count and not shares_gpus():
        seen = "1 GPU" if there == 1 else f"{there} GPUs"
        raise UsageError(
            "tp",
            f"--tp {count}: each process needs a GPU of its own, and torch sees {seen}.",
            f"Use --tp {there}, or --device cpu.",
            tp=count,
            gpus=there,
        )
    return [f"cuda:{number % there}" for number in range(count)]


def shares_gpus() -> bool:
    """Whether several ranks may have one GPU."""
    return os.environ.get(SHARE) == "1"


def nccl_settings(number: int) -> dict[str, str]:
    """Environment variables of a rank for NCCL.

    NCCL refuses two ranks of one host on one GPU. Where they share it, each says that it is a host
    of its own, and their tensors go over the loopback.
    """
    if not shares_gpus():
        return {}
    without = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    off = ("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_RAS_ENABLE")
    return {
        "NCCL_HOSTID": f"rank{number}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        **dict.fromkeys(without, "1"),
        **dict.fromkeys(off, "0"),
    }
