"""The store of a run, where its members write and read: one list for each epoch, which only grows, so one round trip reads all of it."""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from sparsync_elastic.epochs import Epoch, Note
from sparsync_elastic.world import Result, StoreSilentError, asked

# Public, but missing from torch's __all__.
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

CALL_S = 5.0  # how long a call of the store may take before another connection is tried
CONNECT_S = 2.0  # how long torch tries to connect to the store, with longer and longer pauses, before it begins anew
# Of what is said at the store: another number where members of two releases could not follow each other.
VERSION = 4
_NOTHING = "-"  # what no key has as its value


class Said:
    """What was said in an epoch, in order: who has said it, of what kind it is, and what more.

    Of a meeting: "comes", with the note of a member, which all others must follow; "asks", with the note of one that is to be let in; and
    "lives", of one that has heard. The first "next" has the text of the next epoch, and the first "stop" the step before which all meet.
    "ready" says one that has got the weights, and "done/N" one that has taken step N, the last. "fetches" names the source from which one
    that will ask to be let in would have the state before, and that one "serves" or "declines". Lines that cannot be read are
    ignored.
    """

    def __init__(self, text: bytes | None) -> None:
        self._lines = [line for each in (text or b"").splitlines() if (line := _line(each)) is not None]

    def of(self, kind: str) -> dict[str, Any]:  # Any: see above
        """Return what was said last, of a kind, by member."""
        return {member: what for member, each, what in self._lines if each == kind}

    def has(self, *line: object) -> bool:
        """Return whether a member has said this: member, kind, and what more."""
        return list(line) in self._lines

    @property
    def notes(self) -> dict[str, Note]:
        said = (line for kind in ("asks", "comes") for line in self.of(kind).items())
        return {member: note for member, each in said if (note := Note.read(each)) is not None}

    @property
    def next(self) -> Epoch | None:
        """The next epoch, once it is decided."""
        return next((found for _, kind, text in self._lines if kind == "next" and (found := Epoch.read(text))), None)

    @property
    def stop(self) -> int | None:
        """The step before which all meet."""
        return next((step for _, kind, step in self._lines if kind == "stop" and isinstance(step, int)), None)

    @property
    def alive(self) -> set[str]:
        """Who has answered since a meeting was called, or asks to be let in."""
        return {member for member, kind, _ in self._lines if kind in ("lives", "comes", "asks")}


class Board:
    """The store of a run, as one process sees it. Raises StoreSilentError when the store has not answered for `wait_s` seconds.

    A store that was started again is empty, and its members write down the epoch once more.
    """

    def __init__(self, host: str, port: int, name: str, wait_s: float) -> None:
        self._host, self._port, self._name, self._wait_s = host, port, name, wait_s
        self._prefix = f"sparsync/elastic/{name}"
        self._store: Any = None  # Any: torch's stubs have several stores and no common class
        self.current = Epoch()
        self._found_before = False  # the store has answered
        self._found_again = -math.inf  # when one has answered that may be another
        self._connecting = set[threading.Thread]()

    def round_trip_s(self) -> float:
        """Return the least of a few round trips to the store, in seconds."""
        found = list[float]()
        for _ in range(5):
            began = time.monotonic()
            self._do(lambda store: store.add(self._key("rings"), 0))
            found.append(time.monotonic() - began)
        return min(found)

    def _write_epoch(self, store: Any) -> None:  # Any: see `_store`
        """Write down the present epoch, unless a later one is."""
        key, epoch = self._key("epoch"), self.current
        text = value(store, key)
        while epoch.members and ((found := Epoch.read(text)) is None or found.number < epoch.number):
            text = store.compare_set(key, "" if text is None else text.decode(), epoch.text)
            if text == epoch.text.encode():
                return

    def _said(self) -> Said:
        """Return what was said in the present epoch."""
        return Said(self._read(self._key("said", self.current.number)))

    def _ring(self, store: Any) -> None:  # Any: see `_store`
        """Wake the watchers of all members."""
        store.set(self._key("bell", str(store.add(self._key("rings"), 1))), "1")

    def _read(self, key: str) -> bytes | None:
        return self._do(lambda store: value(store, key))

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _do(self, call: Callable[[Any], Result]) -> Result:  # Any: see `_store`
        """Return `call` of the store, over another connection where one fails."""
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
        """Wait for tries to connect: what comes back from C++ when the interpreter has ended is killed there, with SIGABRT."""
        deadline = time.monotonic() + 3 * CALL_S  # torch tries once more after its timeout
        for each in list(self._connecting):
            each.join(max(0.0, deadline - time.monotonic()))


def value(store: Any, key: str) -> bytes | None:  # Any: see `Board`
    """Return the value of a key, or None, in one round trip: a comparison with what no key has changes nothing, and brings the value."""
    found = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def _line(text: bytes) -> list[Any] | None:  # Any: see `Said`
    """Return a line as member, kind, and what more; None where it is none."""
    with suppress(ValueError, TypeError):
        member, kind, what = json.loads(text)
        if isinstance(member, str) and isinstance(kind, str):
            return [member, kind, what]
    return None


def store_address(address: str | None) -> tuple[str, int]:
    """Return host and port of the store. Raises ValueError for an address that is none."""
    if address is None:
        address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"address must be host:port of the store, such as 10.0.0.1:29400, got {address!r}; start one: python -m sparsync_elastic"
        )
    return host, int(port)
