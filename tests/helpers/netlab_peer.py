"""One end of an experiment in a rank's network namespace, run by tests/test_netlab*.py. Uses only the standard library, to start fast.

Arguments: a role, the listening rank's address, a port, and a number of bytes or trips. The listener prints "listening" first.
"""

import json
import socket
import struct
import sys
import time

PATIENCE_S = 300.0
DATAGRAMS, EVERY_S, QUIET_S = 2000, 1e-4, 1.0


def receive(address: str, port: int, nbytes: int) -> None:
    """Receive a stream and print when it ended."""
    with socket.create_server((address, port)) as listener:
        print("listening", flush=True)
        connection, left = listener.accept()[0], nbytes
        while content := connection.recv(1 << 18):
            left -= len(content)
        print(time.monotonic() if left == 0 else f"{left} bytes are missing")


def send(address: str, port: int, nbytes: int) -> None:
    """Send a stream and print when it began."""
    with socket.create_connection((address, port), timeout=PATIENCE_S) as connection:
        print(time.monotonic())
        connection.sendall(bytes(nbytes))


def answer(address: str, port: int, trips: int) -> None:
    """Echo each byte."""
    with socket.create_server((address, port)) as listener:
        print("listening", flush=True)
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while content := connection.recv(1):
            connection.sendall(content)


def ask(address: str, port: int, trips: int) -> None:
    """Print the seconds of round trips of one byte."""
    with socket.create_connection((address, port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(trips):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds))


def take(address: str, port: int, _: int) -> None:
    """Print the numbers of datagrams in order of arrival."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        own.bind((address, port))
        print("listening", flush=True)
        own.settimeout(PATIENCE_S)
        found = []
        try:
            while len(found) < DATAGRAMS:
                found.append(struct.unpack("i", own.recv(1500)[:4])[0])
                own.settimeout(QUIET_S)
        except TimeoutError:
            pass
        print(json.dumps(found))


def number(address: str, port: int, _: int) -> None:
    """Send numbered datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.connect((address, port))
        for each in range(DATAGRAMS):
            own.send(struct.pack("i", each) + bytes(100))
            time.sleep(EVERY_S)


if __name__ == "__main__":
    roles = {each.__name__: each for each in (receive, send, answer, ask, take, number)}
    roles[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
