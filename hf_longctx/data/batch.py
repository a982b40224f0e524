"""Describe one micro-batch of one group, as a rank sees it, and keep what this process made of it.

The batch object travels in the model's keyword arguments, under the key `longctx_batch`, from the
collator to every attention layer. It pickles small: layout and options go along, the binding
(channel, plans, saved tensors) stays in the process. Layer: data.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..planning.layouts.cost import LayerKind
from ..planning.layouts.layout import Halves, Layout
from ..planning.layouts.levels import NeighbourLink
from ..planning.planners import state_scan
from ..planning.planners.options import PlanOptions, fingerprint
from ..planning.planners.plan import Plan, make_plan
from ..planning.predict.predict import Choice, choose_plan
from ..planning.predict.scan_schedule import ScanChoice, StateSizes, choose_schedule, longest_chain
from ..planning.program.program import Program

# The keyword argument; models hand unknown ones on to attention, also under DDP, FSDP2 and PEFT.
KEY = "longctx_batch"


@dataclass(slots=True)
class SavedAttention:
    """What layers keep between their forward and backward, so that a recompute sends nothing.

    A softmax layer keeps `(out, lse)`, a recurrent one what came to it from other ranks: activation
    checkpointing then recomputes it without attending or exchanging again.
    """

    results: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)
    forwards: Counter[Any] = field(default_factory=Counter)

    def keep(self, layer: Any, result: tuple[Tensor, ...]) -> None:
        """Keep a layer's result, at the end of its forward."""
        self.results[layer] = result
        self.forwards[layer] += 1

    def take(self, layer: Any) -> tuple[Tensor, ...]:
        """Give a layer's result to its recompute, and drop it.

        Raises:
            ValueError: where the batch went through the model twice before its backward, so that
                the results of the two forwards cannot be told apart.
        """
        # results are kept by layer alone, so that two forwards in flight would mix them up
        if self.forwards[layer] != 1:
            raise ValueError(
                f"layer {layer} recomputes, but this batch went through the model "
                f"{self.forwards[layer]} times before its backward; collate a batch once per "
                "forward, or switch activation checkpointing off"
            )
        # without gradients this is a reentrant recompute around another one, which will ask again
        if not torch.is_grad_enabled():
            return self.results[layer]
        self.forwards[layer] -= 1
        return self.results.pop(layer)

    def drop(self, layer: Any) -> None:
        """Forget a layer's result, at its backward."""
        if self.results.pop(layer, None) is not None:
            self.forwards[layer] -= 1


@dataclass(slots=True, eq=False)
class Binding:
    """What ties one batch to this process; it is never pickled.

    Args:
        runtime (`Any`, *optional*): The process's channel and accounts: a `Runtime`.
        turn (`Callable`, *optional*): Hands over to the other half of the batch, while a forward of
            both runs.
        saved (`SavedAttention`): Results that a recompute uses again.
        choices (`dict[LayerKind, Choice]`): Which plan was chosen by prediction.
        scans (`dict[StateSizes, ScanChoice]`): The schedule of each state scan that crosses ranks.
        plans, programs: What was planned so far. It is freed with the batch.
        layers (`dict`): What the attention hook made of plans, by layer spec.
        positions (`tuple[Tensor | None, int]`): The `position_ids` that were compared with the
            layout last, and their version then, so that a batch's layers compare them once.
    """

    runtime: Any = None
    turn: Callable[[], None] | None = None
    saved: SavedAttention = field(default_factory=SavedAttention)
    choices: dict[LayerKind, Choice] = field(default_factory=dict)
    scans: dict[StateSizes, ScanChoice] = field(default_factory=dict)
    plans: dict[tuple[PlanOptions, LayerKind], Plan] = field(default_factory=dict)
    programs: dict[StateSizes | int, Program | None] = field(default_factory=dict)
    layers: dict[Any, Any] = field(default_factory=dict)
    positions: tuple[Tensor | None, int] = (None, -1)


