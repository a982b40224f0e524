"""Prove that the programs of all ranks compute attention or a scan exactly, or say what is wrong.

Attention: the programs run in lock step on one random 64-bit number per query, key and output
gradient in place of tensors (where heads are cut, one per head group or key/value head), modulo
2**64. Row p must end as `q_p * (sum of the keys it sees)`, and the gradients as the matching sums.
A pair left out, done twice, taken from a wrong row or head or folded twice changes a sum, and
cancels only with probability 2**-64. Messages are matched block by block, a relay carries what the
exchange that it passes on brought whatever the timing, and ranks that wait on each other for ever
are named.

Scans: the programs run on random 2 x 2 matrices modulo 2**64 in place of each rank's E and M, one
pair per row and piece. Such matrices do not commute. The state that enters a rank must be the one
composition of the (M, E) of the earlier ranks that share its first document, each once, in order; a
rank left out, taken twice or out of order changes it, except with probability 2**-64. So must the
gradient of the state that leaves, from the later ranks.

Layer: planning. Letters: T tokens, H columns of queries, K columns of keys, which H / K columns of
queries share.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layouts.cost import LayerKind
from ..layouts.layout import Layout
from .counts import heads_in
from .message_queue import BlockValues, MessageQueue, PlanError, Postings
from .operations import Attend, AttendGrad, Block, Fold, Message, Post, Wait, blocks_of
from .program import KINDS, HomeArray, Program, ScanArray

if TYPE_CHECKING:  # planners are a layer above
    from ..planners.plan import Plan


def expected(
    plan: "Plan", q: np.ndarray, k: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what one process computes, document by document: out and dq as `q`, dkv as `k`."""
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
    """Return the sums of the first 0, 1, ... rows."""
    sums = np.zeros((len(values) + 1, values.shape[1]), np.uint64)
    np.cumsum(values, 0, out=sums[1:])
    return sums


def by_key(values: np.ndarray, *, kv_heads: int) -> np.ndarray:
    """Return `[rows, K]`: sums over the query heads that share a key/value head."""
    return values.reshape(len(values), kv_heads, -1).sum(2, dtype=np.uint64)


_PARTIALS = ("out", "part")
_FOLDED = {  # how -> (into, part) kinds: with others the numbers here would add up all the same
    "cat": {(kind, kind) for kind in KINDS} | {("out", "part")},
    "sum": {(kind, kind) for kind in ("dq", "dkv", "dx")},
    "lse": {(into, part) for into in _PARTIALS for part in _PARTIALS},
    "delta": {("delta", "grad")},
}


