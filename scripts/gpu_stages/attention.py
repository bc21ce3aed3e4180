"""Stage 2: attention of every backend against float64, over lists so short that each key counts.

A list has 1 to 40 keys. A key that is missing, read twice or taken from another slot changes the
output or the logsumexp of some head by more than the tolerances, which rounding stays below. Slots
that no list names hold NaN. Two cases with long lists follow, for kernels that split them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_stages.rows import Job, needs
from torch import Tensor

from arbor import components, registry
from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    apply_sinks,
)
from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade
from arbor.kernels.int8 import decode, encode

ERROR = 5e-3  # of a row's output, relative to its length; bfloat16 and three levels cost up to 4e-3
LSE_ERROR = 2e-3  # of a logsumexp
MASS_ERROR = 5e-3  # of the attention mass of all slots, relative to its length
MASS_ROWS = 1000  # of larger problems mass is not asked
LONGEST = 40  # keys
QUERY_SIZE = 0.5  # of queries and keys of normal numbers: no key's weight is close to 0
STORED_GROUP = 4  # cases of so many heads to a KV head are read in 8 bits too
DENSE_BYTES = 1 << 30  # of float64 logits at once


@dataclass(frozen=True)
class Case:
    """One attention to check.

    Attributes:
        name: of its row.
        shape: of the layer.
        kind: of the layout: ``short``, ``leaves`` or ``prefill``.
        size: leaves, or rows of a prefill.
        keys: that the leaves share.
        sinks: with attention sinks.
    """

    name: str
    shape: AttentionShape
    kind: str = "short"
    size: int = 0
    keys: int = 0
    sinks: bool = False


@dataclass(frozen=True)
class Problem:
    """Inputs of a case and its float64 result.

    Attributes:
        layout, shape: of the case.
        q, k, v, sinks: as a backend takes them.
        out: [T, H, D] float64.
        lse: [T, H] float64.
        mass: [slots] float64, the attention that each slot receives.
    """

    layout: CascadeLayout
    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    mass: Tensor


def shape(
    heads: int, kv_heads: int, dim: int, window: int | None = None, softcap: float | None = None
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, dim, dim**-0.5, window, softcap)


def cases(small: bool) -> list[Case]:
    """Every case; heads of 256 have a soft cap, as the kernels of the bundle do."""
    found = []
    for dim in (64, 128, 256):
        for group in (1, 2, 4, 5, 7, 8):
            one = shape(2 * group, 2, dim, softcap=50.0 if dim == 256 else None)
            found.append(Case(f"group {group}, heads of {dim}", one))
    for window in (1, 7, 33):
        found.append(Case(f"window of {window}", shape(32, 8, 128, window)))
        found.append(
            Case(f"window of {window}, soft cap, heads of 256", shape(8, 4, 256, window, 50.0))
        )
    # as KV heads with lists of their own are read, see `CellAttention`
    found.append(Case("one KV head", shape(4, 1, 128)))
    found.append(Case("sinks", shape(64, 8, 64), sinks=True))
    found.append(Case("sinks, heads of 128", shape(16, 8, 128), sinks=True))
    leaves, keys, prefills = (8, 64, (48,)) if small else (64, 1024, (256, 8192))
    wide = shape(16, 2, 128) if small else shape(64, 8, 128)
    found.append(Case(f"{leaves} leaves on {keys} keys", wide, "leaves", leaves, keys))
    for rows in prefills:
        one = wide if rows < 1000 else shape(32, 8, 128)
        found.append(Case(f"prefill of {rows}", one, "prefill", rows))
    return found


def level(rows: Sequence[int], lists: Sequence[Any], *, causal: bool) -> CascadeLevel:
    """A level from rows and slots per request."""
    qo = np.cumsum([0, *rows]).astype(np.int32)
    kv = np.cumsum([0, *(len(each) for each in lists)]).astype(np.int32)
    indices = np.concatenate([np.asarray(each, np.int32) for each in lists])
    return CascadeLevel(
        torch.from_numpy(qo), torch.from_numpy(kv), torch.from_numpy(indices), causal=causal
    )


def short_layout(rng: np.random.Generator, slots: Any, shared_levels: int) -> CascadeLayout:
    """Levels of random requests: of one row and of several, with no keys and with up to 40."""
    used = 0

    def take(count: int) -> Any:
        nonlocal used
        used += count
        return slots[used - count : used]

    rows = [int(rng.choice([1, 1, 1, 2, 5])) for _ in range(int(rng.integers(6, 12)))]
    rows[0] = 1
    total = sum(rows)
    levels = []
    for _ in range(shared_levels):
        cuts = np.sort(rng.choice(np.arange(1, total), int(rng.integers(1, 4)), replace=False))
        counts = np.diff([0, *cuts, total])
        lists = [take(int(rng.integers(1, LONGEST + 1))) for _ in counts]
        lists[int(rng.integers(len(lists)))] = take(0)
        levels.append(level(counts.tolist(), lists, causal=False))
    lists = [take(count + int(rng.integers(0, LONGEST - count + 1))) for count in rows]
    lists[0] = take(1)
    levels.append(level(rows, lists, causal=True))
    return CascadeLayout(total, tuple(levels))


def layout_of(case: Case, rng: np.random.Generator, slots: Any) -> CascadeLayout:
    """The layout of a case over these slots, which are in random order."""
    if case.kind == "short":
        return short_layout(rng, slots, 0 if case.shape.window is not None else 2)
    if case.kind == "prefill":
        return CascadeLayout(case.size, (level([case.size], [slots[: case.size]], causal=True),))
    own = [slots[case.keys + 9 * leaf :][: 1 + leaf % 9] for leaf in range(case.size)]
    shared = level([case.size], [slots[: case.keys]], causal=False)
    return CascadeLayout(case.size, (shared, level([1] * case.size, own, causal=True)))


def problem_of(case: Case, seed: int, device: torch.device) -> Problem:
    """Random inputs in bfloat16, and what float64 computes from them."""
    rng = np.random.default_rng(seed)
    pool = {"short": 2048, "leaves": case.keys + 9 * case.size + 64}.get(case.kind, 2 * case.size)
    layout = layout_of(case, rng, rng.permutation(pool).astype(np.int32))
    one = case.shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        made = torch.randn(size, generator=generator, dtype=torch.float32, device=device)
        return made.to(torch.bfloat16)

    q = QUERY_SIZE * normal(layout.rows, one.num_qo_heads, one.head_dim_qk)
    k = normal(pool + 1, one.num_kv_heads, one.head_dim_qk)
    v = normal(pool + 1, one.num_kv_heads, one.head_dim_vo)
    unused = torch.ones(pool + 1, dtype=torch.bool)
    for each in layout.levels:
        unused[each.kv_indices.long()] = False
    k[unused.to(device)] = torch.nan
    v[unused.to(device)] = torch.nan
    sinks = normal(one.num_qo_heads) if case.sinks else None
    return Problem(layout, one, q, k, v, sinks, *exact(layout, one, q, k, v, sinks))


def visible(layout: CascadeLayout, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """The slots a layout names, int64 [U], and which of them each row reads, bool [T, U]."""
    slots = torch.cat([each.kv_indices for each in layout.levels]).long().unique()
    mask = torch.zeros(layout.rows, len(slots), dtype=torch.bool)
    for each in layout.levels:
        rows, ends = each.qo_indptr.tolist(), each.kv_indptr.tolist()
        for request in range(len(rows) - 1):
            keys = each.kv_indices[ends[request] : ends[request + 1]].long()
            first, end, count = rows[request], rows[request + 1], len(keys)
            last = torch.arange(first, end)[:, None] - end + count  # of each row, end-aligned
            place = torch.arange(count)[None, :]
            reads = torch.ones(end - first, count, dtype=torch.bool)
            if each.causal:
                reads &= place <= last
                if shape.window is not None:
                    reads &= place > last - shape.window
            mask[first:end, torch.searchsorted(slots, keys)] |= reads
    return slots, mask


def exact(
    layout: CascadeLayout,
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float64 over the union of the lists, with a mask, some rows at a time: outputs,
    logsumexps and mass."""
    slots, mask = visible(layout, shape)
    index = slots.to(q.device)
    keys = k[index].double().repeat_interleave(shape.group, 1).transpose(0, 1)  # [H, U, D]
    values = v[index].double().repeat_interleave(shape.group, 1).transpose(0, 1)
    at_once = max(1, DENSE_BYTES // (8 * shape.num_qo_heads * max(1, len(slots))))
    outs, sums = [], []
    mass = torch.zeros(len(k), dtype=torch.float64, device=q.device)
    for part in range(0, layout.rows, at_once):
        queries = q[part : part + at_once].double().transpose(0, 1)
        logits = queries @ keys.transpose(1, 2) * shape.scaling
        if shape.softcap is not None:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        logits.masked_fill_(~mask[part : part + at_once].to(q.device), -torch.inf)
        lse = torch.logsumexp(logits, -1)
        outs.append((torch.exp(logits - lse[..., None]) @ values).transpose(0, 1))
        sums.append(lse.transpose(0, 1))
        whole = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
        mass[index] += torch.exp(logits - whole[..., None]).sum((0, 1))
    out, lse = torch.cat(outs), torch.cat(sums)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return out, lse, mass


def stored(problem: Problem) -> Problem:
    """The same over 8-bit KV, with what float64 computes from the numbers that it holds."""
    shape = problem.shape
    k, v = encode(problem.k), encode(problem.v)
    numbers = decode(k, shape.head_dim_qk), decode(v, shape.head_dim_vo)
    out, lse, mass = exact(problem.layout, shape, problem.q, *numbers, problem.sinks)
    return dataclasses.replace(problem, k=k, v=v, out=out, lse=lse, mass=mass)


def errors(backend: AttentionBackend, problem: Problem, layout: CascadeLayout) -> dict[str, Any]:
    """The largest error of a row's output, relative to its length, and of any logsumexp, that of
    the attention mass, and whether all are small enough.

    Args:
        backend: is checked.
        problem: has the inputs and the right result.
        layout: the backend reads; the problem's own, except in a test of this function.
    """
    plan = backend.plan(layout, problem.shape)
    out, lse = backend.run(plan, problem.q, problem.k, problem.v, problem.sinks)
    length = problem.out.flatten(1).norm(dim=1)
    error = float(((out.double() - problem.out).flatten(1).norm(dim=1) / length).max())
    lse_error = float((lse.double() - problem.lse).abs().max())
    found = {"error": error, "lse_error": lse_error}
    if len(out) < MASS_ROWS:
        mass = backend.mass(plan, problem.q, problem.k, lse).double()
        found["mass_error"] = float((mass - problem.mass).norm() / problem.mass.norm())
    if any(map(math.isnan, found.values())):
        return {**dict.fromkeys(found), "ok": False, "reason": "NaN"}
    limits = {"error": ERROR, "lse_error": LSE_ERROR, "mass_error": MASS_ERROR}
    return {**found, "ok": all(value < limits[name] for name, value in found.items())}


def without_key(layout: CascadeLayout, index: int, place: int) -> CascadeLayout:
    """A layout that misses one key of one level, as a faulty one would."""
    old = layout.levels[index]
    counts = old.kv_indptr.clone()
    counts[counts > place] -= 1
    keys = torch.cat([old.kv_indices[:place], old.kv_indices[place + 1 :]])
    levels = list(layout.levels)
    levels[index] = dataclasses.replace(old, kv_indptr=counts, kv_indices=keys)
    return dataclasses.replace(layout, levels=tuple(levels))


def backend_of(part: str, device: torch.device) -> AttentionBackend:
    """The backend of a part.

    Raises:
        NotAvailable: FlashInfer's, which is not installed.
    """
    if part == "flashinfer":
        needs(part)
        return FlashInferCascade(device)
    backend: AttentionBackend = components.build("backend", part)
    return backend


def backends_of(part: str, device: torch.device) -> list[str]:
    """Names of the backends that a part checks: its own, and with `rowwise` those added later."""
    if part != "rowwise":
        return [part]
    elsewhere = {"native"} if device.type == "cuda" else {"invariant"}
    others = {*registry.names("backend")} - {"rowwise", "torch", "triton", *elsewhere}
    return [part, *sorted(others)]


def built(job: Job, names: Sequence[str]) -> dict[str, AttentionBackend]:
    """Backends by their names, without those that cannot be made; each of these is a row."""
    found: dict[str, AttentionBackend] = {}
    for name in names:
        with job.checking(name, backend=name):
            found[name] = backend_of(name, torch.device(job.device))
    return found


def run(job: Job) -> None:
    """Check every case with the part's backends; a case that raises does not stop the others."""
    device = torch.device(job.device)
    backends = built(job, backends_of(job.part, device))
    todo = [(name, case) for name in backends for case in cases(job.small)]
    while todo and job.left_s > 0:
        name, case = todo.pop(0)
        if job.part == "rowwise" and case.kind == "prefill":
            continue  # reads a list per row
        about: dict[str, Any] = {"backend": name, "seed": job.seed}
        with job.checking(case.name, **about), torch.inference_mode():
            problem = problem_of(case, job.seed, device)
            job.row(case.name, **about, **errors(backends[name], problem, problem.layout))
            if name == "triton" and case.kind == "short" and case.shape.group == STORED_GROUP:
                found = errors(backends[name], stored(problem), problem.layout)
                job.row(f"{case.name}, 8-bit KV", **about, **found)
        job.seed += 1
    job.end([f"{name}: {case.name}" for name, case in todo])
