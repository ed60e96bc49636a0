"""Training that goes on while ranks die, freeze, leave and join: `Run`."""

from sparsync_elastic.changes import Change as Change
from sparsync_elastic.changes import Lost as Lost
from sparsync_elastic.epochs import Epoch as Epoch
from sparsync_elastic.run import Run as Run

__all__ = ["Change", "Epoch", "Lost", "Run"]
