"""What ties batches to this process: the channel of its group and the account of its attention.

Floor: runtime.
"""

from collections import Counter
from dataclasses import dataclass, field

from ..comm.channels import Channel
from ..comm.relaying import sent_over_all, sent_to_each
from .executor import Account
from .requests import Caller


@dataclass(slots=True, kw_only=True)
class Runtime:
    """The channel of this rank's group, and what its attention layers did so far.

    Args:
        channel (`Channel`, *optional*): How the group exchanges; `None` where one process is alone.
        account (`Account`): Counts of calls, bytes and seconds.
        callers (`tuple[Caller, ...]`): Tell each extra server what it will have to do; only the
            group's first rank has them.
    """

    channel: Channel | None = None
    account: Account = field(default_factory=Account)
    callers: tuple[Caller, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent to its peers."""
        return sent_over_all(self.channel) if self.channel else 0

    @property
    def sent_to(self) -> Counter[int]:
        """Bytes this rank has sent to each of its peers."""
        return sent_to_each(self.channel) if self.channel else Counter()
