"""Seeds of samples: each has its own, by the run's seed and its id."""

from __future__ import annotations

import hashlib


def sample_seed(seed: int, sample: str) -> int:
    """The seed of a sample's search: a number in [0, 2**32) that both of these determine.

    The random numbers of a block follow from the seed and the block's place in the tree. With one
    seed for all samples, equal places would share their luck, and a rate would vary more between
    seeds than its interval over samples says.

    Args:
        seed: of the run.
        sample: the sample's id, or its text.
    """
    digest = hashlib.blake2b(f"{seed}\n{sample}".encode("utf-8", "surrogatepass"), digest_size=4)
    return int.from_bytes(digest.digest(), "big")
