"""Makes what a GPU machine without network and compiler needs: FlashInfer, and weights in pieces.

    python scripts/gpu_bundle.py                        # build/gpu-bundle; about 12 CPU minutes
    python scripts/gpu_bundle.py --kernels cascade d128 --arch 9.0a
    python scripts/gpu_bundle.py --dry-run              # what would be done, and what is missing

Downloads pinned wheels, compiles the kernels ahead of time with nvcc, keeps what importing and
running them needs (and, for head sizes or dtypes that are not there, the sources to compile them),
and loads every kernel from the result without CUDA and with compiling disabled. docs/gpu.md says
how the folder is used. A second call compiles only what changed.

    python scripts/gpu_bundle.py --cut m.gguf problems.jsonl           # build/gpu-pieces
    python scripts/gpu_bundle.py --keep build/gpu-pieces/m.gguf.part00 --into ~/weights  # there

For a machine that takes so many MiB at a time (`--limit-mib`, the working tree included) files are
cut into pieces, each checked and kept there, and joined once all have come. Printed is one line for
each transfer: the files to send along, and the command to run there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_pieces import LIST, PiecesError, cut, keep, transfers

# Whatever `import flashinfer` needs besides torch and what comes with torch and transformers; and
# what reads GGUF files.
WHEELS = (
    "gguf==0.19.0",
    "flashinfer-python==0.6.18",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-ml-py==13.615.71",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "idna==3.20",
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
)
PYTHONS = ("3.11", "3.12", "3.13")  # tvm-ffi has a wheel for each
LIMIT_BYTES = 50_000_000
MARGIN = 2**20  # bytes of a transfer for names and headers
# Not needed to import the package or to compile attention: kernels of other devices and models.
PRUNED = (
    "flashinfer/data/build_backend.py",
    "flashinfer/data/build_utils.py",
    "flashinfer/moe_ep/kernel_src",
    "tvm_ffi/3rdparty",
)
HEADERS = ("data/cutlass", "data/cccl", "data/spdlog", "data/csrc", "data/include")
SOURCES = (
    "batch_prefill",
    "batch_decode",
    "cascade",
    "flashinfer_cascade",
)  # of data/csrc: read by name


@dataclass(frozen=True)
class Kernel:
    """One module: `cascade`, or fa2 prefill or decoding in bfloat16.

    Attributes:
        head_dim: of keys and values; 0 = the cascade module.
        window: with a sliding window.
        softcap: with soft-capped logits.
        decode: decoding on CUDA cores, which stage 8 of the check measures.
    """

    head_dim: int = 0
    window: bool = False
    softcap: bool = False
    decode: bool = False


KERNELS = {
    "cascade": Kernel(),
    "d128": Kernel(128),
    "d128-window": Kernel(128, window=True),
    "d128-decode": Kernel(128, decode=True),
    "d64": Kernel(64),
    "d256-softcap": Kernel(256, softcap=True),
    "d256-window-softcap": Kernel(256, window=True, softcap=True),
}


def main() -> int:
    arguments = parse()
    if arguments.stage:
        return stage(arguments.stage, arguments.kernels)
    if arguments.cut or arguments.keep:
        try:
            return pieces_to_send(arguments) if arguments.cut else kept_pieces(arguments)
        except PiecesError as error:
            print(f"gpu_bundle: {error}", file=sys.stderr)
            return 1
    missing = [tool for tool in ("ninja", "c++") if shutil.which(tool) is None]
    home = cuda_home()
    if home is None:
        missing.insert(0, "nvcc")
    if arguments.dry_run:
        chosen = {name: asdict(KERNELS[name]) for name in arguments.kernels}
        report(
            arguments.json,
            wheels=list(WHEELS),
            pythons=arguments.python,
            arch=arguments.arch,
            kernels=chosen,
            missing=missing,
            out=str(arguments.out),
        )
        return 0
    if missing:
        print(f"gpu_bundle: not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    assert home is not None
    return make(arguments, home)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="build/gpu-bundle; with --cut build/gpu-pieces"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="wheels and objects; OUT.work if left out"
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--arch", default="9.0a", help="compute capability; 9.0a is Hopper")
    parser.add_argument(
        "--python",
        nargs="+",
        default=list(PYTHONS),
        help="versions to carry, in addition to this one",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report")
    parser.add_argument("--cut", nargs="+", type=Path, metavar="FILE", help="into pieces")
    parser.add_argument(
        "--limit-mib", type=int, default=64, help="of a transfer, the working tree included"
    )
    parser.add_argument(
        "--keep", nargs="+", type=Path, metavar="PIECE", help="there: check, keep and join"
    )
    parser.add_argument(
        "--into", type=Path, default=Path("weights"), metavar="DIR", help="folder of --keep"
    )
    parser.add_argument("--stage", choices=("build", "try"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cut or arguments.keep:
        arguments.out = arguments.out or Path("build/gpu-pieces")
        return arguments
    arguments.out = arguments.out or Path("build/gpu-bundle")
    arguments.work = arguments.work or arguments.out.with_name(arguments.out.name + ".work")
    arguments.out, arguments.work = arguments.out.resolve(), arguments.work.resolve()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"  # compiles with the package
    arguments.python = list(dict.fromkeys([*arguments.python, here]))
    return arguments


def pieces_to_send(arguments: argparse.Namespace) -> int:
    """Cut files, and print what to send and to run for each transfer."""
    tree = tree_bytes(Path(__file__).parents[1])
    size = arguments.limit_mib * 2**20 - tree - MARGIN
    pieces = cut(arguments.cut, arguments.out, size)
    together = transfers(pieces, arguments.out, size)
    for some in together:
        paths = " ".join(str(arguments.out / piece.name) for piece in some)
        print(f"send {arguments.out / LIST} {paths}")
        print(f"  run python scripts/gpu_bundle.py --keep {paths} --into {arguments.into}")
    print(f"{len(together)} transfers with a tree of {tree / 2**20:.1f} MiB", file=sys.stderr)
    return 0


def kept_pieces(arguments: argparse.Namespace) -> int:
    """Keep pieces, and say of each file which are still to come."""
    for piece in arguments.keep:
        missing = keep(piece, arguments.into)
        left = " ".join(each.name for each in missing)
        print(f"{piece.name}: still to come: {left}" if missing else f"{piece.name}: complete")
    return 0


def tree_bytes(folder: Path) -> int:
    """Bytes of the files that a checkout has but does not ignore; 0 without git."""
    command = ["git", "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    names = [folder / os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return sum(path.lstat().st_size for path in names if path.exists())


def make(arguments: argparse.Namespace, home: Path) -> int:
    """Download, compile, prune, try."""
    work, out = arguments.work, arguments.out
    site, cache = work / "-".join(("site", *arguments.python)), work / "cache"
    times: dict[str, float] = {}
    with timed(times, "wheels"):
        unpack(download(work / "wheels", arguments.python), site)
    environment = os.environ | {
        "PYTHONPATH": str(site),
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": arguments.arch,
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{driver_stub(work / 'stub')}",
        "MAX_JOBS": str(arguments.jobs),
    }
    built: dict[str, Path] = {}
    for name in arguments.kernels:
        with timed(times, name):
            built[name] = Path(run_stage("build", name, environment))
        print(json.dumps({"built": name, "seconds": round(times[name], 1)}), flush=True)
    headers = {path for library in built.values() for path in headers_of(library, site)}
    copy_pruned(site, out, headers)
    modules = {}
    for name, library in built.items():
        target = out / "flashinfer/data/aot" / library.stem / library.name
        target.parent.mkdir(parents=True)
        shutil.copy2(library, target)
        modules[name] = {"module": library.stem, "bytes": target.stat().st_size}
    about = {
        "wheels": list(WHEELS),
        "pythons": arguments.python,
        "arch": arguments.arch,
        "modules": modules,
    }
    (out / "bundle.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    with timed(times, "try"):
        for name in arguments.kernels:
            tried = environment | {
                "PYTHONPATH": str(out),
                "PYTHONDONTWRITEBYTECODE": "1",
                "FLASHINFER_DISABLE_JIT": "1",
                "FLASHINFER_WORKSPACE_BASE": str(work / "tried"),
                "LD_LIBRARY_PATH": f"{home / 'lib64'}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            }
            found = Path(run_stage("try", name, tried))
            assert found.is_relative_to(out), f"{name} was loaded from {found}"
    size = folder_bytes(out)
    seconds = {name: round(value, 1) for name, value in times.items()}
    report(arguments.json, out=str(out), bytes=size, seconds=seconds, **about)
    if size > LIMIT_BYTES:
        print(f"gpu_bundle: {size:,} bytes, more than {LIMIT_BYTES:,}", file=sys.stderr)
        return 1
    return 0


def download(folder: Path, pythons: Sequence[str]) -> list[Path]:
    """The wheels, for every version of Python."""
    for version in pythons:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", version, "--dest", str(folder)]
        subprocess.run([*command, *WHEELS], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], site: Path) -> None:
    """Put the wheels into one folder; compiled parts for different Pythons have different names."""
    if site.exists():
        return
    half = site.with_name("site.part")
    shutil.rmtree(half, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(half)
    half.rename(site)


def driver_stub(folder: Path) -> Path:
    """A folder with an empty libcuda.so to link against; the real one comes with the driver."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "stub.c", folder / "libcuda.so"
    source.write_text("void arbor_stub(void) {}\n", encoding="utf-8")
    command = ["c++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    return folder


def run_stage(name: str, kernel: str, environment: dict[str, str]) -> str:
    """Run a stage in a process of its own, which sees the package through the environment."""
    command = [sys.executable, __file__, "--stage", name, "--kernels", kernel]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def stage(name: str, kernels: Sequence[str]) -> int:
    """Build or load one kernel and print where its library is."""
    (kernel,) = kernels
    spec = specification(KERNELS[kernel])
    if name == "build":
        spec.build()
    else:
        assert spec.is_aot, f"{spec.aot_path} is missing"
        spec.build_and_load()
        check_wrapper()
    print(spec.get_library_path())
    return 0


def specification(kernel: Kernel) -> Any:
    """FlashInfer's description of a module, as its wrappers ask for it."""
    import torch
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module

    if not kernel.head_dim:
        return gen_cascade_module()
    dtype, dim = torch.bfloat16, kernel.head_dim
    kinds = (dtype, dtype, dtype, torch.int32, dim, dim)
    variant = (0, kernel.window, kernel.softcap)  # no position encoding
    if kernel.decode:
        return gen_batch_decode_module(*kinds, *variant)
    return gen_batch_prefill_module("fa2", *kinds, *variant, False)  # float32 products


def check_wrapper() -> None:
    """What the backend imports is there."""
    import flashinfer

    assert callable(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    assert callable(flashinfer.merge_state_in_place)


def headers_of(library: Path, site: Path) -> list[Path]:
    """The package's files that a module's compilation read."""
    command = ["ninja", "-C", str(library.parent), "-t", "deps"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    paths = [Path(line.strip()) for line in done.stdout.splitlines() if line.startswith("    ")]
    inside = [path.resolve() for path in paths if path.resolve().is_relative_to(site)]
    assert inside, f"ninja knows no headers of {library}"
    return inside


def copy_pruned(site: Path, out: Path, headers: set[Path]) -> None:
    """Copy what is needed: of the header folders, what was read; of the rest, all but `PRUNED`."""
    shutil.rmtree(out, ignore_errors=True)
    dropped = [site / name for name in PRUNED]
    selective = [site / "flashinfer" / name for name in HEADERS]
    for path in sorted(site.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        if any(path.is_relative_to(folder) for folder in dropped):
            continue
        if any(path.is_relative_to(folder) for folder in selective):
            by_name = path.parent.name == "csrc" and path.name.startswith(SOURCES)
            if path not in headers and not by_name:
                continue
        target = out / path.relative_to(site)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def cuda_home() -> Path | None:
    """Where the CUDA toolkit is, if it is anywhere."""
    for named in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(named):
            return Path(os.environ[named])
    usual = Path("/usr/local/cuda")
    if (usual / "bin/nvcc").exists():
        return usual
    found = shutil.which("nvcc")
    return Path(found).resolve().parents[1] if found else None


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def timed(table: dict[str, float], name: str) -> Iterator[None]:
    """Wall-clock seconds of a block, into a table."""
    start = time.perf_counter()
    yield
    table[name] = time.perf_counter() - start


def report(file: Path | None, **content: Any) -> None:
    """Print the report, and write it."""
    text = json.dumps(content, indent=2)
    print(text)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
