"""The store over which the ranks of a run find each other: `python -m sparsync.elastic --port 29400`."""

import argparse
import signal
import threading
from collections.abc import Sequence

from sparsync.elastic.members import TCPStore


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a store until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsync.elastic", description="Serve the store of a sparsync.elastic.Run until Ctrl-C."
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="0: any that is free (default: 29400)")
    given = parser.parse_args(argv)
    store = TCPStore(given.host, given.port, is_master=True, wait_for_workers=False)
    print(f"serving on port {store.port}", flush=True)
    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
