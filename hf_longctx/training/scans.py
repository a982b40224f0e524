"""Ranks of a group -> the link between neighbours that their scans go by; and what they took.

Floor: training. All ranks send to the next one at once, as a chain of states does; the slowest of
them counts. Plans must be the same on all ranks, and so is what they measured together.
"""

import logging

from ..comm.channels import Channel
from ..comm.topology import probe
from ..data.batch import LongCtxBatch
from ..plan.levels import Levels
from ..plan.schedule import Link, Sizes

logger = logging.getLogger(__name__)

BY_LINK = ("auto", "chain")  # values of longctx_scan that a link changes: a chain's pieces, too


def find_link(channel: Channel, *, ranks: int) -> Link:
    """Measure the link between neighbours, the same on all ranks, which call this at once.

    Raises:
        ExchangeError: where a rank does not answer.
    """
    (rate,) = probe(channel, Levels((ranks,)))
    return Link(rate.hop, rate.together)


def say_scans(
    batch: LongCtxBatch, *, before: frozenset[tuple[Sizes, int]]
) -> frozenset[tuple[Sizes, int]]:
    """Log what the scans of a batch took, for each kind of layer and length of a chain of ranks
    that is not in `before`.

    Returns:
        Those that have been logged, for the next batch.
    """
    for scan in batch.scans.values():
        if (scan.sizes, scan.ranks) not in before:
            logger.info("longctx_scan=%s, %s", batch.scan, scan)
    return before | {(scan.sizes, scan.ranks) for scan in batch.scans.values()}
