"""Write the built-in model's description, which plans read instead of importing torch.

    python scripts/describe_sapling.py
    python scripts/describe_sapling.py --check

``--check`` writes nothing and fails if the file differs from what the model's files give.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arbor.model.description_cache import SHIPPED, shipped_text
from arbor.model.loading import locate_model
from arbor.model.weights import read_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the file, and write nothing")
    given = parser.parse_args()
    source = locate_model("builtin:sapling")
    folder = Path(source.path)
    made = shipped_text(folder, read_files(source, None, None, "auto", keep=False))
    path = folder / SHIPPED
    if not given.check:
        path.write_text(made, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != made:
        print(f"{path} is stale: run python scripts/describe_sapling.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
