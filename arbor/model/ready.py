"""A ready model: what its owner has of it while arbor loads it, and afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from arbor.errors import ModelError
from arbor.model.fuse.parts import unfuse


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Within, a ready model becomes arbor's; an error gives it back, with its own attention.

    Its modules then have the modes, configs and forwards they had. Where a weight was packed,
    which is not undone, the model computes with that, and `state_dict` refuses from now on; so it
    does without an error.

    Args:
        model: loaded, its modules perhaps replaced within.
    """
    weights = {name: weakref.ref(each) for name, each in _weights(model).items()}
    modes = {name: each.training for name, each in model.named_modules()}
    configs = {
        name: each.__dict__["config"]
        for name, each in model.named_modules()
        if "config" in each.__dict__
    }
    try:
        yield
    except BaseException:
        unfuse(model)
        for name, each in model.named_modules():
            each.training = modes.get(name, each.training)
            if name in configs:
                each.__dict__["config"] = configs[name]
        raise
    finally:
        now = _weights(model)
        if any(name not in now or now[name] is not each() for name, each in weights.items()):
            model.register_state_dict_pre_hook(_refuse)


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, by each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _refuse(*given: Any) -> None:
    raise ModelError(
        "model-packed",
        "this model's weights are packed for arbor, and cannot be saved.",
        "Save a model before its first search.",
    )
