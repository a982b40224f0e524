"""Compare across a group what all of its ranks must share, and name what differs and where.

Ranks that plan differently would exchange messages of other sizes, or silently train on other
rows, so one int64 is compared before each step. Only where it differs do the ranks gather the hash
of each part, to name the flag that one of them was started with. Layer: runtime.
"""

from collections.abc import Mapping

import torch

from ..comm.channels import Channel
from ..comm.topology import gather
from ..planning.planners.options import fingerprint


def validate_agreement(
    fingerprints: Mapping[str, int], *, made: int = 0, channel: Channel, ranks: int, what: str
) -> None:
    """Refuse to go on where the ranks of a group hold different values.

    All ranks of the group call this at once.

    Args:
        fingerprints (`Mapping[str, int]`): A stable hash of each value, a non-negative int64, by
            what sets it; the same names on all ranks.
        made (`int`, *optional*): A hash of what the ranks made of these values, which may differ
            between versions of a library.
        channel (`Channel`): Between the ranks.
        ranks (`int`): How many they are.
        what (`str`): What is compared, for errors.

    Raises:
        ValueError: on every rank, with what differs and on which ranks.
        ExchangeError: where a rank does not answer.
    """
    mine = torch.tensor([*fingerprints.values()], dtype=torch.int64)
    number = fingerprint(mine.numpy().tobytes(), made.to_bytes(8, "little"))
    try:
        channel.agree(number, what=what)
    except ValueError as error:
        # every rank is here: `agree` raises on all of them or on none
        everyone = gather(channel, mine, ranks=ranks)
        holders = (everyone[:, None] == everyone[None]).sum(0)
        usual = everyone.gather(0, holders.argmax(0, keepdim=True))  # in a tie that of a lower rank
        parts = [
            f"{name} on rank {' and '.join(map(str, odd.nonzero()[:, 0].tolist()))}"
            for name, odd in zip(fingerprints, (everyone != usual).T, strict=True)
            if odd.any()
        ]
        if not parts:  # what was made differs alone
            raise
        raise ValueError(
            f"rank {channel.rank}: the ranks of a group disagree on {what}: different from the "
            f"other ranks {'is' if len(parts) == 1 else 'are'} {'; '.join(parts)}; give every rank "
            "the same data set, seed, flags and versions"
        ) from error
