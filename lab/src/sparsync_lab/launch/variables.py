"""The environment of a rank: torchrun's variables, and those that lead gloo and NCCL through the rank's own interface."""

import os
from collections.abc import Mapping
from pathlib import Path

from sparsync.base.scheme_text import COMMAND_LINE, NOTE, VARIABLE
from sparsync_lab.launch.settings import LaunchSettings

# NCCL sees one machine, and would go through its memory, past the links.
_THROUGH_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def variables(
    settings: LaunchSettings, rank: int, interface: str, address: str, port: int, run_id: str, note: Path | None = None
) -> dict[str, str]:
    """Return what torchrun sets for this rank of one machine with all ranks, or, with `nodes`, of machines of one rank each.

    `address` and `port` are those at which rank 0's process group listens, or, where there are faults, the store of the run; a rank that
    joins has a number of its own, from the number of first ranks on. `note` is a file in which what reads the scheme says so.
    """
    P = settings.ranks
    local, locals_, node, nodes = (0, 1, rank, P) if settings.nodes else (rank, P, 0, 1)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(P),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(locals_),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(P),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(
            bool(settings.faults)
        ),  # else rank 0 is the store; torchrun's agent would be
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        **({} if settings.scheme is None else {VARIABLE: settings.scheme, COMMAND_LINE: settings.scheme}),
        **({} if note is None else {NOTE: str(note)}),
    }


def environment(set_here: Mapping[str, str], limited: bool) -> dict[str, str]:
    """Return this process's environment with those variables, and with defaults for what it does not set itself.

    One thread for each rank, as torchrun has it, lines that leave Python as they are printed, and NCCL through sockets.
    """
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {**defaults, **(_THROUGH_SOCKETS if limited else {}), **os.environ, **set_here}
