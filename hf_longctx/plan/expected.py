"""One number per query, key and output gradient -> what attention makes of them in one process.

Floor: plan. The checker compares programs with it. Numbers are uint64, modulo 2**64. Letters: T
tokens, H columns of queries, K columns of keys, which H / K columns of queries share.
"""

import numpy as np

from .plans import Plan


def expected(
    plan: Plan, q: np.ndarray, k: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What one process computes, document by document: `[T, heads]` each, as q and as k."""
    out, dq, dkv = np.empty_like(q), np.empty_like(q), np.empty_like(k)
    start = 0
    for n in plan.layout.lengths.tolist():
        rows = slice(start, start + n)
        position = np.arange(n)
        reach = plan.kind.window or n
        before, after = np.maximum(position - reach + 1, 0), np.minimum(position + reach, n)
        high = position + 1 if plan.kind.causal else after
        keys = prefix(k[rows].repeat(q.shape[1] // k.shape[1], 1))
        out[rows] = q[rows] * (keys[high] - keys[before])
        dq[rows] = g[rows] * out[rows]
        pull = prefix(g[rows] * q[rows])  # the rows that see a key are those at or after it,
        low = position if plan.kind.causal else before  # and where rows look ahead, before it too
        dkv[rows] = k[rows] * by_key(pull[after] - pull[low], kv_heads=k.shape[1])
        start += n
    return out, dq, dkv


def prefix(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, ... rows."""
    sums = np.zeros((len(values) + 1, values.shape[1]), np.uint64)
    np.cumsum(values, 0, out=sums[1:])
    return sums


def by_key(values: np.ndarray, *, kv_heads: int) -> np.ndarray:
    """`[rows, K]`: sums over the query heads that share a key/value head."""
    return values.reshape(len(values), kv_heads, -1).sum(2, dtype=np.uint64)
