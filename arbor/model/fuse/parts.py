"""Fused norms and gated activations in a loaded model, where they compute what the model does.

Modules are found by structure, whatever their class is named, and each is compared with its own
forward on random rows before it is changed. Attention layers with their rotary embedding are the
subject of `arbor.model.fuse.attention`. Residual sums stay as they are: decoder layers compute them
between their modules.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from arbor.kernels.fused.parts import ACTIVATIONS, NORM_FORMS, FusedOps
from arbor.kernels.linear.layers import DenseJoint, JointLinear, dense_joint, joint_linear

logger = logging.getLogger(__name__)

# Rows of the random inputs, one input each.
ROWS = (1, 3, 64)
# Largest relative difference of a value of a norm: in half precision, a last bit for each rounding.
NORM_TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
}
# Largest difference of a row of a gated part, relative to its norm: few values differ, by a bit.
GATED_TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}
# Absolute differences below it pass: float16 numbers that small have few bits.
SMALLEST = 1e-6
EPS_NAMES = ("variance_epsilon", "eps")
# Modules of a gated part: its projections, and its activation.
SEPARATE = {"gate_proj", "up_proj", "down_proj", "act_fn"}
JOINT = {"gate_up_proj", "down_proj", "activation_fn"}


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What `fuse` did.

    Attributes:
        norms, gated: names of the fused modules.
        kept: name -> reason, of modules that look alike and stay as they are.
    """

    norms: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)


OF_ANY_MODULE = frozenset(vars(nn.Module()))  # attributes that are no settings


class Fused(nn.Module):
    """A module with a fused forward, as a subclass of its own class; hooks and weights stay.

    The kernels have no derivatives: where torch records any, the module's own forward runs.
    """

    _arbor_own: type[nn.Module]
    _arbor_ops: FusedOps
    _arbor_form: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The fused forward for one tensor like those that were compared, else its own."""
        if len(args) == 1 and not kwargs and not torch.is_grad_enabled():
            found = self._fused(args[0])
            if found is not None:
                return found
        return super().forward(*args, **kwargs)

    def _fused(self, x: Tensor) -> Tensor | None:
        raise NotImplementedError


class FusedNorm(Fused):
    """An RMS norm as one kernel; its form is a `NormForm`."""

    _arbor_eps: float

    @property
    def epsilon(self) -> float:
        """The number under the root."""
        return float(self._arbor_eps)

    def _fused(self, x: Tensor) -> Tensor | None:
        weight: Any = self.weight
        if x.dtype != weight.dtype or x.shape[-1] != len(weight):
            return None
        return self._arbor_ops.rms_norm(x, weight, self._arbor_eps, self._arbor_form)


class FusedGated(Fused):
    """A gated part whose activation and product are one kernel; its form is an `Activation`."""

    down_proj: nn.Module

    @property
    def projections(self) -> Sequence[nn.Module | JointLinear | DenseJoint]:
        """What computes the gate and its factor, in this order."""
        raise NotImplementedError


class _FusedSeparate(FusedGated):
    gate_proj: nn.Module
    up_proj: nn.Module

    @property
    def projections(self) -> Sequence[nn.Module | JointLinear | DenseJoint]:
        joint = getattr(self, "_arbor_joint", None)
        return [self.gate_proj, self.up_proj] if joint is None else [joint]

    def _fused(self, x: Tensor) -> Tensor:
        joint: JointLinear | DenseJoint | None = getattr(self, "_arbor_joint", None)
        if joint is None or joint.hooked:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            both = joint(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            gate, up = both.chunk(2, dim=-1)
        found: Tensor = self.down_proj(self._arbor_ops.gated(gate, up, self._arbor_form))
        return found


class _FusedJoint(FusedGated):
    gate_up_proj: nn.Module

    @property
    def projections(self) -> Sequence[nn.Module | JointLinear | DenseJoint]:
        return [self.gate_up_proj]

    def _fused(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        found: Tensor = self.down_proj(self._arbor_ops.gated(gate, up, self._arbor_form))
        return found


_SUBCLASSES: dict[tuple[type[Fused], type[nn.Module]], type[Fused]] = {}


@torch.inference_mode()
def fuse(model: nn.Module, ops: FusedOps) -> FuseReport:
    """Let the norms and gated parts of a model run by fused kernels, in place.

    A module is changed only if its results agree with those of its own forward: for random inputs
    of the model's dtype with 1, 3 and 64 rows of several sizes, without the products of gated
    parts, which stay as they are; so gated parts that differ in weights alone are compared once.
    Modules that an earlier call fused are compared anew. Hooks of a gated part's activation do not
    run any more.

    Args:
        model: weights loaded, in eval mode.
        ops: the kernels; one that fails leaves the whole model as it is, with one warning.

    Returns:
        What was fused.
    """
    unfuse(model)
    fused: dict[str, list[str]] = {"norms": [], "gated": []}
    kept: dict[str, str] = {}
    known: dict[Any, Any] = {}
    for name, module in list(model.named_modules()):
        kind, reason = "", ""
        try:
            if _is_norm(module):
                kind, reason = "norms", _fuse_norm(module, ops)
            elif _is_gated(module):
                kind, reason = "gated", _fuse_gated(module, ops, known)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, loaders and CUDA fail in many ways
            unfuse(model)
            lines = str(error).strip().splitlines() or [""]
            logger.warning(
                "norms and activations are not fused: %s: %s", type(error).__name__, lines[0]
            )
            return FuseReport()
        if reason:
            kept[name] = reason
        elif kind:
            fused[kind].append(name)
    for kind, names in fused.items():
        logger.debug("fused %s: %d", kind, len(names))
    if kept:
        name, reason = next(iter(kept.items()))
        logger.debug("not fused: %d, among them %s: %s", len(kept), name, reason)
    return FuseReport(tuple(fused["norms"]), tuple(fused["gated"]), kept)


def unfuse(model: nn.Module) -> None:
    """Give every module that `fuse` changed its own forward back."""
    for module in model.modules():
        if isinstance(module, Fused):
            remove(module)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has nothing but a weight of one dimension and an epsilon."""
    weights = dict(module.named_parameters(recurse=False))
    return (
        list(weights) == ["weight"]
        and weights["weight"].dim() == 1
        and not list(module.children())
        and isinstance(_eps(module), float)
        and _takes_a_tensor(module)
    )


