"""Building the native kernels: one compiler call per instruction set, one shared library.

    python kernels/csrc/build.py [--output FILE] [--sanitize memory|threads]

`setup.py` calls this when the package is installed; `make native` for a checkout.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libarbor_native.so"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# Flags of each source; the library itself runs on any x86-64.
FLAGS = {
    "library": [],
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
# No -ffast-math: the order of every sum is part of what the kernels promise.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
COMMON += ["-Wall", "-Wextra"]
CHECKED = ["-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
SANITIZE = {
    "memory": [*CHECKED, "-fsanitize=address,undefined"],
    "threads": [*CHECKED, "-fsanitize=thread"],
}


def compiler() -> str | None:
    """A C++ compiler for this machine: ``$CXX``, or the first one found; None without."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return None
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, filter(None, names)) if path), None)


def build(output: Path, *, sanitize: str | None = None) -> None:
    """Compile the library.

    Args:
        output: the file to write.
        sanitize: with the sanitizers of this name in `SANITIZE`, and slow; None: without.

    Raises:
        RuntimeError: there is no compiler, or it fails; with its messages.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler was found, or this is not x86-64 Linux or macOS")
    options = [*COMMON, *(["-O3"] if sanitize is None else SANITIZE[sanitize])]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str) -> str:
            object_file = str(Path(folder) / f"{name}.o")
            source = str(SOURCES / f"{name}.cpp")
            _run([command, *options, *FLAGS[name], "-c", source, "-o", object_file])
            return object_file

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compiled, FLAGS))
        made = Path(folder) / LIBRARY
        _run([command, *options, "-shared", "-pthread", *objects, "-o", str(made)])
        # a process that has the earlier file open keeps it
        shutil.copy(made, output.with_suffix(".new"))
        output.with_suffix(".new").replace(output)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> int:
    """Builds the library of a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=SOURCES.parent / LIBRARY)
    parser.add_argument("--sanitize", choices=list(SANITIZE))
    options = parser.parse_args()
    try:
        build(options.output, sanitize=options.sanitize)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
