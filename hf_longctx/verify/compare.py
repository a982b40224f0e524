"""Compare a model over ranks with one process, and judge the errors by bounds.

Two references run every document alone: the naive float64 twin, and stock Transformers in float32.
Without the second one, a mistake shared by the twin and the fast path would cancel. Bounds:

- against the twin in float64: 1e-10, with recurrent layers 1e-9;
- against the twin in bf16: twice the error of the plain bf16 path, gradients three times;
- in float32, and against Transformers: 1e-5 (recurrent gradients 1e-4) or, where the plain float32
  path itself is further than that from the twin, twice its error (gradients three times).

Layer: verify.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.spec import log_whole_exchanges, validate_layer_heads
from ..config import LongCtxArguments
from ..support import (
    recurrent_family,
    validate_model,
    validate_name,
    validate_pingpong,
    validate_unread_flags,
)
from ..training.measurements import flag_options
from .fla_reference import naive_kernels
from .rank_pool import RankPool
from .ranks import Case, RankResult, run_rank
from .twins import (
    DTYPES,
    REFERENCE,
    backward,
    build,
    dropout_fields,
    load_config,
    precision,
    register_reference,
)

logger = logging.getLogger(__name__)
ROWS = 320  # tokens per rank: long enough for the planner to move 128-row tasks
BF16_UNIT = 2**-9  # rounding of bf16: a plain error below it is luck, mostly of a mean


def bounds_of(
    dtype: str, *, plain: Mapping[str, float], single: Mapping[str, float], recurrent: bool
) -> dict[str, float]:
    """Compute the bound of each error.

    Args:
        dtype (`str`): Dtype of the comparison with the twin.
        plain (`Mapping[str, float]`): Errors of the plain path in `dtype`, against the twin.
        single (`Mapping[str, float]`): Errors of the plain path in float32.
        recurrent (`bool`): Whether the model has recurrent layers, whose sums run over whole
            documents and so round more.
    """
    bounds: dict[str, float] = {}
    for key in plain:
        factor = 3 if key == "grad_error" else 2
        least = 1e-4 if recurrent and key == "grad_error" else 1e-5
        in_float32 = least if single[key] <= least else factor * single[key]
        in_bf16 = factor * max(plain[key], BF16_UNIT)
        bounds[key] = {
            "float64": 1e-9 if recurrent else 1e-10,
            "float32": in_float32,
            "bf16": in_bf16,
        }[dtype]
        bounds[f"{key}_vs_transformers"] = in_float32
    return bounds | {"leak": 0.0, "recompute_bytes": 0.0}


def broken(report: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    """Describe the bounds that a report breaks."""
    found = [
        f"{key} {report[key]:.3g} is above {bound:.3g}"
        for key, bound in bounds.items()
        if not report[key] <= bound or report[key] == np.inf  # the bound may be infinite as well
    ]
    if report["bytes_sent"] != report["bytes_planned"]:
        found.append(
            f"bytes_sent {report['bytes_sent']} differ from bytes_planned {report['bytes_planned']}"
        )
    if report.get("servers") and not report["tasks_on_servers"]:
        found.append("no task ran on a server: give longer --document_lengths")
    if not report["attention_calls"]:
        found.append("the model never called the attention hook")
    return found


@dataclass
class Reference:
    """Logits, loss and gradients of all batches, in document order."""

    logits: list[Tensor]
    loss: float
    grads: dict[str, Tensor]


def case_lengths(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return document lengths of three batches that exercise every kind of rank edge.

    Documents end on, before and after rank edges; one has a single token, some have odd lengths,
    and one spans every rank.
    """
    total = ROWS * ranks
    on_edge = (1, 127, ROWS - 128) + (ROWS,) * (ranks - 1)
    near_edge = (ROWS - 1, 2) + (total - ROWS - 1 - 60, 59) if ranks > 1 else (ROWS - 1, 1)
    spanning = (1, total - 1 - 90, 33, 57)
    return on_edge, near_edge, spanning


