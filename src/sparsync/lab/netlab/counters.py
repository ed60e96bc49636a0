"""What an interface has carried, as the kernel counts it: frames with their headers, acknowledgements and retransmissions included."""

from dataclasses import dataclass
from pathlib import Path

NET_DEV = Path("/proc/self/net/dev")  # of the network namespace of the process that reads it


@dataclass(frozen=True)
class Counters:
    """Bytes and packets an interface has sent and received since it was made; a difference of two says what passed between them."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )


def interface_counters(interface: str) -> Counters:
    """The counters of an interface in the network namespace of the calling process. Raises ValueError for one that is not there."""
    lines = NET_DEV.read_text().splitlines()[2:]
    fields = {name.strip(): numbers.split() for name, numbers in (line.split(":", 1) for line in lines)}
    if interface not in fields:
        raise ValueError(
            f"no interface {interface!r} in this process's network namespace, there are: {', '.join(fields)}"
        )
    numbers = [int(number) for number in fields[interface]]
    return Counters(
        sent_bytes=numbers[8], received_bytes=numbers[0], sent_packets=numbers[9], received_packets=numbers[1]
    )