class Rank:
    """One rank's arrays, and its position in its program.

    Args:
        rank (`int`): The rank.
        program (`Program`): Its program.
        queue (`MessageQueue`): Shared by all ranks.
        kind (`LayerKind`): What a row sees.
        heads, kv_heads (`int`): Columns of numbers, for fields of query and of key/value heads.
        backward (`bool`): Which direction runs.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        queue: MessageQueue,
        kind: LayerKind,
        *,
        heads: int,
        kv_heads: int,
        backward: bool,
    ) -> None:
        self.rank, self.program, self.kind = rank, program, kind
        self.heads, self.backward = heads, backward
        relayed = program.relayed(backward=backward)
        self.posts = Postings(rank, queue, relayed, pack=self._pack, unpack=self._unpack)
        noise = np.random.default_rng(rank)
        of = {"H": heads, "K": kv_heads, "1": 1}
        shapes = [
            (rows, of[KINDS[kind][0].heads])
            for kind, rows in zip(program.kinds, program.rows, strict=True)
        ]
        self.values = [
            np.zeros(shape, np.uint64)
            if kind in ("dq", "dkv", "dx")
            else noise.integers(0, 2**63, shape, np.uint64)  # reading what nobody wrote must show
            for kind, shape in zip(program.kinds, shapes, strict=True)
        ]
        self.written = [np.zeros(values.shape, bool) for values in self.values]

    def rows(self, block: Block) -> np.ndarray:
        """Return the numbers of a block, to be read or written."""
        rows = self.program.rows[block.array]
        if not 0 <= block.start <= block.stop <= rows:
            raise PlanError(f"rank {self.rank}: {block} lies outside the {rows} rows of its array")
        if not 0 <= block.head <= block.head + block.heads <= self.heads:
            raise PlanError(f"rank {self.rank}: {block} lies outside the {self.heads} heads")
        return self.values[block.array][self._at(block)]

    def _at(self, block: Block) -> tuple[slice, slice]:
        of = self.values[block.array].shape[1]
        return slice(block.start, block.stop), slice(*heads_in(block[3:], groups=self.heads, of=of))

    def run(self) -> Generator[None]:
        """Run the program; yield while an exchange that it waits for is under way."""
        posts = self.posts
        for op in self.program.operations(backward=self.backward):
            touched = op
            if isinstance(op, Post) and op.after >= 0:
                touched = op._replace(sends=())  # the waiting thread itself reads them
            for block in blocks_of(touched):
                posts.validate_access(block)
            match op:
                case Post():
                    posts.post(op)
                case Wait(tag):
                    yield from posts.wait(tag)
                case Attend(q, kv, into):
                    self._attend(q, kv, into)
                case AttendGrad():
                    self._attend_grad(op)
                case Fold(into, parts, how):
                    self.fold(into, parts, how)
        if posts.pending:
            left = sorted(posts.pending)
            raise PlanError(f"rank {self.rank}: exchanges {left} are never waited for")

    def _pack(self, blocks: Sequence[Block]) -> list[BlockValues]:
        return [(self._label(block), self.rows(block).copy()) for block in blocks]

    def _label(self, block: Block) -> tuple[str, int, int]:
        return self.program.kinds[block.array], block.head, block.heads

    def _unpack(self, came: Sequence[BlockValues], message: Message, tag: int) -> None:
        peer, blocks = message
        sent = [(label, len(values)) for label, values in came]
        expected = [(self._label(b), b.stop - b.start) for b in blocks]
        if sent != expected:
            where = f"rank {self.rank}, tag {tag}, from {peer}"
            raise PlanError(f"{where}: message holds {sent}, expected {expected}")
        for (_, values), block in zip(came, blocks, strict=True):
            self.rows(block)[:] = values

    def _same_rows(self, *blocks: Block) -> None:
        if len({block.stop - block.start for block in blocks}) > 1:
            raise PlanError(f"rank {self.rank}: these must have equally many rows: {blocks}")

    def _same_heads(self, *blocks: Block) -> None:
        if len({(block.head, block.heads) for block in blocks}) > 1:
            raise PlanError(f"rank {self.rank}: these must have the same heads: {blocks}")

    def _positions(self, block: Block) -> tuple[int, int, int]:
        tokens = self.program.tokens(block)
        held = sum(stop - start for _, start, stop in tokens)
        if len({document for document, _, _ in tokens}) != 1 or held != block.stop - block.start:
            raise PlanError(f"rank {self.rank}: {block} is not of one document's tokens: {tokens}")
        return self.program.task(block)

    def _seen(self, q: Block, kv: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each query row, the slice [low, high) of the key block that it sees."""
        document, first, last = self._positions(q)
        other, start, stop = self._positions(kv)
        if len(self.program.tokens(q)) > 1:
            raise PlanError(f"rank {self.rank}: queries {q} are not one run of tokens")
        if document != other:
            raise PlanError(f"rank {self.rank}: document {document} attends to {other}")
        position = np.arange(first, last)
        reach = self.kind.window or max(last, stop)
        ends = position - reach + 1, position + (1 if self.kind.causal else reach)
        low, high = (np.minimum(np.maximum(end, start), stop) - start for end in ends)
        return low, high

    def _attend(self, q: Block, kv: Block, into: Block) -> None:
        self._same_heads(q, kv, into)
        self._same_rows(q, into)
        target = self.rows(into)
        done = self.written[into.array][self._at(into)]
        if done.any():
            raise PlanError(f"rank {self.rank}: rows of {into} are attended twice")
        done[:] = True
        low, high = self._seen(q, kv)
        keys = prefix(self._per_query_head(kv, target))
        target[:] = self.rows(q) * (keys[high] - keys[low])

    def _per_query_head(self, kv: Block, queries: np.ndarray) -> np.ndarray:
        """Return keys, each head repeated for the query heads that share it."""
        keys = self.rows(kv)
        each, rest = divmod(queries.shape[1], keys.shape[1])
        if rest:
            raise PlanError(
                f"rank {self.rank}: {queries.shape[1]} query heads share the "
                f"{keys.shape[1]} key/value heads of {kv} unevenly"
            )
        return keys.repeat(each, 1)

    def _attend_grad(self, op: AttendGrad) -> None:
        self._same_heads(*op)
        self._same_rows(op.q, op.grad, op.dq)
        self._same_rows(op.kv, op.dkv)
        low, high = self._seen(op.q, op.kv)
        pull = self.rows(op.grad) * self.rows(op.q)
        keys = prefix(self._per_query_head(op.kv, pull))
        self.rows(op.dq)[:] += pull * (keys[high] - keys[low])
        steps = np.zeros_like(keys)
        np.add.at(steps, low, pull)
        np.subtract.at(steps, high, pull)
        summed = by_key(np.cumsum(steps[:-1], 0, np.uint64), kv_heads=self.rows(op.kv).shape[1])
        self.rows(op.dkv)[:] += summed * self.rows(op.kv)

    def fold(self, into: Block, parts: tuple[Block, ...], how: str) -> None:
        """Combine parts into a block; see `operations.Fold`."""
        self._same_heads(into, *parts)
        kinds = self.program.kinds
        pairs = {(kinds[into.array], kinds[part.array]) for part in parts}
        if how in _FOLDED and not pairs <= _FOLDED[how]:
            raise PlanError(f"rank {self.rank}: {how} makes {into} of {parts}: kinds {pairs}")
        values = [self.rows(part).copy() for part in parts]
        target = self.rows(into)
        if how == "cat":
            values = [np.concatenate(values)]
        if any(len(value) != len(target) for value in values):
            raise PlanError(f"rank {self.rank}: {parts} do not fit {into}")
        if how in ("cat", "delta"):
            target[:] = values[0]
        elif how == "sum":
            for value in values:
                target += value
        elif how == "lse":
            target[:] = np.sum(values, axis=0, dtype=np.uint64)


