"""One micro-batch of one group, as a rank sees it: layout, plans and saved attention results.

Layer: data. The object travels in the model's keyword arguments, under the key `longctx_batch`,
from the collator to every attention layer. It pickles small: the layout goes along, plans are made
again, and what ties it to a process (channel, saved tensors) stays behind.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..planning.layouts.cost import CostTable, LayerKind
from ..planning.layouts.layout import Halves, Layout
from ..planning.layouts.levels import Levels
from ..planning.planners import state_scan
from ..planning.planners import state_scan as scans
from ..planning.planners.plan import Plan, make_plan
from ..planning.predict.predict import Auto, Choice
from ..planning.predict.predict import chosen as chosen_plan
from ..planning.predict.scan_schedule import NeighbourLink, Scan, Sizes, chosen, longest_chain
from ..planning.program.program import Program

KEY = "longctx_batch"


@dataclass(slots=True)
class SavedAttention:
    """`(out, lse)` of each layer, or what came to it from other ranks, between its forward and its
    backward, so that activation checkpointing recomputes it without attending or sending again."""

    results: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)
    forwards: Counter[Any] = field(default_factory=Counter)

    def keep(self, layer: Any, result: tuple[Tensor, ...]) -> None:
        """Store a layer's result at the end of its forward."""
        self.results[layer] = result
        self.forwards[layer] += 1

    def take(self, layer: Any) -> tuple[Tensor, ...]:
        """Hand out a layer's result, for its recompute, and drop it, unless gradients are off: that
        is a re-entrant recompute around another one, which will ask again.

        Raises:
            ValueError: where the batch went through the model twice before its backward, so that
                the results of the two forwards cannot be told apart.
        """
        if self.forwards[layer] != 1:
            raise ValueError(
                f"layer {layer} recomputes, but this batch went through the model "
                f"{self.forwards[layer]} times before its backward; collate a batch once per "
                "forward, or switch activation checkpointing off"
            )
        if not torch.is_grad_enabled():
            return self.results[layer]
        self.forwards[layer] -= 1
        return self.results.pop(layer)

    def drop(self, layer: Any) -> None:
        """Forget a layer's result, at its backward."""
        if self.results.pop(layer, None) is not None:
            self.forwards[layer] -= 1


