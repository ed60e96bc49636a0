"""What every attached model has in common: reports, state, what residuals are in terms of, and the thread that reduces."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from sparsync.comm.group import GroupComm
from sparsync.core import Report
from sparsync.feedback import state_from
from sparsync.integrations.dispatcher import Dispatcher
from sparsync.integrations.residual_scale import Terms
from sparsync.integrations.rollback import Rollback

KEPT_REPORTS = 10_000  # the newest ones; a year of training must not fill the memory with them


@runtime_checkable
class Stateful(Protocol):
    """What a handle asks of a scheme, whatever it reduces."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, Any]: ...  # Any: as Scheme

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def rescale_residual(self, factors: Mapping[str, float]) -> None: ...


class Handle:
    """What `attach` returns: the reports, and the state to save with a checkpoint. State differs from rank to rank: save each one's.

    `names` gives each parameter's name by its id. `part` names the piece of the model that this rank's group of ranks has, "" where that
    is all of it; states of different parts have nothing in common.
    """

    def __init__(
        self,
        scheme: Stateful,
        comm: GroupComm,
        names: Mapping[int, str],
        terms: Terms,
        part: str = "",
    ) -> None:
        self.scheme = scheme
        self.part = part
        self._names = names
        self._terms = terms
        terms.go_on(scheme)
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._reports: deque[Report] = deque(maxlen=KEPT_REPORTS)
        skipped = Rollback() if getattr(scheme, "keeps", False) else None
        reset_shared_state = getattr(scheme, "reset_shared_state", _nothing)
        self._dispatcher = Dispatcher(comm, self._reports.append, reset_shared_state, skipped)
        weakref.finalize(self, self._dispatcher.stop)

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many ranks there are."""
        return self._place["rank"], self._place["ranks"]

    def reports(self) -> list[Report]:
        """One report for each bucket and step so far, oldest first; the newest 10 000 are kept."""
        return list(self._reports)

    def take_reports(self) -> list[Report]:
        """The reports since the last call, and forgets them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """This rank's state; call it between steps."""
        self._dispatcher.flush()
        return {
            **self._place,
            "part": self.part,
            "step": self._step,
            "rates": dict(self._terms.at.rates),
            "loss_scale": self._terms.at.scale,
            "scheme": self.scheme.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state_dict` returned on this rank; call it on all ranks, with states of the same step.

        Raises ValueError for another rank's state, whose residual would count twice, or for that of a world of another size.
        """
        wanted = ("step", "rates", "loss_scale", "scheme")
        step, rates, scale, scheme = (state_from(state, key, "a sparsync handle") for key in wanted)
        place = {key: state_from(state, key, "a sparsync handle") for key in self._place}
        if place != self._place or state.get("part", "") != self.part:
            raise ValueError(
                f"this is the state of {_called(place, state.get('part', ''))}, and this is {_called(self._place, self.part)}; "
                "load each rank's own. sparsync.integrations.checkpoint.load finds it, and deals residuals out to another number of ranks"
            )
        self._dispatcher.flush()
        self._dispatcher.rewind()
        self.scheme.load_state_dict(scheme)
        self._step = step
        self._terms.at.rates, self._terms.at.scale = dict(rates), scale

    def detach(self) -> None:
        """Gives the model back as it was before `attach`. Only FSDP2 can: raises RuntimeError for DistributedDataParallel."""
        raise RuntimeError("DistributedDataParallel keeps a hook for good; wrap the module anew to train without one")

    def _follow_terms(self) -> None:
        """Puts the residuals in terms of the present learning rates and loss scale; to be run before a step's first bucket."""
        factors = self._terms.factors(self._names)
        if factors:
            self.scheme.rescale_residual(factors)


def _nothing() -> None:
    """Nothing is held alike on all ranks."""


def _called(place: Mapping[str, int], part: str) -> str:
    return f"rank {place['rank']} of {place['ranks']}" + (f" of {part}" if part else "")
