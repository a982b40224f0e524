"""Run a Trainer's steps on micro-batches that a group of ranks shares.

`StepsMixin`, part of `LongCtxTrainerMixin`, ties each batch to this process's channel, has the
ranks compare its plan, and reports balance, bytes and waiting time. Layer: training. Letters: R
ranks of a group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..attention.spec import layer_specs
from ..comm.topology import Topology
from ..data.batch import KEY, LongCtxBatch
from ..planning.layouts.cost import LayerKind
from ..planning.layouts.levels import NeighbourLink
from ..planning.planners.options import Auto, PlanOptions
from ..planning.predict.scan_schedule import StateSizes
from ..planning.program.counts import Widths, by_level, peak_bytes
from ..runtime.agreement import validate_agreement
from ..runtime.pingpong import log_unsplit
from .checks import GuardedStep, validate_positions
from .measurements import BY_LINK, find_link, log_choices, log_scans
from .report import LEVEL, LOGGED_KEYS, StepReport, summary

_Base: Any = Trainer if TYPE_CHECKING else object  # cooperative: the Trainer comes after it


class StepsMixin(_Base):
    """Runs a Trainer's steps on shared batches."""

    longctx_options: PlanOptions
    longctx_auto: Auto | None = None
    longctx_topology: Topology | None
    longctx_link: NeighbourLink | None = None  # between neighbours, once it was measured
    _logged_choices: tuple[str, ...] = ()  # algorithms that `auto` chose
    _logged_scans: frozenset[tuple[StateSizes, int]] = frozenset()
    _report: StepReport  # since the last log
    _spanning = 0  # documents of all logged steps with tokens on several ranks
    _exchanged_before: Tensor  # `_exchanged` at the last log
    _guarded_step: GuardedStep | None = None  # the step under way

    def _start_report(self) -> None:
        """Begin to count."""
        self._report = StepReport()
        self._exchanged_before = torch.zeros(2 + self.longctx_group.size, dtype=torch.float64)

    def _bind(self, inputs: dict[str, Any], *, speeds: tuple[float, ...] = ()) -> LongCtxBatch:
        """Tie a batch to this process and compare its plan across the group.

        Args:
            inputs (`dict`): What the data loader gives to the model.
            speeds (`tuple[float, ...]`, *optional*): Of each attention server, in units of a rank.

        Raises:
            ValueError: The inputs hold no batch object; a document is longer than the model's table
                of positions; or ranks hold different data or plans.
        """
        batch: LongCtxBatch | None = inputs.get(KEY)
        if batch is None:
            raise ValueError(
                f"a batch without {KEY!r} reached the model: it did not come from this trainer's "
                "data loaders; pass documents as train_dataset and leave data_collator out"
            )
        validate_positions(batch.layout.lengths.tolist(), limit=self._position_limit)
        if self.longctx_group.groups > 1 and batch.stream:  # other data sets were compared whole
            self.longctx_loaders.compare_rows(batch.stream, name="the stream")
        batch.bind(self.longctx_runtime, options=replace(self.longctx_options, speeds=speeds))
        if speeds and self.args.longctx_server_memory is not None:
            specs, dtype = layer_specs(self.model.config), next(self.model.parameters()).dtype
            limit_server_memory(
                batch,
                algorithm=self.longctx_algorithm,
                layers=[(spec.kind, spec.widths(dtype)) for spec in specs],
                limit=self.args.longctx_server_memory,
            )
        if self.longctx_runtime.channel is not None:
            kinds = {spec.kind for spec in layer_specs(self.model.config)}
            validate_agreement(
                batch.fingerprints,
                made=batch.digest(self.longctx_algorithm, kinds),
                channel=self.longctx_runtime.channel,
                ranks=self.longctx_group.size,
                what="the plan of a batch",
            )
            if self.args.process_index == 0:
                self._logged_choices = log_choices(batch, before=self._logged_choices)
        return batch

    def _find_link(self) -> None:
        """Measure the link between the group's neighbours once, if state scans depend on it."""
        channel = self.longctx_runtime.channel
        recurrent = self.longctx_attention == "zeco_linear" and self.args.longctx_scan in BY_LINK
        if self.longctx_link is None and channel is not None and recurrent:
            with self._uncounted():
                self.longctx_link = find_link(channel, ranks=self.longctx_group.size)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run one micro-batch, with this process's channel bound to it."""
        batch = self._bind(inputs, speeds=self.longctx_servers.speeds)
        kinds = [spec.kind for spec in layer_specs(self.model.config)]
        self._report.add(batch, algorithm=self.longctx_algorithm, kinds=kinds)
        if self.args.longctx_overlap == "pingpong" and self.args.process_index == 0:
            log_unsplit(batch)
        self._guarded_step = step = GuardedStep.begin(self, inputs)
        try:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
            step.end()
        finally:
            self._guarded_step = None
        if self.args.process_index == 0:
            self._logged_scans = log_scans(batch, before=self._logged_scans)
        return loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the targets of an accumulation window over all trainers."""
        # At least 1: a window without targets gives loss 0, not NaN.
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return torch.clamp(count, min=1) if isinstance(count, Tensor) else count

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, without counting what is exchanged as part of the training steps."""
        with self._uncounted():
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the balance, bytes and waiting time of the steps since the last log."""
        # The budget, since tokens may be 0: a group may have had only filler.
        if "loss" in logs and self._report.budget:
            report = self._report.of_all_groups(self.accelerator, ranks=self.longctx_group.size)
            self._spanning += report.spanning
            added = report.logs() | self._moved()
            if self.args.longctx_overlap == "pingpong":
                added["longctx_halved"] = round(report.halved / report.batches, 4)
            assert all(k in LOGGED_KEYS or k.startswith(LEVEL) for k in added), added.keys()
            logs = logs | added
            self._report = StepReport()
        super().log(logs, *args, **kwargs)

    def _exchanged(self) -> Tensor:
        """Return the seconds this rank has waited, the bytes it has sent in all, and those to each
        rank of its group, float64 `[2 + R]`."""
        runtime, sent_to = self.longctx_runtime, self.longctx_runtime.sent_to
        to_each = [sent_to[rank] for rank in range(self.longctx_group.size)]
        figures = [runtime.account.waited, runtime.sent_bytes, *to_each]
        return torch.tensor(figures, dtype=torch.float64)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Leave what is exchanged out of the log, which is about training steps."""
        before = self._exchanged()
        try:
            yield
        finally:
            self._exchanged_before += self._exchanged() - before

    def _moved(self) -> dict[str, float]:
        """Return log entries: bytes sent by all trainers, also by the level of nested domains that
        they crossed, and the longest wait of any rank, since the last log. A collective call."""
        exchanged = self._exchanged()
        change, self._exchanged_before = exchanged - self._exchanged_before, exchanged
        crossed, levels = [], self.longctx_topology and self.longctx_topology.levels
        if levels and len(levels.sizes) > 1:
            sent = dict(enumerate(change[2:].tolist()))
            over = by_level(sent, rank=self.longctx_group.rank, levels=levels)
            crossed = [over[level] for level in range(len(levels.sizes))]
        mine = torch.tensor([*change[:2].tolist(), *crossed], dtype=torch.float64)
        mine = mine[None].to(self.accelerator.device)
        # Levels may be measured, so groups may differ in how many they have.
        rows = self.accelerator.gather(self.accelerator.pad_across_processes(mine, dim=1))
        return {
            "longctx_bytes_moved": int(rows[:, 1].sum()),
            "longctx_wait_seconds": round(float(rows[:, 0].max()), 4),
            **{f"{LEVEL}{level}": int(sent.sum()) for level, sent in enumerate(rows[:, 2:].T)},
        }

    def longctx_summary(self) -> dict[str, Any]:
        """Return what the run did; see `training.report.SUMMARY_KEYS`."""
        spanning = self._spanning + self._report.spanning
        return summary(self.state.log_history, ranks=self.longctx_group.size, spanning=spanning)


