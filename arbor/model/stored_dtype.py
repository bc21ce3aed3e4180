"""The dtype that a model's weights are stored in, where its config states none; without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from arbor.model.hub import cache_if_unreachable

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# of safetensors; numbers of fewer bits are quantized, and computed in another dtype
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def stored_dtype(place: str, revision: str | None) -> str | None:
    """The dtype of a model's weights, which ``auto`` is where its config states none.

    As in transformers it is that of the first tensor of floating-point numbers, by their names, in
    the first file of the model's safetensors; files of something else may lie beside them.

    Args:
        place: a directory or Hub id; of the Hub nothing but the header is downloaded.
        revision: as in `ModelLocation`.

    Returns:
        None where the config states a dtype, or what is there cannot be read.
    """
    try:
        folder = Path(place) if Path(place).is_dir() else _snapshot(place, revision)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if config.get("dtype") or config.get("torch_dtype"):
            return None
        first = folder / _first_file(folder)
        stored = _header(first) if first.is_file() else _header_on_the_hub(place, revision)
        return next((NAMES[stored[each]] for each in sorted(stored) if stored[each] in NAMES), None)
    except Exception:  # the Hub fails in many ways; who loads the model reports it
        return None


def _snapshot(name: str, revision: str | None) -> Path:
    """The folder of a Hub model's config in the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG, revision=revision)
    if not isinstance(found, str):
        with cache_if_unreachable():
            found = hf_hub_download(name, CONFIG, revision=revision)
    return Path(found).parent


def _first_file(folder: Path) -> str:
    """The name of the first file of a model's weights, of several by their index."""
    index = folder / INDEX
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return WEIGHTS
    return min(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _header(path: Path) -> Mapping[str, str]:
    """The dtype of each tensor of a file, as safetensors names it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return {}
        header = json.loads(file.read(length))
    return {name: each["dtype"] for name, each in header.items() if name != "__metadata__"}


def _header_on_the_hub(name: str, revision: str | None) -> Mapping[str, str]:
    """The same of the first file of a Hub model."""
    from huggingface_hub import get_safetensors_metadata

    with cache_if_unreachable():
        files = get_safetensors_metadata(name, revision=revision).files_metadata
    tensors = files[min(files)].tensors
    return {name: str(each.dtype) for name, each in tensors.items()}
