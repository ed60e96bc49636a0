"""The settings of `sparsync launch`, checked before anything starts, and the environment of each rank."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync.base.scheme_text import COMMAND_LINE, NOTE, VARIABLE
from sparsync_lab.launch.faults import Fault, check_faults, places
from sparsync_lab.netlab import MAX_RANKS, NO_DELAY, Delay
from sparsync_lab.netlab.delay import check_delay

# Total over all links in one direction. Above it, two cores do not keep up with single frames.
MOST_EXACT_BITS_PER_S = 1e9
# What a rank has unless the user's environment says otherwise: one thread, as with torchrun, and lines as they are printed.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# NCCL sees one machine and would use its memory instead of the links.
_THROUGH_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True)
class LaunchSettings:
    """The command of each rank, and the links; both rates are None without limits."""

    command: tuple[str, ...]
    ranks: int
    up_bits_per_s: float | None  # from a rank to the switch
    down_bits_per_s: float | None  # from the switch to a rank
    scheme: str | None = None  # a text for SPARSYNC_SCHEME
    grace_s: float = 5.0  # seconds between the first failure and SIGTERM, and between SIGTERM and SIGKILL
    delay: Delay = NO_DELAY  # between any two ranks
    faults: tuple[Fault, ...] = ()

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


def checked_command(words: Sequence[str]) -> tuple[str, ...]:
    """Complete the command that every rank runs: a Python file gets this Python. Raises ValueError without a program."""
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ValueError("no command was given; write it behind --, as in sparsync launch --ranks 4 -- python train.py")
    if command[0].endswith(".py") and shutil.which(command[0]) is None:
        command = (sys.executable, *command)
    if shutil.which(command[0]) is None:
        raise ValueError(f"no program {command[0]!r} on the path; write the command as for a shell, or its whole path")
    return command


def environment(
    settings: LaunchSettings, rank: int, interface: str, address: str, port: int, run_id: str, note: Path
) -> dict[str, str]:
    """Build the environment of a rank: this program's, torchrun's variables, and the interface for gloo and NCCL.

    `address` and `port` are rank 0's or, with faults, the store's. The process that reads the scheme writes it into the file `note`.
    """
    P = settings.ranks
    variables = {
        "RANK": rank,
        "WORLD_SIZE": P,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": P,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": P,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": bool(settings.faults),  # otherwise rank 0 hosts the store
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        NOTE: note,
    }
    if settings.scheme is not None:
        variables |= {VARIABLE: settings.scheme, COMMAND_LINE: settings.scheme}
    through = _THROUGH_SOCKETS if settings.limited else {}
    return {**_DEFAULTS, **through, **os.environ, **{name: str(value) for name, value in variables.items()}}