def _is_gated(module: nn.Module) -> bool:
    """Whether a module consists of the projections of a gated part and an activation."""
    names = {name for name, _ in module.named_children()}
    own = list(module.parameters(recurse=False))
    return names in (SEPARATE, JOINT) and not own and _takes_a_tensor(module)


def _takes_a_tensor(module: nn.Module) -> bool:
    """Whether a module has its class's forward, and that needs one argument."""
    if "forward" in vars(module):
        return False
    _, *others = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in others if p.default is p.empty and p.kind in kinds]) == 1


def _eps(module: nn.Module) -> Any:
    return next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), None)


def _fuse_norm(module: nn.Module, ops: FusedOps) -> str:
    """Fuse a norm; the reason if it stays."""
    weight: Any = module.weight
    if weight.dtype not in NORM_TOLERANCE:
        return f"no kernels for {weight.dtype}"
    tolerance = NORM_TOLERANCE[weight.dtype]
    # Small rows show what is added under the root, large ones a limit.
    inputs = _inputs(len(weight), weight, (1.0, _eps(module) ** 0.5, 30.0))

    def errors(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return (found - wanted).abs(), SMALLEST + tolerance * wanted.abs()

    return _compare(module, FusedNorm, ops, NORM_FORMS, inputs, errors)


def _fuse_gated(module: nn.Module, ops: FusedOps, known: dict[Any, Any]) -> str:
    """Fuse a gated part; the reason if it stays.

    known: forms of those that were compared, by `_settings` and what else a comparison sees.
    """
    joint = hasattr(module, "gate_up_proj")
    projection: Any = module.gate_up_proj if joint else module.gate_proj
    sizes = [getattr(projection, name, None) for name in ("in_features", "out_features")]
    width, outputs = sizes
    weight = getattr(projection, "weight", None)
    if not isinstance(width, int) or not isinstance(outputs, int) or not isinstance(weight, Tensor):
        return "its projections are of an unknown kind"
    if weight.dtype not in GATED_TOLERANCE:
        return f"no kernels for {weight.dtype}"
    tolerance = GATED_TOLERANCE[weight.dtype]
    inputs = _inputs(width, weight, (1.0, 0.1, 8.0))  # large ones show a limit

    def errors(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return (found - wanted).norm(dim=-1), SMALLEST + tolerance * wanted.norm(dim=-1)

    kind = _FusedJoint if joint else _FusedSeparate
    names = ("gate_up_proj",) if joint else ("gate_proj", "up_proj")
    settings = _settings(module, (*names, "down_proj"))
    seen = (settings, width, outputs, weight.dtype, weight.device)
    if seen in known:
        install(module, kind, ops, known[seen])
        if not joint:
            _join(module, inputs, errors)
        return ""
    own = {name: getattr(module, name) for name in (*names, "down_proj")}
    try:
        for number, name in enumerate(names):
            setattr(module, name, _Spread(outputs, 7 + 4 * number))
        module.down_proj = Folded(width)
        reason = _compare(module, kind, ops, ACTIVATIONS, inputs, errors)
    finally:
        for name, each in own.items():
            setattr(module, name, each)
    if not reason and settings is not None:
        fused: Any = module
        known[seen] = fused._arbor_form
    if not reason and not joint:
        _join(module, inputs, errors)
    return reason


def _settings(module: nn.Module, projections: Sequence[str]) -> Any:
    """What decides a forward beside the projections; None if that is not known to be alike in two
    modules where it is equal."""
    found: list[Any] = [type(module)]
    for name, value in sorted(vars(module).items()):
        if name not in OF_ANY_MODULE:
            plain = value is None or isinstance(value, bool | int | float | str)
            found.append((name, value if plain else id(value)))
    if any(True for _ in module.buffers(recurse=False)):
        return None
    for name, child in module.named_children():
        if name not in projections:
            inner = _settings(child, ())
            if inner is None or any(True for _ in child.parameters()):
                return None
            found.append((name, inner))
    return tuple(found)


class _Spread(nn.Module):
    """In place of a projection in a trial: numbers of the input in another order, and repeated.

    What surrounds projections shows without the time of their products.
    """

    def __init__(self, outputs: int, step: int) -> None:
        super().__init__()
        self._places = torch.arange(outputs) * step

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return x[..., (self._places % x.shape[-1]).to(x.device)]


class Folded(nn.Module):
    """In place of the last projection in a trial: sums of the numbers that lie so far apart."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        rows = nn.functional.pad(x.float(), (0, -x.shape[-1] % self._outputs))
        return rows.unflatten(-1, (-1, self._outputs)).sum(-2).to(x.dtype)


def _join(
    module: Any,
    inputs: Sequence[Tensor],
    errors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """Multiply the projections of a fused gated part as one where that is possible, and gives the
    same up to rounding."""
    pair = (module.gate_proj, module.up_proj)
    module._arbor_joint = joint_linear(pair)
    if module._arbor_joint is not None or not joins_dense(inputs[0]):
        return
    own = [module.forward(x).float() for x in inputs]
    module._arbor_joint = dense_joint(pair)
    found = map(errors, (module.forward(x).float() for x in inputs), own)
    if not all(bool((error <= bound).all()) for error, bound in found):
        module._arbor_joint = None


def _inputs(width: int, like: Tensor, sizes: Sequence[float]) -> list[Tensor]:
    """`random_rows` for each number of `ROWS`."""
    generator = torch.Generator(like.device).manual_seed(0)
    return [random_rows(count, width, like, sizes, generator) for count in ROWS]


def random_rows(
    count: int, width: int, like: Tensor, sizes: Sequence[float], generator: torch.Generator
) -> Tensor:
    """Random rows [1, count, width], neighbours of different sizes, in the dtype of `like`."""
    made: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    x = torch.randn(1, count, width, generator=generator, **made)
    scale = [sizes[row % len(sizes)] for row in range(count)]
    return (x * torch.tensor(scale, **made)[:, None]).to(like.dtype)


def _compare(
    module: nn.Module,
    kind: type[Fused],
    ops: FusedOps,
    forms: Sequence[Any],
    inputs: Sequence[Tensor],
    errors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> str:
    """Fuse a module in the form that comes closest to its own forward; the reason if none agrees.

    Args:
        errors: of fused and own results, float32: errors, and the largest ones that pass.
    """
    own = []
    for x in inputs:
        try:
            result = module.forward(x)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of an unknown module
            return f"its forward fails for random rows: {type(error).__name__}"
        if not isinstance(result, Tensor) or (result.shape, result.dtype) != (x.shape, x.dtype):
            return "its forward returns something other than a tensor like the input"
        own.append(result.float())
    least, chosen, sum_chosen = math.inf, None, math.inf
    for form in forms:
        install(module, kind, ops, form)
        try:
            results = [module.forward(x).float() for x in inputs]
        finally:
            remove(module)
        found, bounds = zip(*map(errors, results, own), strict=True)
        worst = torch.stack([(e / b).max() for e, b in zip(found, bounds, strict=True)]).max()
        total = torch.stack([each.sum() for each in found]).sum()
        worst_error, sum_error = torch.stack([worst, total]).tolist()
        if worst_error <= 1 and sum_error < sum_chosen:
            chosen, sum_chosen = form, sum_error
        least = min(least, worst_error)
    if chosen is None:
        return f"its results differ by {least:.2g} tolerances or more"
    install(module, kind, ops, chosen)
    return ""


def joins_dense(x: Tensor) -> bool:
    """Whether layers that read x are multiplied as one where their weights are not packed."""
    return x.is_cuda


def install(module: nn.Module, kind: type[Fused], ops: Any, form: Any) -> None:
    """Give a module the forward of a kind, with kernels and a form for it."""
    module.__class__ = _subclass(kind, type(module))
    fused: Any = module
    fused._arbor_ops, fused._arbor_form = ops, form
    if kind is FusedNorm:
        fused._arbor_eps = _eps(module)


def remove(module: Any) -> None:
    """Give a fused module its own forward back."""
    for name in [name for name in vars(module) if name.startswith("_arbor_")]:
        delattr(module, name)
    module.__class__ = module._arbor_own


def _subclass(kind: type[Fused], own: type[nn.Module]) -> type[Fused]:
    if (kind, own) not in _SUBCLASSES:
        _SUBCLASSES[kind, own] = type(f"Fused{own.__name__}", (kind, own), {"_arbor_own": own})
    return _SUBCLASSES[kind, own]
