"""PackedStore: KV in host memory in 8 or 4 bits; lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from arbor.errors import OutOfMemory
from arbor.memory.out_of_memory import lower_tier
from arbor.memory.records import Records
from arbor.support.packed_size import GROUP, packed_bytes
from arbor.support.shortage import is_out_of_memory
from arbor.tree import Tier


@dataclass(frozen=True, slots=True)
class Scales:
    """The grid of each group of numbers.

    Attributes:
        low: float16, the least number.
        step: float16, likewise shaped, what a code is worth.
    """

    low: Tensor
    step: Tensor

    @classmethod
    def of(cls, x: Tensor, dim: int, bits: int) -> Self:
        """The grid that holds all numbers along a dimension, which is kept with size 1.

        Numbers beyond float16 become its largest.

        Args:
            x: floating point.
            dim: numbers along it are a group.

        Example:
            >>> scales = Scales.of(torch.tensor([[-1.0, 0.25, 2.0]]), 1, 2)
            >>> scales.low.item(), scales.step.item()
            (-1.0, 1.0)
        """
        x = _within_half(x)
        low = _towards(x.amin(dim, keepdim=True), -math.inf)
        span = x.amax(dim, keepdim=True) - low.float()
        return cls(low, _towards(span / (2**bits - 1), math.inf))

    def encode(self, x: Tensor) -> Tensor:
        """Codes of numbers, uint8; `x` broadcasts with the scales."""
        step = torch.where(self.step == 0, 1.0, self.step.float())
        return ((_within_half(x) - self.low.float()) / step).round_().to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers of codes, float32."""
        return codes.float().mul_(self.step.float()).add_(self.low.float())


def _within_half(x: Tensor) -> Tensor:
    """Numbers as float32, those beyond float16 as its largest."""
    most = torch.finfo(torch.float16).max
    return x.float().clamp(-most, most)


def _towards(x: Tensor, end: float) -> Tensor:
    """float32 as float16, rounded towards an end."""
    half = x.to(torch.float16)
    wrong = half.float() < x if end > 0 else half.float() > x
    return torch.where(wrong, torch.nextafter(half, torch.full_like(half, end)), half)