@dataclass(eq=False, slots=True)
class LongCtxBatch:
    """What the attention layers of one rank must know of a micro-batch.

    Args:
        layout (`Layout`): Which rank holds which tokens of the group's batch.
        rank (`int`): This rank within the group.
        options (`PlanOptions`, *optional*): What else plans depend on; the same on every rank.
        budget (`int`, *optional*, defaults to 0): Tokens the batch could hold; 0 when unknown.
        filler (`int`, *optional*, defaults to 0): Tokens of filler documents, without targets.
        contents (`int`, *optional*, defaults to 0): A hash of the documents, which differs between
            ranks that hold other documents of the same lengths.
        stream (`int`, *optional*, defaults to 0): A hash of all rows of a stream that were read up
            to this batch, which differs between groups with other rows; 0 for a data set with a
            length.
        pieces (`np.ndarray`, *optional*): int64 `[documents, 3]`: row in the data set, start and
            stop of each document of the layout, filler left out.
        halves (`tuple[LongCtxBatch, ...]`, *optional*): Two batches that run in place of this one,
            alternately; this rank's rows of the first come before those of the second.
        half (`int`, *optional*, defaults to 0): Which half of another batch this one is.
        prepared (`bool`): Whether it came through a model that keeps the documents of its recurrent
            layers apart; never pickled.
        binding (`Binding`, *optional*): What ties it to this process; never pickled.
    """

    layout: Layout
    rank: int
    options: PlanOptions = field(default_factory=PlanOptions)
    budget: int = 0
    filler: int = 0
    contents: int = 0
    stream: int = 0
    pieces: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    halves: tuple["LongCtxBatch", ...] = ()
    half: int = 0
    prepared: bool = False
    binding: Binding = field(default_factory=Binding)

    def __getstate__(self) -> dict[str, Any]:
        tied = ("binding", "prepared")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def parts(self) -> tuple["LongCtxBatch", ...]:
        """The batches that run: the halves, or else the batch itself."""
        return self.halves or (self,)

    def bind(self, runtime: Any = None, *, options: PlanOptions | None = None) -> None:
        """Tie the batch and its halves to this process.

        Args:
            runtime (`Runtime`, *optional*): The process's channel and accounts; kept as it is
                without.
            options (`PlanOptions`, *optional*): What plans depend on from now on, as when a server
                comes or goes; kept as they are without.
        """
        for batch in (self, *self.halves):
            binding = batch.binding
            binding.runtime = runtime or binding.runtime
            if options is not None and options != batch.options:
                batch.options = options
                for kept in (binding.choices, binding.scans, binding.programs):
                    kept.clear()  # plans are kept by their options, these are not
            binding.layers.clear()  # they hold the runtime and the plans of before

    def plan(self, algorithm: str, kind: LayerKind) -> Plan:
        """The plan for layers of one kind; made on first use, the same on every rank.

        Args:
            algorithm (`str`): Planner of the layers that ask, which have the last word: a loop of
                the user's own may leave the options at their defaults.
            kind (`LayerKind`): The layers.
        """
        options = self.options
        if algorithm != options.algorithm:  # raises where that planner cannot do what they say
            options = replace(options, algorithm=algorithm)
        if options.auto is not None and algorithm == "charm":
            choices = self.binding.choices
            if kind not in choices:
                choices[kind] = choose_plan(self.layout, kind=kind, options=options)
            return choices[kind].plan
        plans = self.binding.plans
        if (options, kind) not in plans:
            plans[options, kind] = make_plan(self.layout, kind=kind, options=options)
        return plans[options, kind]

    def scan_program(self, sizes: StateSizes) -> Program | None:
        """This rank's scan of states; `None` where no document of its own lies on other ranks."""
        programs = self.binding.programs
        if sizes not in programs:
            # the longest scan of the batch decides: all ranks must take the same schedule
            ranks, measured = longest_chain(self.layout), self.options.link
            link = measured or NeighbourLink()
            schedule = choose_schedule(sizes, ranks=ranks, link=link, flag=self.options.scan)
            if ranks > 1:
                self.binding.scans[sizes] = ScanChoice(
                    sizes=sizes,
                    ranks=ranks,
                    schedule=schedule,
                    link=link,
                    measured=measured is not None,
                )
            programs[sizes] = state_scan.scan_program(
                self.layout,
                rank=self.rank,
                state=sizes.state,
                schedule=schedule.name,
                pieces=schedule.pieces,
            )
        return programs[sizes]

    def halo_program(self, width: int) -> Program | None:
        """This rank's exchange of the `width` rows before its first; `None` where there is none."""
        programs = self.binding.programs
        if width not in programs:
            programs[width] = state_scan.halo_program(self.layout, rank=self.rank, width=width)
        return programs[width]

    @property
    def fingerprints(self) -> dict[str, int]:
        """Stable hashes of what plans follow from, by what it is; the same on all ranks."""
        layouts = [part.layout for part in self.parts]
        columns = [c.astype("<i4").tobytes() for x in layouts for c in (x.lengths, x.columns)]
        return self.options.fingerprints | {
            "the documents": self.contents,
            "the layout of the documents": fingerprint(*columns),
        }

    def digest(self, algorithm: str, kinds: Iterable[LayerKind]) -> int:
        """A stable hash of the plans, a non-negative int64.

        Args:
            algorithm (`str`): Planner of the softmax layers.
            kinds (`Iterable[LayerKind]`): The kinds of the softmax layers, maybe none.
        """
        kinds = [*kinds] or [LayerKind()]  # without softmax layers any plan shows the layout
        plans = [part.plan(algorithm, kind).digest for kind in kinds for part in self.parts]
        return fingerprint(np.sort(plans).tobytes())  # sorted, as kinds may be a set

    def places(self) -> np.ndarray:
        """Where each row of this rank is from, int64 `[rows, 2]`.

        The row in the data set, -1 for filler, and the position there.
        """
        fillers = len(self.layout.lengths) - len(self.pieces)
        begins = np.concatenate([self.pieces[:, :2], np.full((fillers, 2), (-1, 0))])
        segments = self.layout.of_rank(self.rank)
        documents = [s.document for s in segments]
        places = begins[np.repeat(documents, [s.stop - s.start for s in segments])]
        places[:, 1] += self.layout.positions(self.rank)
        return places


def halved(halves: Halves, rank: int, *, options: PlanOptions) -> tuple[LongCtxBatch, ...]:
    """The batch objects of a batch's two halves, as `rank` sees them."""
    parts = enumerate(halves.parts)
    return tuple(LongCtxBatch(part, rank, options=options, half=half) for half, part in parts)
