"""Balanced tasks -> rows that each rank sends and receives, without building any program.

It counts as `serve.py` sends: query rows once to each server, and keys once per
(owner, server), save those of tasks whose keys the server holds in one run of rows. Letters: P
processes, ranks and extra servers.
"""

from dataclasses import dataclass

import numpy as np

from hf_longctx.planning.layouts.cost import LayerKind
from hf_longctx.planning.layouts.intervals import union
from hf_longctx.planning.layouts.layout import Layout
from hf_longctx.planning.planners.key_splits import NO_SPLITS, assignments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """Rows that move in the forward of one layer.

    Args:
        queries_sent, queries_received (`np.ndarray`): int64 `[P]`, query rows to and of servers;
            as many rows of results go the other way.
        partials_sent, partials_received (`np.ndarray`): int64 `[P]`, rows of results among these
            that are partials, in float32 or wider.
        keys_sent, keys_received (`np.ndarray`): int64 `[P]`, key/value rows.
    """

    queries_sent: np.ndarray
    queries_received: np.ndarray
    partials_sent: np.ndarray
    partials_received: np.ndarray
    keys_sent: np.ndarray
    keys_received: np.ndarray

    def elements(self, kind: LayerKind) -> np.ndarray:
        """int64 `[2, P]`: elements sent and received, results included, log-sum-exps not.

        A partial's count twice, as in bf16.
        """
        queries = self.queries_sent + self.queries_received  # out, and back as results
        queries = queries + np.stack([self.partials_sent, self.partials_received])
        keys = np.stack([self.keys_sent, self.keys_received])
        return queries * kind.query_width + keys * kind.key_value_width


def traffic(
    layout: Layout,
    tasks: np.ndarray,
    *,
    kind: LayerKind,
    splits: np.ndarray = NO_SPLITS,
    processes: int | None = None,
) -> Traffic:
    """Count what a plan moves.

    Args:
        layout (`Layout`): Where the tokens lie.
        tasks (`np.ndarray`): int32 `[tasks, 5]`, the fields of `Task`.
        kind (`LayerKind`): What rows see.
        splits (`np.ndarray`, *optional*): int32 `[splits, 4]`, the fields of `KeySplit`.
        processes (`int`, *optional*): Ranks and extra servers; the ranks alone by default.
    """
    # Tokens are numbered through all documents, laid end to end.
    first = np.concatenate([[0], np.cumsum(layout.lengths, dtype=np.int64)])
    owner, _, document, start, _ = layout.columns.T
    begin = first[document] + start
    order = np.argsort(begin)
    owner, begin = owner[order], begin[order]
    end = np.append(begin[1:], first[-1])

    document, start, stop, home, server, low, high, split = assignments(
        layout, tasks, splits, kind=kind
    ).T
    low, high = first[document] + low, first[document] + high
    holder = np.searchsorted(begin, low, side="right") - 1
    needed = (owner[holder] != server) | (end[holder] < high)
    # A server gathers a key once, whatever tasks read it. The stride keeps servers apart.
    stride = first[-1] + 1
    ends = ((server * stride + x)[needed].tolist() for x in (low, high))
    merged = np.asarray(union(zip(*ends, strict=True)), np.int64).reshape(-1, 2)
    server_of = merged[:, 0] // stride
    low, high = (merged - server_of[:, None] * stride).T

    from_segment = np.searchsorted(begin, low, side="right") - 1
    segments = np.searchsorted(begin, high, side="left") - from_segment
    run = np.repeat(np.arange(len(low)), segments)
    segment = np.arange(len(run)) - np.repeat(np.cumsum(segments) - segments, segments)
    segment += from_segment[run]
    rows = np.minimum(end[segment], high[run]) - np.maximum(begin[segment], low[run])
    rows[owner[segment] == server_of[run]] = 0
    moved = np.where(home != server, stop - start, 0)

    def summed(by: np.ndarray, weights: np.ndarray) -> np.ndarray:
        counts = np.bincount(by, weights=weights, minlength=processes or layout.ranks)
        return counts.astype(np.int64)

    return Traffic(
        queries_sent=summed(home, moved),
        queries_received=summed(server, moved),
        partials_sent=summed(server, moved * split),
        partials_received=summed(home, moved * split),
        keys_sent=summed(owner[segment], rows),
        keys_received=summed(server_of[run], rows),
    )
