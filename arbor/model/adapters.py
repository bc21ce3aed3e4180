"""Adapters: LoRA weights merged into a model as it is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from arbor.errors import ModelError, UsageError
from arbor.model.hub import cache_if_unreachable, offline_error
from arbor.support.reason import reason_of

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
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
            kind, settings = str(config["peft_type"]), {**config}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                "adapter-unreadable", f"{folder / CONFIG} is not a peft config.", "Copy it again."
            ) from error
        _check_kind(kind, settings, adapter)
        _check_weights(folder, adapter)
    from importlib.util import find_spec

    if find_spec("peft") is None:
        raise UsageError(
            "extra-missing",
            "the setting adapter needs peft.",
            "pip install 'arbor-search[adapters]'",
        )


def _check_kind(kind: str, settings: Mapping[str, Any], adapter: str) -> None:
    """Refuse an adapter that does not become part of the weights, by its config."""
    if kind not in MERGED:
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} is an adapter of kind {kind}, which does not become part of the weights.",
            f"arbor merges {', '.join(MERGED)}.",
            adapter=adapter,
            kind=kind,
        )
    if settings.get("alora_invocation_tokens"):
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} has alora_invocation_tokens: it acts after those, and so does not become "
            "part of the weights.",
            f"arbor merges {', '.join(MERGED)} that acts on every token.",
            adapter=adapter,
        )
    if replicated := settings.get("layer_replication"):
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} has layer_replication={replicated}: its model has more layers than this one.",
            "Save the merged model with peft, and name that.",
            adapter=adapter,
        )


def _check_weights(folder: Path, adapter: str) -> None:
    if not any((folder / each).is_file() for each in WEIGHTS):
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} has neither {' nor '.join(WEIGHTS)}.",
            "Copy the adapter's weights there.",
            adapter=adapter,
        )


def merged(model: Any, adapter: str) -> Any:
    """A model with the weights of an adapter added to its own.

    An embedding and a head that share a weight no longer do if the adapter changes one of them.

    Args:
        model: loaded, not quantized.
        adapter: as in `check_adapter`.

    Raises:
        ModelError: the adapter cannot be had or read, is of another kind, or does not fit the
            model.
    """
    import torch
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    place = _folder_of(adapter)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    try:
        config = PeftConfig.from_pretrained(place)
        _check_kind(str(config.peft_type.value), vars(config), adapter)
        _check_weights(Path(place), adapter)
        # trainable are then the weights that an adapter of this config has, and no other
        with_adapter = PeftModel.from_pretrained(model, place, is_trainable=True)
        own = {name for name, each in with_adapter.named_parameters() if each.requires_grad}
        # peft reads them a second time, since only here it says what it left out
        read = set_peft_model_state_dict(with_adapter, load_peft_weights(place, device="cpu"))
        _check_complete(own & set(read.missing_keys), read.unexpected_keys, adapter)
        _untie(ends, with_adapter)
    except ModelError:
        raise
    except Exception as error:  # peft checks little of what a file holds
        raise _unfit(adapter, f", or cannot be read: {reason_of(error)}") from error
    try:
        found = with_adapter.merge_and_unload(safe_merge=True)
    except Exception as error:
        raise ModelError(
            "adapter-unreadable",
            f"{adapter} cannot be merged into the weights: {reason_of(error)}",
            "Name an adapter that peft's merge_and_unload(safe_merge=True) merges.",
            adapter=adapter,
        ) from error
    ends = [found.get_input_embeddings(), found.get_output_embeddings()]
    if isinstance(ends[1], torch.nn.Linear):  # peft swaps its sizes where it ties it to a new one
        ends[1].out_features, ends[1].in_features = ends[1].weight.shape
    if None not in ends and ends[0].weight is not ends[1].weight:
        found.config.get_text_config().tie_word_embeddings = False
        found.config.tie_word_embeddings = False
    return found


def _folder_of(adapter: str) -> str:
    """The directory of an adapter; one of the Hub is downloaded into the cache.

    Raises:
        ModelError: it is not there, and cannot be downloaded.
    """
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return str(folder)
    from huggingface_hub import snapshot_download

    try:
        with cache_if_unreachable():
            return snapshot_download(adapter, allow_patterns="adapter_*")
    except Exception as error:  # also those of the connection
        unreachable = offline_error(f"the adapter {adapter}", adapter, "or name its directory")
        raise unreachable or ModelError(
            "adapter-unreadable",
            f"{adapter} is neither a directory nor an adapter the Hub gave us: {reason_of(error)}",
            "Name the directory that peft wrote, or a Hub id, as in OWNER/ADAPTER.",
            adapter=adapter,
        ) from error


def _check_complete(missing: Collection[str], unknown: Collection[str], adapter: str) -> None:
    """Refuse an adapter whose file has not the weights that its config has on this model."""
    for names, what in (
        (missing, "its file lacks {} of the weights that its config names, among them {}."),
        (unknown, "its file has {} weights that the model has no place for, among them {}."),
    ):
        if names:
            raise _unfit(
                adapter, ": " + what.format(len(names), min(names).replace(".default", ""))
            )


def _untie(ends: Sequence[Any], with_adapter: Any) -> None:
    """Give the head a weight of its own where it has the embedding's and one of them is adapted."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    tied = None not in ends and ends[0].weight is ends[1].weight
    layers = (each for each in with_adapter.modules() if isinstance(each, BaseTunerLayer))
    if tied and any(layer.get_base_layer() in ends for layer in layers):
        weight = ends[1].weight
        ends[1].weight = type(weight)(weight.detach().clone(), requires_grad=False)


def _unfit(adapter: str, why: str) -> ModelError:
    return ModelError(
        "adapter-unreadable",
        f"the adapter {adapter} does not fit the model{why}",
        "Name the model that it was trained on.",
        adapter=adapter,
    )
