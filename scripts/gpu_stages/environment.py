"""Stage 1: versions, which modules load, and one tiny plan and run per kernel."""

from __future__ import annotations

import os
import platform
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gpu_bundle
import torch
from gpu_stages.rows import Job, needs

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade
from arbor.kernels.attention.torch_cascade import TorchCascade

PACKAGES = ("torch", "transformers", "triton", "numpy", "flashinfer-python", "apache-tvm-ffi")
MODULES = ("flashinfer", "tvm_ffi", "triton", "accelerate")
WINDOW, SOFTCAP = 4, 50.0


def run(job: Job) -> None:
    """Report versions, then import every module and try every kernel of the bundle."""
    job.row("versions", **versions(job.device))
    for name in MODULES:
        job.row(f"import {name}", **imported(name))
    device = torch.device(job.device)
    if job.small:
        with job.checking("tiny attention", backend="torch"):
            cascade = TorchCascade()
            shape = AttentionShape(4, 2, 64, 64, 1.0)
            from gpu_stages.attention import Case, errors, problem_of

            problem = problem_of(Case("tiny", shape), job.seed, device)
            job.row("tiny attention", backend="torch", **errors(cascade, problem, problem.layout))
        return
    with job.checking("kernels", backend="flashinfer"):
        needs("flashinfer")
        for name, kernel in gpu_bundle.KERNELS.items():
            if kernel.head_dim:
                with job.checking(f"kernel {name}", backend="flashinfer"):
                    began = time.perf_counter()
                    FlashInferCascade(device).probe([shape_of(kernel)])
                    seconds = time.perf_counter() - began
                    job.row(f"kernel {name}", backend="flashinfer", ok=True, seconds=seconds)


def shape_of(kernel: gpu_bundle.Kernel) -> AttentionShape:
    """Layers that need a kernel; without a window, merging levels needs `cascade` too."""
    dim = kernel.head_dim
    window, softcap = WINDOW if kernel.window else None, SOFTCAP if kernel.softcap else None
    return AttentionShape(8, 2, dim, dim, dim**-0.5, window, softcap)


def versions(device: str) -> dict[str, Any]:
    """Machine and packages."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["device"] = "cpu"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = properties.total_memory / (1 << 30)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return found


def imported(name: str) -> dict[str, Any]:
    """Where a module comes from, or why it cannot be imported."""
    try:
        module = import_module(name)
    except Exception as error:  # a damaged installation fails in any way
        return {"found": False, "reason": f"{type(error).__name__}: {error}"[:300]}
    return {"found": True, "file": getattr(module, "__file__", None)}
