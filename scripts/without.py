"""Shows that arbor works without features: takes their folders out of a copy, and runs it.

    python scripts/without.py arbor/papers/rksc
    python scripts/without.py --quick arbor/papers/rksc arbor/integrations/ray
    python scripts/without.py --quick --each
    python scripts/without.py --quick --each --part 2/6

`--each` takes one folder after another, as many at a time as there are cores.

A folder's own tests, ``tests/papers/rksc`` for the first, go with it, and so do those of scripts
that import it. Of the pages stay the words: their examples of the folder, and entries of errors
that it alone raises, go. All other tests have to pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("feature", "registry")
NATIVE = Path("kernels/libarbor_native.so")  # built, and not tracked


def copy_repository(to: Path) -> None:
    """Copy what git tracks or would, and the native library, to an empty folder, as a repository
    of its own."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in (*filter(None, listed.split("\0")), str(NATIVE)):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    for command in (["init", "-q"], ["add", "--all"]):
        subprocess.check_call(["git", *command], cwd=to)


def take_out(folder: str, root: Path) -> set[str]:
    """Take a folder below ``arbor/`` out of a copy, with its tests and what pages show of it.

    Returns:
        names of the scripts that import it.
    """
    place = Path(folder)
    package = ".".join(place.parts)
    own = "".join(path.read_text("utf-8") for path in (root / place).rglob("*.py"))
    shutil.rmtree(root / place)
    shutil.rmtree(root / "tests" / place.relative_to("arbor"), ignore_errors=True)
    for page in (root / "docs").rglob("*.md"):
        page.write_text(_without_examples(page.read_text("utf-8"), package), "utf-8")
    others = "".join(
        path.read_text("utf-8")
        for unit in (root / "arbor").iterdir()
        for path in ([unit] if unit.suffix == ".py" else unit.rglob("*.py"))
    )
    errors = root / "docs" / "errors.md"
    rows = errors.read_text("utf-8").splitlines(keepends=True)
    kept = [row for row in rows if not _is_of(row.split("`")[1:2], own, others)]
    errors.write_text("".join(kept), "utf-8")
    scripts = (root / "scripts").rglob("*.py")
    naming = [each for each in scripts if f"from {package}" in each.read_text("utf-8")]
    return {each.relative_to(root / "scripts").parts[0] for each in naming}


def _without_examples(text: str, package: str) -> str:
    """A page whose Python examples of a package are plain text."""
    blocks = re.split(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for at in range(1, len(blocks), 2):
        kind = "text" if package in blocks[at] else "python"
        blocks[at] = f"```{kind}\n{blocks[at]}```"
    return "".join(blocks)


def _is_of(codes: Sequence[str], own: str, others: str) -> bool:
    """Whether a row begins with an error's code that is in these sources, and not in the others."""
    return any(f'"{code}"' in own and f'"{code}"' not in others for code in codes)


def commands(quick: bool, scripts: set[str]) -> list[Sequence[str]]:
    """What has to succeed in the copy."""
    tests = [f"tests/test_{name}.py" for name in QUICK] if quick else ["tests"]
    gone = " or ".join(sorted({name.split("_stages")[0].removesuffix(".py") for name in scripts}))
    left_out = ["-k", f"not (script_runs and ({gone}))"] if gone else []
    return [
        [sys.executable, "-m", "arbor", "solve", "4 5 6 10"],
        [sys.executable, "-m", "arbor", "list"],
        [sys.executable, "-m", "pytest", "-q", *left_out, *tests],
    ]


def main() -> int:
    """The number of commands that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", default=features())
    parser.add_argument("--quick", action="store_true", help="a few test files only")
    parser.add_argument("--each", action="store_true", help="one folder at a time")
    parser.add_argument(
        "--part", default="0/1", metavar="K/N", help="every N-th folder, from the K-th, from 0"
    )
    args = parser.parse_args()
    asked, _, parts = args.part.partition("/")
    if not (asked.isdecimal() and parts.isdecimal() and int(asked) < int(parts)):
        parser.error(f"--part {args.part}: give K/N with K below N, such as 0/4")
    args.folders = args.folders[int(asked) :: int(parts)]
    for folder in args.folders:
        if Path(folder).parts[:1] != ("arbor",) or not (ROOT / folder / "__init__.py").is_file():
            parser.error(f"{folder} is no package of arbor, such as arbor/papers/rksc")
    if args.each:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return sum(threads.map(lambda each: without([each], quick=args.quick), args.folders))
    return without(args.folders, quick=args.quick)


def features() -> list[str]:
    """The folders of papers and integrations."""
    found = (ROOT / "arbor").glob("*/*/__init__.py")
    folders = sorted(path.parent.relative_to(ROOT).as_posix() for path in found)
    return [each for each in folders if each.split("/")[1] in ("papers", "integrations")]


def without(folders: Sequence[str], *, quick: bool) -> int:
    """Run everything in a copy without these folders; the number of commands that failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="arbor-without-") as name:
        root = Path(name)
        copy_repository(root)
        scripts = {name for folder in folders for name in take_out(folder, root)}
        every = commands(quick, scripts)
        for command in every:
            done = subprocess.run(
                command,
                cwd=root,
                env=os.environ | {"PYTHONPATH": name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                failed += 1
                print(" ".join(["$", *command[1:]]), done.stdout, sep="\n", flush=True)
    print(f"without {' '.join(folders)}: {failed} of {len(every)} commands failed", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
