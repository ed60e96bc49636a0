"""One rank of a TCP experiment, run inside the rank's network namespace by tests/test_netlab.py. Standard library only: it starts fast.

Arguments: the path of counters.py, the interface, this rank, every rank's address, and the streams as [sender, receiver, nbytes].
It prints a line when it listens, is connected, has read its counters, is done with its streams, and, as JSON, its times and counters;
and waits for a line each time, so that all ranks move on together.
"""

import json
import runpy
import socket
import sys
import threading
import time

PORT = 5000
PATIENCE_S = 300.0
QUIET_S = 0.1  # after it no acknowledgement is under way any more: TCP delays them by at most 40 ms


def wait_for_all(state: str) -> None:
    print(state, flush=True)
    sys.stdin.readline()


def connect(
    listener: socket.socket, rank: int, addresses: list[str], streams: list[list[int]]
) -> dict[int, socket.socket]:
    connections = {}
    for number, (sender, receiver, _) in enumerate(streams):
        if sender == rank:
            connections[number] = socket.create_connection((addresses[receiver], PORT), timeout=PATIENCE_S)
            connections[number].sendall(bytes([number]))
    for _ in [receiver for _, receiver, _ in streams if receiver == rank]:
        connection = listener.accept()[0]
        connection.settimeout(PATIENCE_S)
        connections[connection.recv(1)[0]] = connection
    return connections


def receive(connection: socket.socket, nbytes: int) -> None:
    while nbytes > 0:
        received = len(connection.recv(min(nbytes, 1 << 18)))
        if received == 0:
            raise RuntimeError(f"the sender closed the connection, {nbytes} bytes are missing")
        nbytes -= received


def main(counters: str, interface: str, rank: int, addresses: list[str], streams: list[list[int]]) -> None:
    interface_counters = runpy.run_path(counters)["interface_counters"]
    with socket.create_server((addresses[rank], PORT)) as listener:
        listener.settimeout(PATIENCE_S)
        wait_for_all("listening")
        connections = connect(listener, rank, addresses, streams)
        wait_for_all("connected")
        time.sleep(QUIET_S)
        before = interface_counters(interface)
        wait_for_all("counted")
        start_s = time.monotonic()
        threads = [
            threading.Thread(target=connections[number].sendall, args=[bytes(nbytes)])
            if sender == rank
            else threading.Thread(target=receive, args=[connections[number], nbytes])
            for number, (sender, _, nbytes) in enumerate(streams)
            if number in connections
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop_s = time.monotonic()
        wait_for_all("done")
        time.sleep(QUIET_S)
        seen = interface_counters(interface) - before
        wait_for_all(json.dumps({"start_s": start_s, "stop_s": stop_s, **vars(seen)}))  # closing sends packets


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5]))
