"""Detects at once that the process of another member has ended, by asking its kernel, even if processes are busy."""

import os
import socket
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress

_CONNECT_S = 5.0
_WAITING = 128  # connections that wait to be accepted


class Presence:
    """A listening socket. When this process ends, the kernel closes it and refuses connections.

    A refused connection means that the member has ended only if an earlier connection succeeded. A frozen process, or a fork of the member,
    still listens, and a dead machine refuses nothing.
    """

    def __init__(self, host: str, port: int, member: str | None = None) -> None:
        """Listen at this machine's address on the route to `host`. The member's name contains it, unless `member` is given."""
        family, here = _towards(host, port)
        self._socket = socket.create_server((here, 0), family=family, backlog=_WAITING)
        self._socket.setblocking(False)
        place = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}@{here}:{self._socket.getsockname()[1]}"
        self.member = place if member is None else member
        self.ended = set[str]()  # members whose processes have ended
        self._reached = set[str]()
        self._asked = dict[str, threading.Thread]()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def reach(self, members: Iterable[str]) -> None:
        """Connect to members for the first time."""
        with suppress(OSError):  # until no connection waits
            while True:
                self._socket.accept()[0].close()
        self._connect(each for each in members if each not in self._reached)

    def ask(self, members: Iterable[str]) -> None:
        """Find out whether the processes of members have ended; see `ended`."""
        self._connect(each for each in members if each in self._reached and each not in self.ended)

    def _connect(self, members: Iterable[str]) -> None:
        """Connect to members, on a thread each, unless a thread is still connecting."""
        for each in members:
            if each not in self._asked or not self._asked[each].is_alive():
                thread = threading.Thread(target=self._try, args=(each,), name="sparsync-presence", daemon=True)
                self._asked[each] = thread
                thread.start()

    def _try(self, member: str) -> None:
        host, _, port = member.rpartition("@")[2].rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
            self._reached.add(member)
        except ConnectionRefusedError:
            if member in self._reached:
                self.ended.add(member)
        except (ValueError, OSError):  # a name without an address, or a member without a network
            return


def _towards(host: str, port: int) -> tuple[int, str]:
    """Find the address family and address of this machine on the route to a host; loopback without a route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect(address)  # sends nothing
            return family, towards.getsockname()[0]
    except OSError:
        return socket.AF_INET, "127.0.0.1"