@dataclass(eq=False)
class LongCtxBatch:
    """What the attention layers of one rank must know of a micro-batch.

    Args:
        layout (`Layout`): Where every token of the group's batch lies.
        rank (`int`): This rank within the group.
        tolerance (`float`, *optional*, defaults to 0.05): Allowed excess of a rank's attention
            work.
        budget (`int`, *optional*, defaults to 0): Tokens the batch could hold; 0 when unknown.
        filler (`int`, *optional*, defaults to 0): Tokens of filler documents (no targets).
        contents (`int`, *optional*, defaults to 0): A number that stands for the documents, so that
            ranks with other documents of the same lengths are found out.
        stream (`int`, *optional*, defaults to 0): A number that stands for all rows of a stream
            that were read up to this batch, so that groups with other rows are found out; 0 for a
            data set with a length.
        pieces (`np.ndarray`, *optional*): int64 `[documents, 3]`: row in the data set, start and
            stop of each document of the layout; filler has none.
        runtime (`Any`, *optional*): The process's channel and accounts; never pickled.
        speeds (`tuple[float, ...]`, *optional*): Of each extra server that this process's channel
            reaches, beside a rank's 1; never pickled, and set anew when a server comes or goes.
        halves (`tuple[LongCtxBatch, ...]`, *optional*): Two batches that run in its place and take
            turns; this rank's rows of the first lie before those of the second.
        half (`int`, *optional*, defaults to 0): Which half of another batch this one is.
        turn (`Callable`, *optional*): Hands over to the other half, while a forward of both runs;
            never pickled.
        overlap (`str`, *optional*, defaults to `none`): Of the plans: `none` or `heads`.
        topology (`Levels`, *optional*): Nested domains of the ranks, for the plans.
        ulysses_size (`int`, *optional*, defaults to 1): Of the plans.
        costs (`CostTable`, *optional*): Balances seconds in place of score entries; never pickled,
            and the same on every rank.
        auto (`Auto`, *optional*): Under `charm`, chooses each plan by prediction; never pickled,
            and the same on every rank.
        choices (`dict[LayerKind, Choice]`): What it chose.
        softmax (`str`, *optional*, defaults to `distca`): Who plans softmax layers under
            `zeco_linear`.
        scan (`str`, *optional*, defaults to `auto`): Schedule of the scans of recurrent layers.
        link (`NeighbourLink`, *optional*): Between neighbours, as measured: scans go by it. Never pickled,
            and the same on every rank.
        scans (`dict[Sizes, Scan]`): What their layers took, by state.
        prepared (`bool`): Whether it came through a model that keeps its recurrent layers'
            documents apart; never pickled.
    """

    layout: Layout
    rank: int
    tolerance: float = 0.05
    budget: int = 0
    filler: int = 0
    contents: int = 0
    stream: int = 0
    pieces: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    runtime: Any = None
    speeds: tuple[float, ...] = ()
    halves: tuple["LongCtxBatch", ...] = ()
    half: int = 0
    turn: Callable[[], None] | None = None
    overlap: str = "none"
    topology: Levels | None = None
    ulysses_size: int = 1
    costs: CostTable | None = None
    auto: Auto | None = None
    choices: dict[LayerKind, Choice] = field(default_factory=dict)
    softmax: str = "distca"
    scan: str = "auto"
    link: NeighbourLink | None = None
    scans: dict[Sizes, Scan] = field(default_factory=dict)
    prepared: bool = False
    saved: SavedAttention = field(default_factory=SavedAttention)
    _plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    _programs: dict[Sizes | int, Program | None] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        tied = (
            "runtime", "speeds", "costs", "auto", "choices", "turn", "prepared", "saved", "link",
            "scans", "_plans", "_programs",
        )  # fmt: skip
        return {name: value for name, value in vars(self).items() if name not in tied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def parts(self) -> tuple["LongCtxBatch", ...]:
        """What runs: the halves, tied to what this batch is tied to, or else the batch itself."""
        for half in self.halves:
            half.runtime, half.speeds, half.costs = self.runtime, self.speeds, self.costs
            half.auto = self.auto
        return self.halves or (self,)

    def plan(self, algorithm: str, kind: LayerKind) -> Plan:
        """The plan for layers of one kind; made on first use, the same on every rank."""
        if algorithm == "charm" and self.auto is not None:
            return self._choose(kind, self.auto).plan
        key = algorithm, kind, self.speeds, self.costs
        if key not in self._plans:
            self._plans[key] = make_plan(
                algorithm, self.layout, kind=kind, tolerance=self.tolerance, speeds=self.speeds,
                overlap=self.overlap, costs=self.costs, topology=self.topology,
                ulysses_size=self.ulysses_size,
            )  # fmt: skip
        return self._plans[key]

    def scan_program(self, sizes: Sizes) -> Program | None:
        """This rank's scan of states; `None` where no document of its own lies on other ranks."""
        if sizes not in self._programs:
            ranks = longest_chain(self.layout)
            link = self.link or NeighbourLink()
            took = chosen(sizes, ranks=ranks, link=link, flag=self.scan)
            if ranks > 1:
                measured = self.link is not None
                self.scans[sizes] = Scan(
                    sizes=sizes, ranks=ranks, schedule=took, link=link, measured=measured
                )
            self._programs[sizes] = scans.scan_program(
                self.layout,
                rank=self.rank,
                state=sizes.state,
                schedule=took.name,
                pieces=took.pieces,
            )
        return self._programs[sizes]

    def halo_program(self, width: int) -> Program | None:
        """This rank's exchange of the `width` rows before its first; `None` where there is none."""
        if width not in self._programs:
            self._programs[width] = state_scan.halo_program(
                self.layout, rank=self.rank, width=width
            )
        return self._programs[width]

    def _choose(self, kind: LayerKind, auto: Auto) -> Choice:
        if kind not in self.choices:
            levels = self.topology or Levels((self.layout.ranks,))
            self.choices[kind] = chosen_plan(
                self.layout, auto, kind=kind, levels=levels, ulysses_size=self.ulysses_size
            )
        return self.choices[kind]

    def digest(self, algorithm: str, kinds: Iterable[LayerKind]) -> int:
        """One non-negative int64 that stands for the documents, for the link that scans go by and
        for the plans of layer kinds; of a model without softmax layers, for the layout."""
        kinds = [*kinds] or [LayerKind()]
        plans = [part.plan(algorithm, kind).digest for kind in kinds for part in self.parts]
        numbers = np.asarray([self.contents, *sorted(plans)], "<i8")  # kinds may be a set
        text = numbers.tobytes() + np.asarray(self.link or (), "<f8").tobytes()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1

    def places(self) -> np.ndarray:
        """int64 `[rows, 2]`: row in the data set and position there of each row of this rank; -1
        and a position for filler."""
        fillers = len(self.layout.lengths) - len(self.pieces)
        begins = np.concatenate([self.pieces[:, :2], np.full((fillers, 2), (-1, 0))])
        segments = self.layout.of_rank(self.rank)
        documents = [s.document for s in segments]
        places = begins[np.repeat(documents, [s.stop - s.start for s in segments])]
        places[:, 1] += self.layout.positions(self.rank)
        return places


def halved(halves: Halves, rank: int, *, tolerance: float) -> tuple[LongCtxBatch, LongCtxBatch]:
    """The batch objects of a batch's halves, as `rank` sees them."""
    first, second = (
        LongCtxBatch(part, rank, tolerance=tolerance, half=i) for i, part in enumerate(halves.parts)
    )
    return first, second
