"""What differs between two versions of a file of weights: exact, and little where few values changed.

A part of the file is XORed with the same part of its base, an earlier version. Where few values changed it is
mostly zeros, of which zstandard leaves little. A digest of the new bytes goes with it.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PART_BYTES = 2**22
_DIGEST_BYTES = 32
_LEVEL = 1  # higher ones take several times as long for a few percent


def parts(begin: int, end: int) -> Iterator[slice]:
    """Of bytes `begin` to `end` of a file: what is encoded at a time."""
    for at in range(begin, end, PART_BYTES):
        yield slice(at, min(at + PART_BYTES, end))


def encode(new: Bytes, base: Bytes) -> bytes:
    """What makes `new` out of `base`, which is as long."""
    return _digest(new) + zstandard.ZstdCompressor(level=_LEVEL).compress((new ^ base).data)


def decode(encoded: bytes, base: Bytes, target: Bytes) -> None:
    """Writes the new bytes into `target`.

    Raises ValueError where they are not those that were encoded, as from another base.
    """
    count = len(target)
    try:
        changed = zstandard.ZstdDecompressor().decompress(encoded[_DIGEST_BYTES:], max_output_size=count)
    except zstandard.ZstdError as error:
        raise ValueError(f"a difference of weights cannot be read: {error}") from None
    if len(changed) != count:
        raise ValueError(f"a difference of weights has {len(changed)} bytes; {count} are wanted")
    np.bitwise_xor(np.frombuffer(changed, np.uint8), base, out=target)
    if _digest(target) != encoded[:_DIGEST_BYTES]:
        raise ValueError("a difference of weights was made from another base")


def _digest(part: Bytes) -> bytes:
    return hashlib.sha256(part.data).digest()
