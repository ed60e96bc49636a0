"""One end of an experiment with single packets, run inside a rank's network namespace by tests/test_netlab_delay.py. Standard library only.

Arguments: what to do, and the address of the rank that answers. "answer" sends back what it gets; "ask" prints the round trips of one byte
over TCP, in seconds; "take" prints the numbers of the datagrams that "number" sends, as they come.
"""

import json
import socket
import struct
import sys
import time

PORT = 5001
PATIENCE_S = 60.0
TRIPS = 25
DATAGRAMS, EVERY_S, QUIET_S = 2000, 1e-4, 1.0


def answer(address: str) -> None:
    with socket.create_server((address, PORT)) as listener:
        print("listening", flush=True)
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while content := connection.recv(1):
            connection.sendall(content)


def ask(address: str) -> None:
    with socket.create_connection((address, PORT), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(TRIPS):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        print(json.dumps(trips))


def take(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        port.bind((address, PORT))
        print("listening", flush=True)
        port.settimeout(PATIENCE_S)
        found = []
        try:
            while len(found) < DATAGRAMS:
                found.append(struct.unpack("i", port.recv(1500)[:4])[0])
                port.settimeout(QUIET_S)
        except TimeoutError:
            pass
        print(json.dumps(found))


def number(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.connect((address, PORT))
        for each in range(DATAGRAMS):
            port.send(struct.pack("i", each) + bytes(100))
            time.sleep(EVERY_S)


if __name__ == "__main__":
    {"answer": answer, "ask": ask, "take": take, "number": number}[sys.argv[1]](sys.argv[2])
