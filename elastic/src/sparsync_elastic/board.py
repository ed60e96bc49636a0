"""The store of a run: an append-only list of lines per epoch, so that one round trip reads all of it."""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from timeit import repeat
from typing import Any

import torch.distributed as dist

from sparsync_elastic.epochs import Epoch, Note
from sparsync_elastic.world import Result, StoreSilentError, asked

# Public, but missing from torch's __all__.
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

CALL_S = 5.0  # longest call to the store, before another connection is tried
CONNECT_S = 2.0  # longest try to connect; torch makes longer and longer pauses within it
_NOTHING = "-"  # no key has this value


class Said:
    """The lines of one epoch, in order. A line has the member that wrote it, a kind, and a value.

    - "comes", with a Note: a member is at the meeting, and all others must come too. "asks", with a Note: a process wants to join.
      "lives": a member has heard of the meeting. The first "next" has the text of the next epoch.
    - The first "stop" has the step before which all members meet.
    - "ready": a member has the weights. "done/N": a member has taken step N, the last one.
    - "fetches", with a member: a process that will join asks this member for the state. The member "serves" or "declines" the process.
    """

    def __init__(self, text: bytes | None = None) -> None:
        self._lines: list[list[Any]] = [json.loads(each) for each in (text or b"").splitlines()]  # Any: see above

    def of(self, kind: str) -> dict[str, Any]:  # Any: see above
        """Get the last value of a kind, by member."""
        return {member: what for member, each, what in self._lines if each == kind}

    def has(self, *line: object) -> bool:
        """Tell whether this line was written: member, kind and value."""
        return list(line) in self._lines

    @property
    def notes(self) -> dict[str, Note]:
        return {member: Note(**each) for kind in ("asks", "comes") for member, each in self.of(kind).items()}

    @property
    def next(self) -> Epoch | None:
        """The next epoch, once it is decided."""
        return next((Epoch.read(text) for _, kind, text in self._lines if kind == "next"), None)

    @property
    def stop(self) -> int | None:
        """The step before which all members meet."""
        return next((step for _, kind, step in self._lines if kind == "stop"), None)

    @property
    def alive(self) -> set[str]:
        """The processes that have answered since a meeting was called, or ask to join."""
        return {member for member, kind, _ in self._lines if kind in ("lives", "comes", "asks")}


class Board:
    """The store of a run, as one process sees it. Raises StoreSilentError if the store has not answered for `wait_s` seconds.

    A restarted store is empty, so members write the epoch into it again.
    """

    def __init__(self, host: str, port: int, name: str, wait_s: float) -> None:
        self._host, self._port, self._name, self._wait_s = host, port, name, wait_s
        self._prefix = f"sparsync/elastic/{name}"
        self._store: Any = None  # Any: torch's stubs have several stores and no common class
        self.current = Epoch()
        self._found_before = False  # the store has answered
        self._found_again = -math.inf  # the time of the latest reconnection: the store may have been restarted
        self._connecting = set[threading.Thread]()

    def round_trip_s(self) -> float:
        """Measure the shortest of five round trips to the store, in seconds."""
        return min(repeat(lambda: self._do(lambda store: store.add(self._key("rings"), 0)), number=1))

    def _write_epoch(self, store: Any) -> None:  # Any: see `_store`
        """Write the present epoch to the store, unless a later one is there."""
        key, epoch = self._key("epoch"), self.current
        text = value(store, key)
        while epoch.members and (text is None or Epoch.read(text).number < epoch.number):
            text = store.compare_set(key, (text or b"").decode(), epoch.text)

    def _written_epoch(self) -> Epoch | None:
        """Read the epoch from the store."""
        text = self._read(self._key("epoch"))
        return None if text is None else Epoch.read(text)

    def _said(self) -> Said:
        """Read the lines of the present epoch."""
        return Said(self._read(self._key("said", self.current.number)))

    def _ring(self, store: Any) -> None:  # Any: see `_store`
        """Wake the watchers of all members."""
        store.set(self._key("bell", str(store.add(self._key("rings"), 1))), "1")

    def _read(self, key: str) -> bytes | None:
        return self._do(lambda store: value(store, key))

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _do(self, call: Callable[[Any], Result]) -> Result:  # Any: see `_store`
        """Call `call(store)`; if a connection fails, make another one and try again."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                if self._store is None:
                    self._store = self._connected()
                    self._found_again = time.monotonic() if self._found_before else self._found_again
                    self._found_before = True
                    if self.current.members:
                        asked(CALL_S, partial(self._write_epoch, self._store))
                return asked(CALL_S, partial(call, self._store))
            except StoreSilentError as error:
                self._store = None
                if time.monotonic() > deadline:
                    raise StoreSilentError(
                        f"the store of this run at {self._host}:{self._port} has not answered for {self._wait_s:g} s, and without it "
                        "nobody can tell which ranks go on; start it again, or start from a checkpoint"
                    ) from error
                time.sleep(0.2)

    def _connected(self) -> Any:  # Any: see `_store`
        def connect() -> Any:
            thread = threading.current_thread()
            self._connecting.add(thread)
            try:
                store = TCPStore(
                    self._host, self._port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False
                )
                store.set_timeout(timedelta(seconds=CALL_S))
                return store
            finally:
                self._connecting.discard(thread)

        return asked(CONNECT_S + 1, connect)

    def _wait_for_threads(self) -> None:
        """Wait for threads that are connecting: a return from C++ after the end of the interpreter kills the process with SIGABRT."""
        deadline = time.monotonic() + 3 * CALL_S  # torch tries once more after its timeout
        for each in list(self._connecting):
            each.join(max(0.0, deadline - time.monotonic()))


def value(store: Any, key: str) -> bytes | None:  # Any: see `Board`
    """Read the value of a key, or None, in one round trip: a compare-and-set with a value that no key has changes nothing."""
    read = store.compare_set(key, _NOTHING, _NOTHING)
    return None if read == _NOTHING.encode() else read


def store_address(address: str | None) -> tuple[str, int]:
    """Parse host and port of the store. Raises ValueError for an invalid address."""
    if address is None:
        address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"address must be host:port of the store, such as 10.0.0.1:29400, got {address!r}; start one: python -m sparsync_elastic"
        )
    return host, int(port)
