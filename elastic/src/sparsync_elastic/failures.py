"""Which epochs in a row have failed with the same members before a step that counts, and why: what a rank tells the others of it."""

from collections.abc import Sequence
from typing import Any

from sparsync_elastic.epochs import Epoch
from sparsync_elastic.world import brief, waited_for


class Failures:
    """The failures of one rank. `told` is called before each meeting, and `note` after each failure."""

    def __init__(self) -> None:
        self._error, self._waited_for = "", ""
        self._row, self._members = 0, frozenset[str]()
        self._began_at: list[int] | None = None  # where this rank was when it had connected to the others

    def note(self, error: BaseException, epoch: Epoch) -> None:
        """Note why an epoch has failed, for the next meeting."""
        awaited = waited_for(error)
        self._error = brief(error)
        self._waited_for = epoch.members[awaited] if awaited is not None and awaited < len(epoch.members) else ""

    def begin(self, position: list[int]) -> None:
        """Note that this rank has connected to the others, and where it is."""
        self._began_at = position

    def told(self, members: Sequence[str], position: list[int]) -> dict[str, Any]:  # Any: fields of Note
        """Return what a note says of the epochs of these members that have failed in a row, before a meeting."""
        if self._began_at not in (None, position):
            self._row = 0
        if self._error:
            self._row = self._row + 1 if self._members == frozenset(members) else 1
            self._members = frozenset(members)
        error, self._error, self._began_at = self._error, "", None
        failures = self._row if error else 0
        return {"failures": failures, "error": error, "waited_for": self._waited_for}