def run_reference(case: Case, *, name: str, dtype: torch.dtype) -> Reference:
    """Run every document alone through the same weights, under another attention."""
    logger.info("one process, %s in %s, each document alone", name, str(dtype)[6:])
    register_reference()
    model = build(case.model, name=name, dtype=dtype)
    model.train()
    found = Reference([], 0.0, {})
    count = torch.tensor(case.targets)
    with precision(dtype), naive_kernels(model):
        for batch in range(len(case.lengths)):
            logits = []
            # The loss of each document is divided by all targets, so that losses add up.
            for document in case.documents(batch):
                ids = torch.from_numpy(document)[None]
                output = model(input_ids=ids, labels=ids, num_items_in_batch=count)
                backward(output.loss)
                found.loss += float(output.loss.detach())
                logits.append(output.logits[0].detach()[:, case.columns])
            found.logits.append(torch.cat(logits))
    for name_, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.grads[name_] = grad
    return found


def _gather(case: Case, results: list[RankResult]) -> Reference:
    """Bring the ranks' results into document order."""
    logits = []
    for batch in range(len(case.lengths)):
        layout, _ = case.cut(batch, ranks=len(results))
        rows = torch.cat([r.logits[batch] for r in results])
        logits.append(rows[torch.from_numpy(layout.inverse())])
    return Reference(logits, sum(r.loss for r in results), results[0].grads)


def errors(ours: Reference, right: Reference) -> dict[str, float]:
    """Compute `logit_error`, `loss_error` and `grad_error`, each of the worst tensor.

    Logits and loss: `max|a - b| / max|b|`. A gradient is measured against the larger of its own
    largest entry and a thousandth of the model's largest: gradients that should be 0 are rounding.
    """
    largest = max(float(g.abs().max()) for g in right.grads.values())
    grads = [
        _distance(ours.grads[name], g) / max(float(g.abs().max()), 1e-3 * largest)
        for name, g in right.grads.items()
    ]
    logits = [
        _distance(a, b) / float(b.abs().max())
        for a, b in zip(ours.logits, right.logits, strict=True)
    ]
    loss = abs(ours.loss - right.loss) / abs(right.loss)
    # np.max, unlike max, returns NaN if any entry is NaN; NaN then counts as infinite.
    found = {"logit_error": np.max(logits), "loss_error": loss, "grad_error": np.max(grads)}
    return {key: float(value) if np.isfinite(value) else np.inf for key, value in found.items()}


def _distance(a: Tensor, b: Tensor) -> float:
    """Compute `max|a - b|` in float64, whatever the dtypes."""
    return float((a.double() - b.double()).abs().max())


