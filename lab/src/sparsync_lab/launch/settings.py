"""What `sparsync launch` was asked for, checked before anything is started."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparsync_lab.launch.faults import Fault, check_faults, places
from sparsync_lab.netlab import MAX_RANKS, NO_DELAY, Delay
from sparsync_lab.netlab.delay import check_delay

MOST_EXACT_BITS_PER_S = (
    1e9  # of all links in one direction together; above, two cores do not keep up with single frames
)


@dataclass(frozen=True)
class LaunchSettings:
    """The command of each rank, and the links.

    `up_bits_per_s` and `down_bits_per_s` are None where nothing is limited; one of them is infinite where only the other one is.
    """

    command: tuple[str, ...]
    ranks: int
    up_bits_per_s: float | None  # from a rank to the switch
    down_bits_per_s: float | None  # from the switch to a rank
    scheme: str | None = None  # a text for SPARSYNC_SCHEME; None: it is not set
    nodes: bool = False  # each rank is a machine to the script: LOCAL_RANK is 0
    grace_s: float = 5.0  # after the first failure, and again after SIGTERM
    delay: Delay = NO_DELAY  # between any two ranks
    faults: tuple[Fault, ...] = ()  # of ranks that come and go, over a store

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"--ranks must be in [1, {MAX_RANKS}], got {self.ranks}")
        check_delay(self.delay, self.limited)
        check_faults(self.faults, self.ranks, self.limited)

    @property
    def limited(self) -> bool:
        return self.up_bits_per_s is not None

    @property
    def places(self) -> int:
        """The number of links; see `faults.places`."""
        return places(self.faults, self.ranks)

    @property
    def exact_framing(self) -> bool:
        """Whether the interfaces count every frame with its headers; see `netlab.network`."""
        fastest = max(self.up_bits_per_s or 0.0, self.down_bits_per_s or 0.0)
        return not self.delay and self.ranks * fastest <= MOST_EXACT_BITS_PER_S

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)


def settings_of_json(content: dict[str, Any]) -> LaunchSettings:  # Any: JSON
    """Return the settings that `as_json` has written."""
    faults = tuple(Fault(**each) for each in content["faults"])
    known = {"command": tuple(content["command"]), "delay": Delay(**content["delay"]), "faults": faults}
    return LaunchSettings(**{**content, **known})


def checked_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that every rank runs: a Python file by itself is run by this Python.

    Raises ValueError where there is none, or no such program.
    """
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ValueError("no command was given; write it behind --, as in sparsync launch --ranks 4 -- python train.py")
    if command[0].endswith(".py") and shutil.which(command[0]) is None:
        command = (sys.executable, *command)
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"no program {command[0]!r} on the path; write the command as a shell would take it, or its whole path"
        )
    return command