def lock_step(programs: Mapping[int, Program], *, backward: bool) -> list[Rank]:
    """Run one direction of all ranks' programs, as far as messages and waits go.

    Raises:
        PlanError: on a message that does not match its receive, a send that nobody receives, or
            ranks that wait for each other for ever.
    """
    queue = MessageQueue()
    groups = [int((p.blocks[:, 6] + p.blocks[:, 7]).max(initial=1)) for p in programs.values()]
    heads = max(groups, default=1)
    ranks = [
        Rank(r, p, queue, LayerKind(), heads=heads, kv_heads=heads, backward=backward)
        for r, p in programs.items()
    ]
    finish(ranks, queue)
    return ranks


def finish(ranks: Sequence[Rank], queue: MessageQueue) -> None:
    """Run ranks in lock step to their ends. Raises `PlanError` where they cannot get there."""
    running, turn = {rank: rank.run() for rank in ranks}, 1
    while running:
        # Both orders in turn: a chain of ranks, whichever way it goes, passes in one round.
        before, turn = (len(running), queue.events), -turn
        for rank, steps in list(running.items())[::turn]:
            rank.posts.move()
            if next(steps, "done") == "done":
                del running[rank]
        if before == (len(running), queue.events):
            stuck = [rank.posts.waiting_for for rank in running]
            raise PlanError("no progress: " + "; ".join([*stuck, *_unexpected(queue)]))
    if queue.sent:
        raise PlanError(*_unexpected(queue))


def _unexpected(queue: MessageQueue) -> list[str]:
    found = sorted(set(queue.sent) - queue.expected)
    return [f"sent but never received (channel, from, to, number): {found}"] if found else []


def check(plan: "Plan") -> None:
    """Prove that a plan's programs are exact, forward and backward.

    Raises:
        PlanError: naming rank, operation or document, when anything differs from one process that
            runs each document alone.
    """
    ranks = range(plan.processes)
    programs = {r: plan.program(r) for r in ranks}
    noise = np.random.default_rng(0)
    tokens = int(plan.layout.lengths.sum())
    cut = any(program.blocks[:, 7].any() for program in programs.values())
    heads = (int(programs[0].head_groups[0]) or plan.kind.kv_heads) if cut else 1
    kv_heads = min(heads, plan.kind.kv_heads)
    columns = (heads, kv_heads, heads)
    q, k, g = (noise.integers(0, 2**63, (tokens, of), np.uint64) for of in columns)
    out, dq, dkv = expected(plan, q, k, g)
    for backward in (False, True):
        queue = MessageQueue()
        states = [
            Rank(
                r, programs[r], queue, plan.kind, heads=heads, kv_heads=kv_heads, backward=backward
            )
            for r in ranks
        ]
        for state in states:
            own = plan.layout.flat_rows(state.rank)
            for array, values in ((HomeArray.Q, q), (HomeArray.KV, k), (HomeArray.GRAD, g)):
                state.values[array][:] = values[own]
        finish(states, queue)
        for state in states:
            own = plan.layout.flat_rows(state.rank)
            results = (
                [(HomeArray.DQ, dq), (HomeArray.DKV, dkv)] if backward else [(HomeArray.OUT, out)]
            )
            for array, right in results:
                wrong = np.flatnonzero((state.values[array] != right[own]).any(1))
                if len(wrong):
                    name = state.program.kinds[array]
                    raise PlanError(f"rank {state.rank}: {name} differs in rows {wrong[:8]}")