def limit_server_memory(
    batch: LongCtxBatch,
    *,
    algorithm: str,
    layers: Sequence[tuple[LayerKind, Widths]],
    limit: int,
) -> None:
    """Lower the speeds in `batch.options` until no server holds more than `limit` bytes.

    A plan gives a server work by its speed, so a server short of memory is planned as a slower one.
    Every rank finds the same speeds.

    Args:
        batch (`LongCtxBatch`): Batch with the speeds of its servers.
        algorithm (`str`): The algorithm that plans the layers.
        layers (`Sequence[tuple[LayerKind, Widths]]`): Kind and row sizes of each layer.
        limit (`int`): Bytes of queries, keys, values and results of one layer.
    """
    # Below 1, since the bytes of a server fall more slowly than its speed.
    margin = 0.9
    while True:
        speeds = batch.options.speeds
        peaks = [
            _server_peak(batch, number, algorithm=algorithm, layers=layers)
            for number in range(len(speeds))
        ]
        if not peaks or max(peaks) <= limit:
            return
        lowered = tuple(
            speed if peak <= limit else speed * margin * min(limit / peak, 1.0)
            for speed, peak in zip(speeds, peaks, strict=True)
        )
        batch.bind(options=replace(batch.options, speeds=lowered))


def _server_peak(
    batch: LongCtxBatch, number: int, *, algorithm: str, layers: Sequence[tuple[LayerKind, Widths]]
) -> int:
    """Return the bytes that a server holds in its largest layer and direction."""
    process = batch.layout.ranks + number  # servers are numbered after the ranks
    programs = {
        (part.plan(algorithm, kind).program(process), widths)
        for part in batch.parts
        for kind, widths in layers
    }
    return max(
        peak_bytes(program, widths, backward=backward)
        for program, widths in programs
        for backward in (False, True)
    )
