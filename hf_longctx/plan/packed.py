"""A program <-> one run of int32 that can travel, and the hash by which both ends know it.

Floor: plan.
"""

import hashlib
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from .program import Program

FORMAT = 2  # of a program's columns and what they mean: a server of another format is turned away


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A program as it travels.

    Args:
        columns (`np.ndarray`): int32: rows and width of each column (0 for one without), then all.
        digest (`int`): A stable hash of them, as a non-negative int64.
        exchanges (`bool`): Whether anything leaves or arrives in it.
    """

    columns: np.ndarray
    digest: int
    exchanges: bool


@lru_cache(maxsize=256)
def pack(program: Program) -> Packed:
    """The form that travels (memo of a pure function, keyed by identity)."""
    columns = [np.asarray(getattr(program, f.name), np.int32) for f in fields(program)]
    shapes = [(len(c), c.shape[1] if c.ndim > 1 else 0) for c in columns]
    run = np.concatenate([np.ravel(shapes).astype(np.int32), *map(np.ravel, columns)])
    hashed = hashlib.blake2b(run.astype("<i4").tobytes(), digest_size=8).digest()
    peers = program.blocks[:, 2]  # -1 outside of messages
    return Packed(run, int.from_bytes(hashed, "little") >> 1, bool((peers >= 0).any()))


def unpack(columns: np.ndarray) -> Program:
    """The program that `Packed.columns` hold."""
    names = fields(Program)
    shapes = columns[: 2 * len(names)].reshape(-1, 2)
    sizes = shapes[:, 0] * np.maximum(shapes[:, 1], 1)
    parts = np.split(columns[2 * len(names) :], np.cumsum(sizes)[:-1])
    return Program(
        *(p.reshape(-1, w) if w else p for p, (_, w) in zip(parts, shapes.tolist(), strict=True))
    )
