"""Exchanges that other work hangs on -> that work, done as they arrive: one waiting thread each.

Layer: comm. A channel has one `Arrivals`, whose thread waits for exchanges in the order in which
they were given; gloo has no way to ask whether a message has come. The thread lives only while an
exchange is due. It never fails by itself: an error is kept for whoever waits for the exchange.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

Action = Callable[[], None]


class Exchange(Protocol):
    """An exchange under way."""

    def done(self) -> bool:
        """Whether every message of the exchange has arrived and left."""
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


class Joined:
    """Exchanges that are waited for as one."""

    def __init__(self, parts: Sequence[Exchange]) -> None:
        self.parts = parts

    def done(self) -> bool:
        """Whether all of them are."""
        return all(part.done() for part in self.parts)

    def wait(self, *, since: float | None = None) -> None:
        """Block until all of them are done, in their order."""
        began = time.monotonic() if since is None else since
        for part in self.parts:
            part.wait(since=began)


class Arrival:
    """An exchange whose arrival a thread waits for, and what is done then.

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
        """Do one thing more once it has arrived: at once where it has. Not done on an error."""
        with self._lock:
            if not self._over.is_set():
                self._actions.append(action)
                return
        if self.error is None:
            action()

    def take(self, failed: Exception | None = None) -> None:
        """Wait for it and act; for the waiting thread. With `failed`, give it up instead."""
        try:
            if failed is not None:
                raise failed
            assert self._exchange is not None, "an arrival is taken once"
            self._exchange.wait()
            with self._lock:
                for action in self._actions:
                    action()
                self._end()
        except Exception as error:  # the thread has nobody to tell but who waits
            with self._lock:
                self.error = error
                self._end()

    def _end(self) -> None:
        self._exchange, self._actions = None, []  # they hold messages
        self._over.set()

    def done(self) -> bool:
        """Whether it has arrived and all was done, or will not."""
        return self._over.is_set()

    def wait(self, *, since: float | None = None) -> None:
        """Block until then; how long a message may take is up to the waiting thread."""
        self._over.wait()
        if self.error is not None:
            raise self.error


class Following:
    """An exchange that cannot end before an arrival, which starts the clock of its waits.

    Args:
        upon (`Arrival`): What comes first.
        exchange (`Exchange`): What follows.
    """

    def __init__(self, upon: Arrival, exchange: Exchange) -> None:
        self.upon, self.exchange = upon, exchange

    def done(self) -> bool:
        """Whether both are."""
        return self.upon.done() and self.exchange.done()

    def wait(self, *, since: float | None = None) -> None:
        """Block until both are done; `since` says nothing of what began later."""
        self.upon.wait()
        self.exchange.wait()


class Arrivals:
    """What is to be done as the exchanges of one channel arrive.

    Args:
        name (`str`): Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._due: deque[Arrival] = deque()
        self._lock, self._running = threading.Lock(), False

    def add(self, exchange: Exchange, action: Action) -> Arrival:
        """Have `action` done by the waiting thread once `exchange` has arrived."""
        arrival = Arrival(exchange, action)
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
            failed = failed or arrival.error  # each would take its whole time-out to fail too
