"""Sizes of KV that is packed in few bits: bytes of records and their scales."""

from __future__ import annotations

BITS = (8, 4)  # of a number
GROUP = 32  # tokens that share scales of K per channel; channels that share a scale of V per token
SCALE_BYTES = 4  # of a group of numbers: its least one and its step, float16


def group_bytes(numbers: int, bits: int) -> int:
    """Bytes of `GROUP` tokens, codes and scales; at most 4 per token more than they take.

    Args:
        numbers: K and V of a token over all layers.
        bits: of a code.

    Example:
        A token of 3,072 numbers, 12,288 bytes in float32:

        >>> [group_bytes(3072, bits) / GROUP for bits in (8, 4)]
        [3459.875, 1923.875]
    """
    return GROUP * -(-numbers * bits // 8) + SCALE_BYTES * (numbers + GROUP - 1)


def packed_bytes(tokens: int, numbers: int, itemsize: int, bits: int) -> int:
    """Bytes of so many tokens, and of a group that waits in full precision.

    Args:
        tokens: how many.
        numbers, bits: as in `group_bytes`.
        itemsize: bytes of a number in full precision.
    """
    return -(-tokens // GROUP) * group_bytes(numbers, bits) + GROUP * numbers * itemsize


def packed_tokens(size: int, numbers: int, itemsize: int, bits: int, exact: int = 0) -> int:
    """Tokens that fit into so many bytes, in whole groups.

    Args:
        size: bytes.
        numbers, itemsize, bits: as for `packed_bytes`.
        exact: bytes that each token takes beyond that.

    Example:
        >>> packed_tokens(8 << 20, 3072, 4, 8), (8 << 20) // 12288
        (2304, 682)
    """
    room = size - GROUP * numbers * itemsize
    return max(0, room // (group_bytes(numbers, bits) + GROUP * exact)) * GROUP
