"""Scan programs of all ranks -> proof that each entering state is what one process would hold.

Floor: plan. The programs run in lock step on random 2 x 2 matrices modulo 2**64 in place of each
rank's E and M, one pair per row and piece. Such matrices do not commute: the state that enters a
rank must be the one composition of the (M, E) of the earlier ranks that share its first document,
each once, in order; a rank left out, taken twice or out of order changes it, and goes unseen only
with probability 2**-64. So must the gradient of the state that leaves, from the later ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .check import Rank, finish
from .cost import LayerKind
from .layout import Layout
from .mail import Mail, PlanError
from .program import KINDS, Block, Program
from .scan import DECAY, DECAY_T, ENTERING, GRAD, LEAVING_GRAD, SUMMARY


class _States(Rank):
    """One rank, with matrices in place of states and decays."""

    def __init__(
        self, rank: int, program: Program, mail: Mail, *, backward: bool, pieces: int
    ) -> None:
        super().__init__(
            rank, program, mail, LayerKind(), heads=pieces, kv_heads=pieces, backward=backward
        )
        noise = np.random.default_rng((rank, backward))
        self.values = [noise.integers(0, 2**63, (*v.shape, 2, 2), np.uint64) for v in self.values]

    def fold(self, into: Block, parts: tuple[Block, ...], how: str) -> None:
        """States and decays are multiplied; copies are as ever."""
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
    """Prove scan programs right, forward and backward.

    Args:
        layout (`Layout`): What they were made for.
        programs (`Mapping[int, Program]`): Of every rank that has one.

    Raises:
        PlanError: naming the rank, where a state or its gradient is not what the documents say, or
            messages do not match.
    """
    pieces = max((int(p.head_groups[0]) for p in programs.values()), default=1) or 1
    for backward in (False, True):
        mail = Mail()
        ranks = {
            rank: _States(rank, program, mail, backward=backward, pieces=pieces)
            for rank, program in programs.items()
        }
        arrays = (GRAD, DECAY_T, LEAVING_GRAD) if backward else (SUMMARY, DECAY, ENTERING)
        given = {r: [of.values[a].copy() for a in arrays[:2]] for r, of in ranks.items()}
        finish(list(ranks.values()), mail)
        for chain in _chains(layout, backward=backward):
            _compare(chain, ranks, given, result=arrays[2])


def _chains(layout: Layout, *, backward: bool) -> list[list[int]]:
    """The ranks of each document that lies on several, in the order in which it passes them."""
    held = [sorted({s.rank for s in of}) for of in layout.by_document.values()]
    return [ranks[::-1] if backward else ranks for ranks in held if len(ranks) > 1]


def _compare(
    chain: Sequence[int],
    ranks: Mapping[int, _States],
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
            name = "entering state" if result == ENTERING else "gradient of its leaving state"
            raise PlanError(f"rank {rank}: the {name} is not composed of {list(chain[:number])}")
        own, decay = given[rank]
        state = own + decay @ state if number else own
