"""The store where the ranks of a run meet: `python -m sparsync_elastic --port 29400`."""

import argparse
import signal
import threading
from collections.abc import Sequence

from sparsync_elastic.board import TCPStore


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a store until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsync_elastic", description="Serve the store of a sparsync_elastic.Run until Ctrl-C."
    )
    parser.add_argument("--port", type=int, default=29400, help="0: any free port (default: 29400)")
    given = parser.parse_args(argv)
    try:
        store = TCPStore("localhost", given.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        parser.error(f"cannot listen on port {given.port}: {error}; give a free port")
    print(f"serving on port {store.port}", flush=True)
    ended = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.set())
    ended.wait()


if __name__ == "__main__":
    main()
