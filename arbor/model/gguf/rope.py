"""The rotary embedding of a GGUF file's model, of which transformers reads a part.

llama.cpp reads it from settings, ``ARCHITECTURE.rope.*``: the base of its frequencies, how many
numbers of a head it rotates, and how it is scaled. Tensors scale it too: ``rope_freqs`` divide the
frequencies at any length, ``rope_factors_short`` and ``_long`` up to a length and beyond it. The
model's text is another without them. What cannot be said in terms of transformers is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader

FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
GLOBAL = "full_attention"  # layers without a window; the scaling of files with both is theirs
LOCAL = "sliding_attention"  # layers with one
BASES = {GLOBAL: "freq_base", LOCAL: "freq_base_swa"}
PART = "partial_rotary_factor"  # in the parameters of architectures that rotate a part of a head
TRAINED = "original_max_position_embeddings"  # Phi3's config has it too, and reads it there
PROPORTIONAL = "gemma4"  # transformers' config of it has what its factors say


def set_rotary(config: Any, header: GGUFHeader) -> None:
    """Gives a config the rotary embedding of its file, but for `FACTORS`.

    Args:
        config: that transformers made of the file.
        header: of the file.

    Raises:
        ModelError: the rotary embedding has no counterpart in transformers.
    """
    parameters = getattr(config, "rope_parameters", None)
    width, rotated = _widths(header)
    scaling = _scaling(header, rotated // 2)
    tensors = {each.name for each in header.tensors}
    if FACTORS in tensors and scaling:
        raise _refused(header, f"{FACTORS} together with rope.scaling")
    if not isinstance(parameters, Mapping):
        if scaling:
            raise _refused(header, "rope.scaling of an architecture without rotary embedding")
        return
    own: dict[str, Any]
    if any(isinstance(part, Mapping) for part in parameters.values()):
        own = {
            kind: {**part, **_base(header, BASES.get(kind, ""))}
            for kind, part in parameters.items()
        }
        if scaling and (GLOBAL not in own or scaling["rope_type"] != "linear"):
            raise _refused(header, f"'{scaling['rope_type']}' for layers of several kinds")
        if scaling:
            own[GLOBAL] |= scaling
    else:
        own = {**parameters, **_base(header, BASES[GLOBAL]), **scaling}
        local = _base(header, BASES[LOCAL]).get("rope_theta", own["rope_theta"])
        if local != own["rope_theta"]:
            raise _refused(header, f"rope.{BASES[LOCAL]} {local:g} of layers with a window alone")
        if PART in parameters and width:
            own[PART] = rotated / width
    if width and rotated != int(width * own.get(PART, 1.0)):
        raise _refused(header, f"rope.dimension_count {rotated} of {width} numbers of a head")
    part = int(_given(header, "dimension_count_swa", rotated))
    if part != rotated and header.get("general.architecture") != PROPORTIONAL:
        raise _refused(header, f"rope.dimension_count_swa {part} of layers with a window alone")
    config.rope_parameters = own
    if TRAINED in own and hasattr(config, TRAINED):
        setattr(config, TRAINED, own[TRAINED])


def _base(header: GGUFHeader, name: str) -> dict[str, float]:
    """The base of the frequencies in transformers' terms; empty where it is that of its config."""
    found = _given(header, name, 10000.0 if name == BASES[GLOBAL] else None)
    return {} if found is None else {"rope_theta": float(found)}


def _given(header: GGUFHeader, name: str, otherwise: Any) -> Any:
    """A setting of the rotary embedding."""
    found = header.get(f"{header.get('general.architecture')}.rope.{name}")
    return otherwise if found is None else found


def _widths(header: GGUFHeader) -> tuple[int, int]:
    """Numbers of a head, and how many of them are rotated; 0 where the file does not say it."""
    kind = header.get("general.architecture")
    heads = header.get(f"{kind}.attention.head_count")
    width = header.get(f"{kind}.attention.key_length")
    if width is None and isinstance(heads, int):
        width = header.get(f"{kind}.embedding_length") // heads
    width = width if isinstance(width, int) else 0
    return width, int(_given(header, "dimension_count", width))


def _scaling(header: GGUFHeader, frequencies: int) -> dict[str, Any]:
    """The scaling of the file in transformers' terms; empty: none."""

    def given(name: str, otherwise: Any) -> Any:
        return _given(header, name, otherwise)

    kind = given("scaling.type", "") or "linear"
    factor = given("scaling.factor", given("scale_linear", 0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    attention = given("scaling.attn_factor", 1.0)
    trained = int(given("scaling.original_context_length", 0) or _context(header))
    short, long = header.floats(SHORT), header.floats(LONG)
    if short or long:
        if not (short and long) or factor != 1.0:
            raise _refused(header, f"{SHORT if short else LONG} with factor {factor:g}")
        if {len(short), len(long)} != {frequencies}:
            numbers = f"{SHORT} of {len(short)} numbers and {LONG} of {len(long)}"
            raise _refused(header, f"{numbers} for {frequencies} frequencies")
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            TRAINED: trained,
            "attention_factor": attention,
        }
    if kind in ("none", "linear") and attention == 1.0:
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    unlike = (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0))
    if kind == "yarn" and all(given(f"scaling.{each}", same) == same for each, same in unlike):
        whole = given("scaling.yarn_attn_factor", None)
        if whole is None:
            whole = 1.0 + 0.1 * math.log(max(factor, 1.0))
        return {
            "rope_type": "yarn",
            "factor": factor,
            TRAINED: trained,
            "attention_factor": attention * whole,
            "beta_fast": given("scaling.yarn_beta_fast", 32.0),
            "beta_slow": given("scaling.yarn_beta_slow", 1.0),
        }
    raise _refused(header, f"rope.scaling of type '{kind:.20}', attn_factor {attention:g}")


def _context(header: GGUFHeader) -> int:
    return int(header.get(f"{header.get('general.architecture')}.context_length") or 0)


def divide_frequencies(model: Any, header: GGUFHeader) -> None:
    """Divides the frequencies of a model by `FACTORS` of its file.

    Args:
        model: with the weights of the file.
        header: of the file.

    Raises:
        ModelError: its rotary embedding is not the one that the factors belong to.
    """
    factors = header.floats(FACTORS)
    if not factors or header.get("general.architecture") == PROPORTIONAL:
        return
    found = [module for module in model.modules() if hasattr(module, "inv_freq")]
    if not found or any(module.inv_freq.shape != (len(factors),) for module in found):
        raise _refused(header, f"{FACTORS} of {len(factors)} numbers")
    for module in found:
        frequencies = module.inv_freq
        module.inv_freq = frequencies / frequencies.new_tensor(factors)


def _refused(header: GGUFHeader, what: str) -> ModelError:
    return ModelError(
        "model-gguf",
        f"{header.path}: its rotary embedding is of a kind that is not known here: {what}.",
        "Take the model's safetensors.",
        model=str(header.path),
    )
