"""The store over which the ranks of a run find each other: `python -m sparsync_elastic --port 29400`."""

import argparse
import signal
import socket
import threading
from collections.abc import Sequence

from sparsync_elastic.board import TCPStore


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a store until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsync_elastic", description="Serve the store of a sparsync_elastic.Run until Ctrl-C."
    )
    parser.add_argument("--host", help="address of this machine to listen on (default: all of them)")
    parser.add_argument("--port", type=int, default=29400, help="0: any that is free (default: 29400)")
    given = parser.parse_args(argv)
    try:
        store = serve(given.host, given.port)
    except OSError as error:
        parser.error(
            f"cannot listen on {given.host}, port {given.port}: {error}; give an address of this machine and a free port"
        )
    print(f"serving on port {store.port}", flush=True)
    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()


def serve(host: str | None, port: int) -> TCPStore:
    """Return a store that listens at an address of this machine; None: at all."""
    if host is None:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    # torch listens at all addresses, whatever host it is given, unless it is given a socket.
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    port, descriptor = (listening.getsockname()[1], listening.detach())  # which the store closes
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


if __name__ == "__main__":
    main()
