"""Errors of the plain paths -> what ours may be, and which of a report's are larger.

Floor: verify. Where the numbers come from stands in `compare`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

BF16_UNIT = 2**-9  # rounding of bf16: plain errors below it are luck (a mean's, mostly)


def bounds_of(
    dtype: str, *, plain: Mapping[str, float], single: Mapping[str, float], recurrent: bool
) -> dict[str, float]:
    """What each error may be.

    Args:
        dtype (`str`): Of the comparison with the twin.
        plain (`Mapping[str, float]`): Errors of the plain path in `dtype`, against the twin.
        single (`Mapping[str, float]`): Those of the plain path in float32.
        recurrent (`bool`): The model has recurrent layers, whose sums run over whole documents.
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
    """The bounds that a report breaks, in words."""
    found = [
        f"{key} {report[key]:.3g} is above {bound:.3g}"
        for key, bound in bounds.items()
        if not report[key] <= bound or report[key] == np.inf  # the plain path may be infinite too
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