def packed_width(numbers: int, bits: int) -> int:
    """Bytes of so many codes.

    Example:
        >>> packed_width(5, 8), packed_width(5, 4), packed_width(5, 2)
        (5, 3, 2)
    """
    return -(-numbers * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes next to each other in bytes, the first one lowest.

    Args:
        codes: uint8 [..., n], below 2 ** bits.

    Returns:
        uint8 [..., packed_width(n, bits)].

    Example:
        >>> packed = pack(torch.tensor([1, 2, 15], dtype=torch.uint8), 4)
        >>> packed.tolist(), unpack(packed, 3, 4).tolist()
        ([33, 15], [1, 2, 15])
    """
    each = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed = codes[..., 0].clone()
    for place in range(1, each):
        packed |= codes[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, numbers: int, bits: int) -> Tensor:
    """The codes that `pack` was given, uint8 [..., numbers]."""
    each = 8 // bits
    most = 2**bits - 1
    parts = [(packed >> (place * bits)) & most for place in range(each)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :numbers]


class PackedStore:
    """KV in host memory as codes and scales, quantised once from full precision.

    K has scales per channel, over `GROUP` tokens, and V per token, over `GROUP` channels (KIVI,
    arXiv 2402.02750). Tokens wait in full precision until their group is complete, whatever blocks
    they belong to, and come back exact until then. The group is quantised once: a record that is
    read afterwards stays, so that its token can return to it. Records are free only as a whole
    group.

    Args:
        records: how many it can hold.
        keys: numbers per token that are K, the first ones of a row.
        numbers: numbers per token, `KVPool.numbers`.
        dtype: of the pool, floating point.
        bits: of a code, 8, 4 or 2.

    Raises:
        UsageError: the machine has less memory than that.
    """

    tier = Tier.COMPRESSED
    keeps = True
    group = GROUP

    def __init__(
        self, records: int, keys: int, numbers: int, dtype: torch.dtype, bits: int
    ) -> None:
        self.records = records
        self.bits = bits
        self._keys = keys
        self._values = numbers - keys
        self._dtype = dtype
        groups = -(-records // self.group)
        half = torch.float16
        value_groups = -(-self._values // GROUP)
        self._open = -1  # the group whose tokens wait
        wanted = packed_bytes(records, numbers, dtype.itemsize, bits)
        with lower_tier(wanted), torch.inference_mode(False):
            self._packed = np.zeros(groups, np.bool_)
            self._waiting = torch.empty(self.group, numbers, dtype=dtype)
            self._codes = torch.empty(records, packed_width(numbers, bits), dtype=torch.uint8)
            self._key_scales = torch.empty(2, groups, keys, dtype=half)
            self._value_scales = torch.empty(2, records, value_groups, dtype=half)

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, and the tokens that wait."""
        parts = (self._waiting, self._codes, self._key_scales, self._value_scales)
        return sum(part.nbytes for part in parts)

    def write(self, records: Records, rows: Tensor) -> NDArray[np.bool_]:
        """See `Store`; without memory to work in, the tokens of a group are not stored.

        Args:
            records: those of a group in increasing order, over all calls until it is free again.
            rows: as in `Store`.
        """
        rows = rows.to("cpu")
        stored = np.ones(len(records), np.bool_)
        cuts = np.flatnonzero(np.diff(records // self.group)) + 1
        for places in np.split(np.arange(len(records)), cuts):
            if not len(places):
                continue
            try:
                self._add(records[places], rows[places])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                stored[places] = False
        return stored

    def _add(self, records: Records, rows: Tensor) -> None:
        """Records of one group: it is quantised once its last one is there."""
        group = int(records[0]) // self.group
        self._packed[group], self._open = False, group
        self._waiting[torch.from_numpy(records % self.group)] = rows
        first = group * self.group
        end = min(self.records, first + self.group)
        if int(records[-1]) + 1 == end:
            self._quantise(group, first, end)

    def _quantise(self, group: int, first: int, end: int) -> None:
        rows = self._waiting[: end - first]
        keys, values = rows[:, : self._keys], self._grouped(rows[:, self._keys :])
        by_channel, by_token = self._scales(keys, values)
        codes = by_token.encode(values).flatten(1)[:, : self._values]
        self._codes[first:end] = pack(torch.cat([by_channel.encode(keys), codes], 1), self.bits)
        for place, scales in enumerate((by_channel.low, by_channel.step)):
            self._key_scales[place, group] = scales[0]
        for place, scales in enumerate((by_token.low, by_token.step)):
            self._value_scales[place, first:end] = scales.squeeze(2)
        self._packed[group] = True

    def _scales(self, keys: Tensor, values: Tensor) -> tuple[Scales, Scales]:
        """The grids of a group of tokens.

        Args:
            keys: [n, keys].
            values: [n, groups, GROUP].

        Returns:
            of K, [1, keys], and of V, [n, groups, 1].
        """
        return Scales.of(keys, 0, self.bits), Scales.of(values, 2, self.bits)

    def _grouped(self, values: Tensor) -> Tensor:
        """Numbers of V by their groups, [n, groups, GROUP]; the last number fills the last one."""
        short = -self._values % GROUP
        if short:
            values = torch.cat([values, values[:, -1:].expand(-1, short)], 1)
        return values.unflatten(1, (-1, GROUP))

    def read(self, records: Records, device: torch.device) -> tuple[Tensor, NDArray[np.bool_]]:
        """See `Store`; the numbers are those of the codes.

        Not intact are tokens of a group that could not be quantised.
        """
        rows = torch.zeros(len(records), self._keys + self._values, dtype=self._dtype)
        packed = self._packed[records // self.group]
        waiting = self._waits(records)
        if waiting.any():
            rows[torch.from_numpy(waiting)] = self._waiting[
                torch.from_numpy(records[waiting] % self.group)
            ]
        if packed.any():
            index = torch.from_numpy(records[packed].astype(np.int64))
            rows[torch.from_numpy(packed)] = self._decoded(index).to(self._dtype)
        return rows.to(device), packed | waiting

    def _decoded(self, index: Tensor) -> Tensor:
        """The numbers of packed records, float32."""
        codes = unpack(self._codes[index], self._keys + self._values, self.bits)
        groups = index // self.group
        by_channel = Scales(self._key_scales[0, groups], self._key_scales[1, groups])
        by_token = Scales(
            self._value_scales[0, index].unsqueeze(2), self._value_scales[1, index].unsqueeze(2)
        )
        values = F.pad(codes[:, self._keys :], (0, -self._values % GROUP)).unflatten(1, (-1, GROUP))
        decoded = by_token.decode(values).flatten(1)[:, : self._values]
        return torch.cat([by_channel.decode(codes[:, : self._keys]), decoded], 1)

    def part(self, index: Tensor, columns: slice, device: torch.device) -> tuple[Tensor, int]:
        """See `ReadInPlace`; decoded on the device.

        Raises:
            OutOfMemory: a group could not be quantised for want of memory, and is lost.
        """
        records = index.numpy()
        packed = self._packed[records // self.group]
        if packed.all():
            return self._decoded_part(index, columns, device)
        if not (packed | self._waits(records)).all():
            raise OutOfMemory(
                "oom",
                "KV in host memory could not be packed for want of memory, and is lost.",
                "Lower --host.",
            )
        rows = torch.empty(len(index), columns.stop - columns.start, dtype=self._dtype)
        rows = rows.to(device)
        waiting = self._waiting[index[torch.from_numpy(~packed)] % self.group, columns]
        rows[torch.from_numpy(~packed).to(device)] = waiting.to(device)
        moved = waiting.nbytes
        if packed.any():
            part, more = self._decoded_part(index[torch.from_numpy(packed)], columns, device)
            rows[torch.from_numpy(packed).to(device)] = part
            moved += more
        return rows, moved

    def _decoded_part(
        self, index: Tensor, columns: slice, device: torch.device
    ) -> tuple[Tensor, int]:
        """`part` of packed records; codes and scales are copied, and counted, a group's scales of K
        once."""
        each = 8 // self.bits
        begin, end = columns.start // each, -(-columns.stop // each)
        codes = self._codes[:, begin:end].index_select(0, index)
        moved = codes.nbytes
        first = columns.start - begin * each
        count = columns.stop - columns.start
        numbers = unpack(codes.to(device), first + count, self.bits)[:, first:]
        if columns.start < self._keys:
            groups, of = torch.unique(index // self.group, return_inverse=True)
            scales = self._key_scales[:, groups, columns]
            moved += scales.nbytes
            low, step = scales.to(device)[:, of.to(device)]
        else:
            channels = torch.arange(columns.start, columns.stop) - self._keys
            used = slice(int(channels[0]) // GROUP, int(channels[-1]) // GROUP + 1)
            scales = self._value_scales[:, index, used]
            moved += scales.nbytes
            low, step = scales.to(device)[:, :, (channels // GROUP - used.start).to(device)]
        return Scales(low, step).decode(numbers).to(self._dtype), moved

    def _waits(self, records: Records) -> NDArray[np.bool_]:
        """Which records are in the group whose tokens wait."""
        groups = records // self.group
        waits: NDArray[np.bool_] = ~self._packed[groups] & (groups == self._open)
        return waits

    def rounded(self, records: Records) -> NDArray[np.bool_]:
        """See `Store`; those of quantised groups."""
        return self._packed[records // self.group]

    def close(self) -> None:
        """See `Store`."""
        self._codes, self._waiting = self._codes[:0], self._waiting[:0]
        self._key_scales, self._value_scales = self._key_scales[:0], self._value_scales[:0]
