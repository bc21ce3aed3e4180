"""Building the native kernels: one compiler call per instruction set, one shared library.

    python kernels/csrc/build.py [--output FILE] [--sanitize memory|threads] [--compiler COMMAND]
    python kernels/csrc/build.py --emulate --output FILE

`setup.py` calls this when the package is installed; `make native` for a checkout. The sources are
those of the machine that the compiler compiles for, x86-64 or aarch64.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libarbor_native.so"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
# Flags of each source, by machine; `library` runs on any CPU of the machine, and so does `neon`.
FLAGS = {
    "x86_64": {
        "library": [],
        "avx2": AVX2,
        "avx_vnni": [*AVX2, "-mavxvnni"],
        "avx512": AVX512,
        "avx512_vnni": [*AVX512, "-mavx512vnni"],
        "avx512_bf16": [*AVX512, "-mavx512bf16"],
        "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {
        "library": [],
        "neon": ["-march=armv8-a"],  # some compilers take their own machine for the oldest
        "neon_dot": ["-march=armv8.2-a+dotprod"],
        "neon_bf16": ["-march=armv8.2-a+dotprod+bf16"],
    },
}
INCLUDED = [*AVX2, "-include", str(SOURCES / "emulated.h"), "-w", "-O0"]  # -O1 takes minutes
# Every instruction set of x86-64 on any CPU with AVX2; see emulated.h.
EMULATED = {
    "library": ["-DARBOR_EMULATED"],
    "avx2": [*AVX2, "-O0"],
    "avx_vnni": [*INCLUDED, "-DEMULATE_AVX_VNNI"],
    "avx512": INCLUDED,
    "avx512_vnni": [*INCLUDED, "-DEMULATE_VNNI"],
    "avx512_bf16": [*INCLUDED, "-DEMULATE_BF16"],
    "amx": [*INCLUDED, "-DEMULATE_BF16", "-DEMULATE_AMX"],
}
# Other names of these machines, in Python or in the targets of compilers.
SAME = {"AMD64": "x86_64", "amd64": "x86_64", "arm64": "aarch64"}
# No -ffast-math: the order of every sum is part of what the kernels promise.
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
COMMON += ["-Wall", "-Wextra"]
CHECKED = ["-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
# the checks of every access to memory make loops that are written out too long to optimise
SANITIZE = {
    "memory": [*CHECKED, "-O0", "-fsanitize=address,undefined"],
    "threads": [*CHECKED, "-O1", "-fsanitize=thread"],
}


def compiler() -> str | None:
    """A command for C++ of this machine: ``$CXX``, or the first compiler found; None without."""
    if _named(platform.machine()) not in FLAGS or sys.platform == "win32":
        return None
    given = os.environ.get("CXX", "").strip()
    return given or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def target(command: Sequence[str]) -> str:
    """The machine that a compiler compiles for, a key of `FLAGS`.

    Raises:
        RuntimeError: there are no kernels for the machine, or the compiler fails.
    """
    triple = _run([*command, "-dumpmachine"]).strip()  # aarch64-linux-gnu, arm64-apple-darwin23.6.0
    machine = _named(triple.partition("-")[0])
    if machine not in FLAGS:
        raise RuntimeError(
            f"{command[0]} compiles for {triple}; there are kernels for {', '.join(FLAGS)}"
        )
    return machine


def build(
    output: Path,
    *,
    sanitize: str | None = None,
    command: str | None = None,
    emulate: bool = False,
) -> None:
    """Compile the library.

    Args:
        output: the file to write.
        sanitize: with the sanitizers of this name in `SANITIZE`, and slow; None: without.
        command: a compiler for any machine of `FLAGS`, with arguments; None: `compiler`.
        emulate: instruction sets that this machine lacks too, slowly; needs SIMD Everywhere.

    Raises:
        RuntimeError: there is no compiler, it compiles for another machine than this one although
            no other was named, or it fails; with its messages.
    """
    here = _named(platform.machine())
    words = shlex.split(command or compiler() or "")
    if not words:
        raise RuntimeError(
            "no C++ compiler was found, or this is not Linux or macOS on x86-64 or aarch64"
        )
    machine = target(words)
    if command is None and machine != here:
        raise RuntimeError(f"{words[0]} compiles for {machine}, and this is {here}")
    if emulate and machine != "x86_64":
        raise RuntimeError(f"{words[0]} compiles for {machine}; what is emulated is of x86_64")
    flags = EMULATED if emulate else FLAGS[machine]
    options = [*COMMON, *(["-O3"] if sanitize is None else SANITIZE[sanitize])]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str) -> str:
            object_file = str(Path(folder) / f"{name}.o")
            source = str(SOURCES / f"{name}.cpp")
            _run([*words, *options, *flags[name], "-c", source, "-o", object_file])
            return object_file

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compiled, flags))
        made = Path(folder) / LIBRARY
        _run([*words, *options, "-shared", "-pthread", *objects, "-o", str(made)])
        # a process that has the earlier file open keeps it
        shutil.copy(made, output.with_suffix(".new"))
        output.with_suffix(".new").replace(output)


def _named(machine: str) -> str:
    return SAME.get(machine, machine)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the compiler {command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Builds the library of a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=SOURCES.parent / LIBRARY)
    parser.add_argument("--sanitize", choices=list(SANITIZE))
    parser.add_argument("--emulate", action="store_true", help="sets that this machine lacks too")
    parser.add_argument("--compiler", help="for any machine; without, $CXX or the one found")
    options = parser.parse_args()
    try:
        given = {"sanitize": options.sanitize, "command": options.compiler}
        build(options.output, **given, emulate=options.emulate)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
