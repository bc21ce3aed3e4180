"""Adapters: LoRA weights merged into a model as it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arbor.errors import ModelError, UsageError

CONFIG = "adapter_config.json"
MERGED = ("LORA",)  # kinds of peft that become part of the weights; DoRA and rsLoRA are LoRA too


def check_adapter(adapter: str) -> None:
    """Refuse an adapter that cannot be merged, before any weights are read.

    One of the Hub is checked when it is loaded.

    Args:
        adapter: a directory, or a Hub id.

    Raises:
        UsageError: no such directory, or peft is not installed.
        ModelError: not an adapter, or of a kind that does not become part of the weights.
    """
    folder = Path(adapter).expanduser()
    is_local = folder.is_dir() or folder.exists() or adapter.startswith((".", "/", "~"))
    if is_local or adapter.count("/") != 1:
        if not (folder / CONFIG).is_file():
            raise UsageError(
                "adapter",
                f"adapter={adapter}: no {CONFIG} there.",
                "Name the directory that peft wrote, or a Hub id, as in OWNER/ADAPTER.",
                adapter=adapter,
            )
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            kind = str(config["peft_type"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                "adapter-unreadable", f"{folder / CONFIG} is not a peft config.", "Copy it again."
            ) from error
        _check_kind(kind, adapter)
    from importlib.util import find_spec

    if find_spec("peft") is None:
        raise UsageError(
            "extra-missing",
            "the setting adapter needs peft.",
            "pip install 'arbor-search[adapters]'",
        )


def _check_kind(kind: str, adapter: str) -> None:
    if kind not in MERGED:
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} is an adapter of kind {kind}, which does not become part of the weights.",
            f"arbor merges {', '.join(MERGED)}.",
            adapter=adapter,
            kind=kind,
        )


def merged(model: Any, adapter: str) -> Any:
    """A model with the weights of an adapter added to its own.

    Args:
        model: loaded, not quantized.
        adapter: as in `check_adapter`.

    Raises:
        ModelError: the adapter cannot be read, is of another kind, or does not fit the model.
    """
    from peft import PeftConfig, PeftModel

    folder = Path(adapter).expanduser()
    place = str(folder) if folder.is_dir() else adapter
    try:
        _check_kind(str(PeftConfig.from_pretrained(place).peft_type.value), adapter)
        with_adapter = PeftModel.from_pretrained(model, place)
        found = with_adapter.merge_and_unload(safe_merge=True)
    except ModelError:
        raise
    except Exception as error:  # peft checks little of what a file holds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            "adapter-unreadable",
            f"the adapter {adapter} does not fit the model, or cannot be read: {lines[0][:300]}",
            "Name the model that it was trained on.",
            adapter=adapter,
        ) from error
    return found
