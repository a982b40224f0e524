"""Build programs in which keys of other ranks come to queries that stay, or queries to keys.

`ring` and `charm` decide which rows travel when. This file turns what has arrived into tasks: it
pairs queries with the keys they see, merges partial results into one total per query row, and forms
gradients. Layer: planning.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from ..layouts.cost import LayerKind
from ..layouts.intervals import Range, intersect, split
from ..layouts.layout import Layout, PlacedSegment
from ..program.builder import BlockRun, ProgramBuilder, RowPlacement
from ..program.operations import Attend, AttendGrad, Block, Fold, Op
from ..program.program import HomeArray, Program


def _part(run: BlockRun, tokens: Range) -> BlockRun:
    """Return the rows of a run that hold these tokens of its segment."""
    s, blocks = run
    after, before = tokens[0] - s.start, s.stop - tokens[1]
    if not after and not before:
        return run
    part = PlacedSegment(s.rank, s.row + after, s.document, *tokens)
    return part, tuple(Block(b.array, b.start + after, b.stop - before) for b in blocks)


class RemoteRowsBuilder(ProgramBuilder):
    """The arrays and tasks of one rank's program.

    Args:
        layout (`Layout`): Where the tokens lie.
        rank (`int`): Whose program it is.
        kind (`LayerKind`): What a row sees.
    """

    def __init__(self, layout: Layout, *, rank: int, kind: LayerKind) -> None:
        super().__init__(layout, rank=rank)
        self.kind = kind
        self.total = self.own_array("part")  # partials so far, in float32 or wider
        self._own_runs: dict[tuple[int, ...], list[BlockRun]] = {}

    def own(self, *arrays: int) -> list[BlockRun]:
        """Return the rank's own segments, each with its block in these arrays of its own rows."""
        if arrays not in self._own_runs:
            self._own_runs[arrays] = list(self.home.runs(arrays, self.rank, self.own_rows))
        return self._own_runs[arrays]

    def pairs(
        self, queries: Iterable[BlockRun], keys: Iterable[BlockRun]
    ) -> list[tuple[BlockRun, BlockRun]]:
        """Pair query runs with the key runs that they see, cut to those keys and joined."""
        by_document: dict[int, list[BlockRun]] = {}
        for run in keys:
            by_document.setdefault(run[0].document, []).append(run)
        found = []
        for query in queries if by_document else ():
            s = query[0]
            near = by_document.get(s.document)
            if not near:
                continue
            size = int(self.layout.lengths[s.document])
            seen = self.kind.keys_seen((s.start, s.stop), length=size)
            parts = ((k, intersect((k[0].start, k[0].stop), seen)) for k in near)
            runs = (_part(k, both) for k, both in parts if both)
            found += [(query, run) for run in self.joined(s, runs)]
        return found

    def joined(self, query: PlacedSegment, keys: Iterable[BlockRun]) -> list[BlockRun]:
        """Join adjacent key runs where one task over them shows every query the same keys.

        A task takes the rows of a block for tokens in a row that end with its last one (see
        `Program.task`), so the rows before may hold other tokens of the document if all queries
        see all of them.
        """
        found: list[BlockRun] = []
        for run in keys:
            s, blocks = run
            if found and not self.kind.window:
                last, before = found[-1]
                touch = all(a.stop == b.start for a, b in zip(before, blocks, strict=True))
                rows = before[0].stop - before[0].start
                seen = not self.kind.causal or max(last.stop - 1, s.start) <= query.start
                # The joined run must not begin before its document.
                if touch and seen and rows <= s.start:
                    ends = zip(before, blocks, strict=True)
                    both = tuple(a._replace(stop=b.stop) for a, b in ends)
                    found[-1] = s._replace(start=s.start - rows), both
                    continue
            found.append(run)
        return found

    def attend(self, keys: Iterable[BlockRun], *, first: bool = False) -> list[Op]:
        """Attend to key runs, one partial per pair of runs, and merge the partials into the total.

        Args:
            keys (`Iterable[BlockRun]`): Keys and values, each with its one block.
            first (`bool`, *optional*, defaults to `False`): These are the rank's own keys, attended
                to before any others. Each own row sees some, so its first partial is the total.
        """
        # The n-th partials of all segments go to one array: tasks on equal arrays fuse.
        rounds: list[list[tuple[BlockRun, BlockRun]]] = []
        met: Counter[PlacedSegment] = Counter()
        for pair in self.pairs(self.own(HomeArray.Q), keys):
            mine = pair[0][0]
            if met[mine] == len(rounds):
                rounds.append([])
            rounds[met[mine]].append(pair)
            met[mine] += 1
        ops: list[Op] = []
        for number, tasks in enumerate(rounds):
            totals = [Block(self.total, q.start, q.stop) for (_, (q,)), _ in tasks]
            direct = first and number == 0
            tokens = [(s.document, s.start, s.stop) for (s, _), _ in tasks]
            partials = totals if direct else self.packed("part", tokens)
            for ((_, (q,)), (_, (kv,))), into in zip(tasks, partials, strict=True):
                ops.append(Attend(q, kv, into))
            if not direct:
                ops += _merged(totals, partials)
        return ops

    def attend_grad(
        self, queries: Iterable[BlockRun], keys: Iterable[BlockRun]
    ) -> list[AttendGrad]:
        """Form the gradients of query runs (in q, grad, dq) with key runs (in kv, dkv)."""
        return [
            AttendGrad(q, kv, grad, dq, dkv)
            for (_, (q, grad, dq)), (_, (kv, dkv)) in self.pairs(queries, keys)
        ]

    def own_halves(self) -> tuple[list[AttendGrad], list[AttendGrad]]:
        """Form the gradients of own queries with own keys, the earlier rows and the later ones."""
        alone = self.layout.ranks == 1  # nothing travels that the later half would hide
        halves = (self.own_rows, ()) if alone else split(self.own_rows, 2)
        keys = self.own(HomeArray.KV, HomeArray.DKV)
        arrays = (HomeArray.Q, HomeArray.GRAD, HomeArray.DQ)
        early, late = (
            self.attend_grad(self.home.runs(arrays, self.rank, rows), keys) for rows in halves
        )
        return early, late

    def sum_into(
        self, array: int, placement: RowPlacement, part: int, of_part: RowPlacement
    ) -> list[Op]:
        """Add all rows of `part`, placed as `of_part`, to the same rows of `array`."""
        ops: list[Op] = []
        for owner, rows in of_part.owned:
            into = placement.blocks(array, owner, rows)
            parts = of_part.blocks(part, owner, rows)
            ops += [Fold(a, (b,), "sum") for a, b in zip(into, parts, strict=True)]
        return ops

    def program(self, forward: Iterable[Op], backward: Iterable[Op]) -> Program:
        """Build the program of one phase each way; forward ends with the total as the output."""
        out = Block(HomeArray.OUT, 0, self.home.rows)
        rounded = Fold(out, (out._replace(array=self.total),), "cat")  # once, to the model's dtype
        return self.build([chain(forward, (rounded,))], [backward])


def _merged(totals: Iterable[Block], partials: Iterable[Block]) -> list[Op]:
    """Merge partials into totals, in one operation where rows of both are adjacent."""
    joined: list[tuple[Block, Block]] = []
    for total, part in zip(totals, partials, strict=True):
        if joined and joined[-1][0].stop == total.start:  # partials lie end to end
            before = joined.pop()
            total = total._replace(start=before[0].start)
            part = part._replace(start=before[1].start)
        joined.append((total, part))
    return [Fold(total, (total, part), "lse") for total, part in joined]
