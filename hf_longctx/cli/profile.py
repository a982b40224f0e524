"""`hf-longctx profile`: measure what attention costs here, for plans that balance seconds.

Layer: cli. Exit codes: 0 done, 2 refused.
"""

import argparse
from typing import Any

from .common import add_json, figure_help, progress, show

# Keys of the JSON object. The documentation's page of JSON keys prints this table.
FIGURES = {
    "file": "where the table was saved",
    "ns_per_entry_slowest, ns_per_entry_fastest": "range of the measured rates: nanoseconds per "
    "score entry, forward and backward",
    "shape, dtype, seed, processes, threads_per_process, allocator, clock, cpu, cores, torch, "
    "transformers": "what the figures hold for",
}
COMPARED_FIGURES = {
    "entries_max_over_mean": "score entries of the busiest rank over the mean, planned by entries",
    "seconds_max_over_mean_static, _entries, _measured": "measured seconds of the busiest rank "
    "over the mean: no work moved, planned by entries, planned by the table",
    "busiest_seconds_static, _entries, _measured": "measured seconds of the busiest rank",
    "predicted_max_over_mean_static, _entries, _measured": "busiest rank over the mean as the "
    "table predicts it",
    "prediction_error": "error of a rank's predicted seconds, relative, worst rank and plan",
}


def add_command(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    profile = commands.add_parser(
        "profile",
        help="measure what attention costs on this device, for --longctx_cost measured",
        description=(
            "Times the attention kernels over a grid of query rows and keys, on one thread,\n"
            "and saves the table in the user's cache, where --longctx_cost measured reads it.\n"
            "Takes 10 to 60 seconds. Take the shape from the model's config:\n"
            "num_attention_heads, num_key_value_heads, head_dim.\n"
        ),
        epilog=(
            "example:\n  hf-longctx profile --heads 9 --kv_heads 3 --head_dim 64 --compare 3\n\n"
            + figure_help("figures", FIGURES)
            + "\n"
            + figure_help("figures of --compare, for each layout", COMPARED_FIGURES)
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_argument("--device", default="cpu", help="cpu (default)")
    profile.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    profile.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    profile.add_argument("--kv_heads", type=int, default=4, help="key/value heads (default 4)")
    profile.add_argument("--head_dim", type=int, default=64, help="head size (default 64)")
    profile.add_argument(
        "--compare",
        type=int,
        default=0,
        metavar="N",
        help="also run the attention of N batches as planned by score entries and by the table",
    )
    add_json(profile)
    profile.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, save the table and print the report; returns the exit code."""
    from ..verify.cost_profile import compare_layouts

    with progress("hf-longctx profile", json_path=arguments.json):
        report = compare_layouts(
            device=arguments.device,
            dtype=arguments.dtype,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            compare=arguments.compare,
        )
    show(report, arguments.json)
    return 0
