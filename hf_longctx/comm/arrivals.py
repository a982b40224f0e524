"""Act on exchanges as they arrive, from one waiting thread per channel.

gloo has no way to ask whether a message has come, so passing one on as it arrives takes a thread
that waits. A channel has one `Arrivals`, whose thread waits for exchanges in the order they were
added and lives only while one is due. It never fails by itself: an error is kept for whoever
waits for the exchange.
Layer: comm.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

Action = Callable[[], None]


class Exchange(Protocol):
    """Messages under way."""

    def done(self) -> bool:
        """Return whether every message has arrived and left."""
        ...

    def wait(self, *, since: float | None = None) -> None:
        """Block until it is done.

        Args:
            since (`float`, *optional*): When waiting began, by `time.monotonic`; now by default.
                Exchanges that are waited for one after another share it, so that several lost peers
                take no longer to notice than one.

        Raises:
            ExchangeError: on a time-out or a lost peer.
        """
        ...


class JoinedExchange:
    """Several exchanges that are waited for as one.

    Args:
        parts (`Sequence[Exchange]`): Waited for in this order.
    """

    def __init__(self, parts: Sequence[Exchange]) -> None:
        self.parts = parts

    def done(self) -> bool:
        """Return whether all of them are done."""
        return all(part.done() for part in self.parts)

    def wait(self, *, since: float | None = None) -> None:
        """Block until all of them are done."""
        # One start for all parts: each has its own time-out, and they run side by side.
        began = time.monotonic() if since is None else since
        for part in self.parts:
            part.wait(since=began)


class Arrival:
    """An exchange that the waiting thread waits for, and what it does then.

    Args:
        exchange (`Exchange`): What arrives.
        action (`Callable`): Done first.

    Attributes:
        error (`Exception`, *optional*): Why it did not arrive, or what an action raised.
    """

    def __init__(self, exchange: Exchange, action: Action) -> None:
        self.error: Exception | None = None
        self._exchange: Exchange | None = exchange
        self._actions = [action]
        self._lock, self._over = threading.Lock(), threading.Event()

    def then(self, action: Action) -> None:
        """Add an action; it runs at once if the exchange has arrived, and never after an error."""
        with self._lock:
            if not self._over.is_set():
                self._actions.append(action)
                return
        if self.error is None:
            action()

    def take(self, failed: Exception | None = None) -> None:
        """Wait for the exchange and act; called by the waiting thread.

        Args:
            failed (`Exception`, *optional*): Give the exchange up for this error instead.
        """
        try:
            if failed is not None:
                raise failed
            assert self._exchange is not None, "an arrival is taken once"
            self._exchange.wait()
            # Under the lock, so that an action added meanwhile runs after these, not among them.
            with self._lock:
                for action in self._actions:
                    action()
                self._end()
        except Exception as error:  # the thread has nobody to tell but whoever waits
            with self._lock:
                self.error = error
                self._end()

    def _end(self) -> None:
        self._exchange, self._actions = None, []  # they hold messages
        self._over.set()

    def done(self) -> bool:
        """Return whether it has arrived and every action has run, or it has failed."""
        return self._over.is_set()

    def wait(self, *, since: float | None = None) -> None:
        """Block until then. The waiting thread keeps the time; `since` is not used."""
        # No time-out of its own: the waiting thread's exchange has one, and always ends.
        self._over.wait()
        if self.error is not None:
            raise self.error


class RelayedExchange:
    """An exchange that begins when another arrives; only then does its time-out begin.

    Args:
        upon (`Arrival`): What comes first.
        exchange (`Exchange`): What follows.
    """

    def __init__(self, upon: Arrival, exchange: Exchange) -> None:
        self.upon, self.exchange = upon, exchange

    def done(self) -> bool:
        """Return whether both are done."""
        return self.upon.done() and self.exchange.done()

    def wait(self, *, since: float | None = None) -> None:
        """Block until both are done; `since` is earlier than the second one began, so not used."""
        self.upon.wait()
        self.exchange.wait()


class Arrivals:
    """The exchanges of one channel on whose arrival something is done.

    Args:
        name (`str`): Name of the waiting thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._due: deque[Arrival] = deque()
        self._lock, self._running = threading.Lock(), False

    def add(self, exchange: Exchange, action: Action) -> Arrival:
        """Have the waiting thread run `action` once `exchange` has arrived."""
        arrival = Arrival(exchange, action)
        # Under the lock that the thread ends under, so none is added behind its last look.
        with self._lock:
            self._due.append(arrival)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self.name, daemon=True).start()
        return arrival

    def _run(self) -> None:
        failed: Exception | None = None
        while True:
            with self._lock:
                if not self._due:
                    self._running = False
                    return
                arrival = self._due.popleft()
            arrival.take(failed)
            # Waiting for the next ones too would take the whole time-out again for each.
            failed = failed or arrival.error
