"""Mark tests that build rate-limited networks, and run their commands as an ordinary user."""

import os
from collections.abc import Callable

import pytest

from sparsync_lab.netlab import NetworkUnavailableError, reexecution_prefix

# As an ordinary user: root drops all rights but the one it needs to stay root in a user namespace; other users have none to drop.
ORDINARY = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", "--"] if os.geteuid() == 0 else []


def missing_rights() -> str:
    """Explain why this process cannot build the network; "" if it can."""
    try:
        prefix = reexecution_prefix()
    except NetworkUnavailableError as error:
        return str(error)
    return f"run as root, or: {' '.join(prefix)} python -m pytest" if prefix else ""


def builds(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that builds a network."""
    return pytest.mark.network(pytest.mark.usefixtures("rights_to_build")(test))
