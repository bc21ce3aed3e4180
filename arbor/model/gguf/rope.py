"""Scaling of the rotary embedding of a GGUF file's model, which transformers leaves out.

llama.cpp reads it from settings, ``ARCHITECTURE.rope.scaling.*``, and from tensors of factors:
``rope_freqs`` divide the frequencies at any length, ``rope_factors_short`` and ``_long`` up to a
length and beyond it. The model's text is another without them. What cannot be said in terms of
transformers is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader

FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
GLOBAL = "full_attention"  # layers without a window; the scaling of files with both is theirs
PROPORTIONAL = "gemma4"  # transformers' config of it has what its factors say


def scale_rotary(config: Any, header: GGUFHeader) -> None:
    """Gives a config the scaling of its file, but for `FACTORS`.

    Args:
        config: that transformers made of the file.
        header: of the file.

    Raises:
        ModelError: the scaling has no counterpart in transformers.
    """
    scaling = _scaling(header)
    tensors = {each.name for each in header.tensors}
    if FACTORS in tensors and scaling:
        raise _refused(header, f"{FACTORS} together with rope.scaling")
    if not scaling:
        return
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        raise _refused(header, "rope.scaling of an architecture without rotary embedding")
    if not any(isinstance(part, Mapping) for part in parameters.values()):
        config.rope_parameters = {**parameters, **scaling}
    elif GLOBAL in parameters and scaling["rope_type"] == "linear":
        own = {**parameters[GLOBAL], **scaling}
        config.rope_parameters = {**parameters, GLOBAL: own}
    else:
        raise _refused(header, f"'{scaling['rope_type']}' for layers of several kinds")


def _scaling(header: GGUFHeader) -> dict[str, Any]:
    """The settings of the file in transformers' terms; empty: none."""
    architecture = header.get("general.architecture")

    def given(name: str, otherwise: float) -> Any:
        found = header.get(f"{architecture}.rope.{name}")
        return otherwise if found is None else found

    kind = header.get(f"{architecture}.rope.scaling.type") or "linear"
    factor = given("scaling.factor", given("scale_linear", 0)) or 1.0
    attention = given("scaling.attn_factor", 1.0)
    trained = int(given("scaling.original_context_length", 0) or _context(header))
    short, long = header.floats(SHORT), header.floats(LONG)
    if short or long:
        if not (short and long) or factor != 1.0:
            raise _refused(header, f"{SHORT if short else LONG} with factor {factor:g}")
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": trained,
            "attention_factor": attention,
        }
    if kind == "none" or (kind == "linear" and factor == attention == 1.0):
        return {}
    if kind == "linear" and attention == 1.0:
        return {"rope_type": "linear", "factor": factor}
    unlike = (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0))
    if kind == "yarn" and all(given(f"scaling.{each}", same) == same for each, same in unlike):
        attention *= given("scaling.yarn_attn_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            "attention_factor": attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
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
        f"{header.path}: its rotary embedding is scaled in a way that is not known here: {what}.",
        "Take the model's safetensors.",
        model=str(header.path),
    )