def _lengths(given: Sequence[int] | None, *, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the documents asked for as one batch, else the three batches of `case_lengths`."""
    if given is None:
        return case_lengths(ranks)
    if min(given, default=0) < 1 or max(given) < 2 or sum(given) < ranks:
        raise ValueError(
            f"--document_lengths {','.join(map(str, given))}: each must be at least 1, one at "
            f"least 2 (a document of one token has no target), and all together {ranks}, one a rank"
        )
    return (tuple(given),)


def verify(
    *,
    model: str,
    name: str,
    ranks: int,
    arguments: LongCtxArguments | None = None,
    dtype: str = "float64",
    checkpointing: bool = False,
    document_lengths: Sequence[int] | None = None,
    servers: int = 0,
    pool: RankPool | None = None,
) -> dict[str, Any]:
    """Compare one model under one of our names with one process.

    Args:
        model (`str`): Checkpoint folder or config JSON.
        name (`str`): Attention name.
        ranks (`int`): Gloo processes to run.
        arguments (`LongCtxArguments`, *optional*): Layout, tolerance, overlap and domains; topology
            `auto` is one domain, as all ranks are on this machine.
        dtype (`str`, *optional*, defaults to `float64`): Dtype of the comparison with the twin.
        checkpointing (`bool`, *optional*): Run both kinds and report the worst of each figure.
        document_lengths (`Sequence[int]`, *optional*): Documents of one batch to use instead of
            those of `case_lengths`.
        servers (`int`, *optional*, defaults to 0): Extra attention servers that the ranks start.
        pool (`RankPool`, *optional*): Rank processes to use; started and ended here by default.

    Returns:
        The report, with the keys of `FIGURES` in `cli/verify.py`.

    Raises:
        ValueError: where the combination is refused.
    """
    validate_name(name)
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be at least 1")
    if servers < 0 or (servers and name != "distca"):
        raise ValueError(
            f"--servers {servers} with {name}: it must be 0 or more, and only distca has servers"
        )
    arguments = arguments or LongCtxArguments()
    config = load_config(model)
    validate_model(config, name=name)
    validate_unread_flags(arguments, name=name, algorithm=arguments.algorithm(name))
    size = arguments.longctx_ulysses_size
    validate_layer_heads(config, name=arguments.algorithm(name), ranks=ranks, size=size)
    if arguments.longctx_overlap == "pingpong":
        validate_pingpong(name)
    log_whole_exchanges(config, overlap=arguments.plan_overlap(name))
    options = flag_options(arguments, name=name, ranks=ranks)
    case = Case(
        model=model,
        name=name,
        options=options,
        dtype=dtype,
        lengths=_lengths(document_lengths, ranks=ranks),
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        servers=servers,
    )
    twin = run_reference(case, name=REFERENCE, dtype=torch.float64)
    stock = run_reference(case, name="eager", dtype=torch.float32)
    plain = single = errors(stock, twin)
    if dtype == "bf16":
        plain = errors(run_reference(case, name="eager", dtype=DTYPES[dtype]), twin)
    kinds = ("reentrant", "nonreentrant") if checkpointing else ("none",)
    used = {"ranks": ranks, "channels": options.levels(ranks).channels}
    own = pool or RankPool(ranks)
    report: dict[str, Any] = {}
    scans: dict[str, dict[str, Any]] = {}
    try:
        for kind in kinds:
            checked = replace(case, checkpointing=kind)
            logger.info("%d ranks, %s in %s, checkpointing %s", ranks, name, dtype, kind)
            results = own.run(run_rank, case=checked, **used)
            scans = results[0].scans
            in_float32 = results  # compared with stock Transformers
            if dtype != "float32":
                logger.info("%d ranks, %s in float32, checkpointing %s", ranks, name, kind)
                in_float32 = own.run(run_rank, case=replace(checked, dtype="float32"), **used)
            found = _report(checked, results, in_float32, twin, stock)
            report = {k: max(v, report.get(k, v)) for k, v in found.items()}
    finally:
        if pool is None:
            own.close()
    recurrent = recurrent_family(config.get_text_config(decoder=True)) is not None
    bounds = bounds_of(dtype, plain=plain, single=single, recurrent=recurrent)
    return {
        "model": model,
        "attn_implementation": name,
        "dtype": dtype,
        **report,
        "ranks": ranks,
        "layout": options.layout,
        "overlap": arguments.longctx_overlap,
        "topology": str(options.topology or f"{ranks} (auto: one domain)"),
        "ulysses_size": arguments.longctx_ulysses_size,
        **({"scan": scans} if name == "zeco_linear" else {}),
        "logit_columns": len(case.columns),
        "set_to_0": dropout_fields(config),
        "bounds": bounds,
        "failed": broken(report, bounds),
    }


def _report(
    case: Case,
    results: list[RankResult],
    in_float32: list[RankResult],
    twin: Reference,
    stock: Reference,
) -> dict[str, Any]:
    """Form the errors and counts of one run."""
    ours = errors(_gather(case, results), twin)
    theirs = errors(_gather(case, in_float32), stock)
    both = (*results, *in_float32)
    return {
        **ours,
        **{f"{key}_vs_transformers": value for key, value in theirs.items()},
        "leak": float(np.max([r.leak for r in both])),
        "attention_calls": sum(r.attention_calls for r in results),
        "bytes_planned": sum(r.bytes_planned for r in results),
        "bytes_sent": sum(r.bytes_sent for r in results),
        "recompute_bytes": sum(r.recompute_bytes for r in both),
        **({"switches": sum(r.switches for r in results)} if case.halves else {}),
        **(
            {"head_groups": max(r.head_groups for r in results)}
            if case.options.overlap == "heads"
            else {}
        ),
        "servers": case.servers,
        "tasks_on_servers": sum(r.tasks_on_servers for r in results),
    }
