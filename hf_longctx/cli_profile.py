"""`hf-longctx profile`: measures what attention costs here, for plans that balance seconds.

Floor: the top. Exit codes: 0 done, 2 refused.
"""

import argparse
from typing import Any

from .cli_common import add_json, progress, show


def add_profile(commands: Any) -> None:
    """Add the subcommand to those of `hf-longctx`."""
    profile = commands.add_parser(
        "profile",
        help="measure what attention costs on this device, for --longctx_cost measured",
        description=(
            "Times the attention kernels over a grid of query rows and keys, on one thread, and "
            "keeps the table in the user's cache. Takes 10 to 60 seconds. The shape is that of "
            "the model's config: num_attention_heads, num_key_value_heads, head_dim."
        ),
        epilog="example: hf-longctx profile --heads 9 --kv_heads 3 --head_dim 64 --compare 3",
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
    """Measure, keep the table, print the report; returns the exit code."""
    from .bench.profile import run as measure

    with progress(arguments):
        report = measure(
            device=arguments.device,
            dtype=arguments.dtype,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
            head_dim=arguments.head_dim,
            compare=arguments.compare,
        )
    show(report, arguments.json)
    return 0
