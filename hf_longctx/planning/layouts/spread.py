"""Place documents by the `spread` layout: equal tokens and nearly equal attention on all ranks.

A token of a document of n costs (n + 1) / 2 score entries on average, so a rank that holds much of
a long document must fill up with short ones. Documents are placed from the longest to the shortest;
a rank's *need* is the work that it lacks to the mean, less what its free rows will hold once
shorter documents of average density (work per token) fill them. Layer: planning.
"""

import heapq
from collections.abc import Iterator

import numpy as np

from .cost import GRANULE, LayerKind
from .intervals import Range, subtract

RankSegment = tuple[int, int, int, int]  # rank, document, start, stop
LARGE = 1 / 8  # of a rank's mean work: documents below it are never cut for balance
EXCESS = 1 / 40  # of it: a rank may get so much more where a document then needs fewer ranks
FILLING = 1 / 4  # of a batch's tokens: the shorter documents that set the density of free rows


def spread(lengths: list[int], room: list[int]) -> Iterator[RankSegment]:
    """Place each document on the rank that needs it most, or a large one head-tail over few.

    Args:
        lengths (`list[int]`): Tokens of each document.
        room (`list[int]`): Rows of each rank; as many in all as tokens.
    """
    return _Spread(lengths, room).place()


class _Spread:
    """The rows and the work that each rank lacks, while documents are placed."""

    def __init__(self, lengths: list[int], room: list[int]) -> None:
        tokens = np.asarray(lengths, np.int64)
        order = np.argsort(-tokens, kind="stable")
        work = LayerKind().entries(0, tokens, length=tokens)
        self.mean = float(work.sum()) / len(room)
        self.lengths, self.order = lengths, order.tolist()
        self.work: list[int] = work.tolist()
        self.room = np.asarray(room, np.int64)
        self.missing = np.full(len(room), self.mean)  # work, to the mean
        # Of the documents from a place in the order on: work per token.
        left = [np.append(np.cumsum(of[order][::-1])[::-1], 0) for of in (work, tokens)]
        self.density: list[float] = (left[0] / np.maximum(left[1], 1)).tolist()
        self.filling = int(np.sum(left[1] >= FILLING * left[1][0])) - 1  # where they begin

    def place(self) -> Iterator[RankSegment]:
        """Yield the segments of every document."""
        large = sum(self.work[d] > LARGE * self.mean for d in self.order)
        filling = min(self.filling, large)
        for place, d in enumerate(self.order[:large], start=1):
            yield from self._large(d, self.density[max(place, filling)])
        first = large
        while first < len(self.order):  # one octave of lengths at a time, for the density below it
            shortest = 1 << self.lengths[self.order[first]].bit_length() - 1
            last = first
            while last < len(self.order) and self.lengths[self.order[last]] >= shortest:
                last += 1
            yield from self._small(self.order[first:last], self.density[last])
            first = last

    def _put(self, rank: int, document: int, start: int, stop: int) -> RankSegment:
        self.room[rank] -= stop - start
        self.missing[rank] -= (start + 1 + stop) * (stop - start) / 2
        return rank, document, start, stop

    def _large(self, document: int, density: float) -> Iterator[RankSegment]:
        """Place a document on as few ranks as leave none above the excess: one, or in windows."""
        n, need = self.lengths[document], self.missing - density * self.room
        added, excess = max(self.work[document] - density * n, 1.0), EXCESS * self.mean
        rank = int(np.argmax(np.where(self.room >= n, need, -np.inf)))
        if self.room[rank] >= n and (added <= need[rank] + excess or n < 2 * GRANULE):
            yield self._put(rank, document, 0, n)
            return
        windows = self._windows(n, need, added=added, excess=excess) if n > 1 else ()
        placed: list[RankSegment] = []
        for rank, start, stop in windows:
            if stop == n // 2 and n - 2 * start <= self.room[rank]:
                placed.append((rank, document, start, n - start))
            else:
                placed += [(rank, document, start, stop), (rank, document, n - stop, n - start)]
        for segment in placed:
            yield self._put(*segment)
        for hole in subtract((0, n), [segment[2:] for segment in placed]):
            yield from self._pour(document, hole)

    def _windows(
        self, n: int, need: np.ndarray, *, added: float, excess: float
    ) -> Iterator[tuple[int, int, int]]:
        """Yield windows of pairs of rows of a document of `n` tokens: rank, start, stop.

        Row p pairs with row n-1-p and every pair costs n+1 entries, so a rank's need says how many
        it can take; the document takes `added` of the need altogether. The ranks of largest need
        take all that they can, so that few hold the document and few have a small need left.
        """
        order = np.argsort(-need, kind="stable")
        held = (self.room // 2 * (added / (n // 2)))[order]  # what each rank has room for
        exact = np.cumsum(np.minimum(need[order], held))
        above = np.cumsum(np.minimum(need[order] + excess, held))
        # The excess is used only where the document then needs fewer ranks.
        saves = int(np.argmax(above >= added)) < int(np.argmax(np.append(exact, added) >= added))
        start, left = 0, n // 2
        for rank in order.tolist():
            most = min(int(self.room[rank]) // 2, left)
            if most and most >= min(GRANULE, left):
                pairs = (float(need[rank]) + saves * excess) / added * (n // 2)
                wanted = max(round(pairs / GRANULE), 1) * GRANULE
                taken = most if left - wanted < GRANULE else min(wanted, most)
                yield rank, start, start + taken
                start, left = start + taken, left - taken

    def _small(self, documents: list[int], density: float) -> Iterator[RankSegment]:
        """Place each document, by falling length, on the rank of largest need that has room."""
        heap: list[tuple[float, int, int]] = []  # minus need, rank, room: the largest need first
        for d in documents:
            n = self.lengths[d]
            while heap and heap[0][2] < n:
                heapq.heappop(heap)
            if not heap:
                need = (density * self.room - self.missing).tolist()
                rooms = enumerate(self.room.tolist())
                heap = [(need[rank], rank, free) for rank, free in rooms if free >= n]
                heapq.heapify(heap)
            if not heap:
                yield from self._pour(d, (0, n))
                continue
            turned, rank, free = heap[0]
            yield self._put(rank, d, 0, n)
            heapq.heapreplace(heap, (turned + self.work[d] - density * n, rank, free - n))

    def _pour(self, document: int, tokens: Range) -> Iterator[RankSegment]:
        """Cut a run of tokens over the ranks of most room, so that segments are few and long."""
        start, stop = tokens
        while start < stop:
            rank = int(np.argmax(self.room))
            end = min(stop, start + int(self.room[rank]))
            yield self._put(rank, document, start, end)
            start = end