class _StateChains(Rank):
    """One rank of a scan, with matrices in place of states and decays."""

    def __init__(
        self, rank: int, program: Program, queue: MessageQueue, *, backward: bool, pieces: int
    ) -> None:
        super().__init__(
            rank, program, queue, LayerKind(), heads=pieces, kv_heads=pieces, backward=backward
        )
        noise = np.random.default_rng((rank, backward))
        self.values = [noise.integers(0, 2**63, (*v.shape, 2, 2), np.uint64) for v in self.values]

    def fold(self, into: Block, parts: tuple[Block, ...], how: str) -> None:
        """Multiply states and decays; copies are those of `Rank`."""
        if how == "cat":
            super().fold(into, parts, how)
            return
        kinds = ["state" if self._is_state(block) else "decay" for block in (into, *parts)]
        expected = {"affine": ["state", "state", "decay", "state"], "product": ["decay"] * 3}
        if kinds != expected.get(how):
            raise PlanError(f"rank {self.rank}: {how} makes {into} of {parts}: kinds {kinds}")
        if len({(block.head, block.heads) for block in (into, *parts)}) > 1:
            raise PlanError(f"rank {self.rank}: {how} of {into} and {parts}: heads differ")
        *offset, later, earlier = (self.rows(part).copy() for part in parts)
        self.rows(into)[:] = later @ earlier + (offset[0] if offset else np.uint64(0))

    def _is_state(self, block: Block) -> bool:
        return KINDS[self.program.kinds[block.array]][0].name == "state"


def check_states(layout: Layout, programs: Mapping[int, Program]) -> None:
    """Prove that scan programs are right, forward and backward.

    Args:
        layout (`Layout`): The layout that they were made for.
        programs (`Mapping[int, Program]`): By rank, of those that have one.

    Raises:
        PlanError: naming the rank, where a state or its gradient is not what the documents say, or
            messages do not match.
    """
    pieces = max((int(p.head_groups[0]) for p in programs.values()), default=1) or 1
    for backward in (False, True):
        queue = MessageQueue()
        ranks = {
            rank: _StateChains(rank, program, queue, backward=backward, pieces=pieces)
            for rank, program in programs.items()
        }
        arrays = list(ScanArray)[3:] if backward else list(ScanArray)[:3]
        given = {r: [of.values[a].copy() for a in arrays[:2]] for r, of in ranks.items()}
        finish(list(ranks.values()), queue)
        for chain in _chains(layout, backward=backward):
            _compare(chain, ranks, given, result=arrays[2])


def _chains(layout: Layout, *, backward: bool) -> list[list[int]]:
    """Return the ranks of each document on several, in the order in which states pass them."""
    held = [sorted({s.rank for s in of}) for of in layout.by_document.values()]
    return [ranks[::-1] if backward else ranks for ranks in held if len(ranks) > 1]


def _compare(
    chain: Sequence[int],
    ranks: Mapping[int, _StateChains],
    given: Mapping[int, list[np.ndarray]],
    *,
    result: int,
) -> None:
    state: np.ndarray = np.zeros((), np.uint64)
    for number, rank in enumerate(chain):
        if rank not in ranks:
            raise PlanError(f"rank {rank} shares a document with {list(chain)}, but has no program")
        found = ranks[rank].values[result]
        if number and (found != state).any():
            name = (
                "entering state"
                if result == ScanArray.ENTERING
                else "gradient of its leaving state"
            )
            raise PlanError(f"rank {rank}: the {name} is not composed of {list(chain[:number])}")
        own, decay = given[rank]
        state = own + decay @ state if number else own
