"""The handle of a model whose gradients a scheme reduces: reports, and the state to save. Every integration returns one."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from sparsync.base.scheme import Scheme
from sparsync.base.sharded import ReduceScatterScheme
from sparsync.comm.group import GroupComm
from sparsync.core import Comm, Report
from sparsync.feedback import state_from
from sparsync.integrations.connection import Connection
from sparsync.integrations.dispatcher import Dispatcher
from sparsync.integrations.residual_units import ResidualRescaler

MAX_REPORTS = 10_000  # the newest ones; a year of training must not fill the memory with them


class Handle:
    """The reports and the state of `scheme` on one model, seen from one rank.

    `part` names what this rank's worker group has of the model, such as "shard0of2"; "" is
    all of it. States of different parts have nothing in common.
    """

    def __init__(
        self, scheme: Scheme | ReduceScatterScheme, comm: Comm, rescaler: ResidualRescaler, part: str = ""
    ) -> None:
        self.scheme = scheme
        self.part = part
        self._rescaler = rescaler
        self._connection = Connection(scheme, comm)
        self._place = {"rank": comm.rank, "ranks": comm.size}
        self._step = -1
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)
        # When nothing refers to the handle any more, which model and optimizer do. Not at exit, where torch may have ended before.
        weakref.finalize(self, self._connection.shut).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back connections and threads. What is reduced afterwards raises RuntimeError; reports and state stay readable.

        For processes that train one model after the other: `with sparsync.attach(...) as handle`. Ranks that wait for this one get an
        error. A handle that nothing refers to any more closes by itself.
        """
        self._connection.shut()

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._place["rank"], self._place["ranks"]

    def reports(self) -> list[Report]:
        """Return one report for each bucket and step so far, oldest first; only the newest 10 000 are there."""
        return list(self._reports)

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call, and forget them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """Return this rank's state. It differs from rank to rank: save each one's, between two steps. See sparsync.checkpoint."""
        self._flush()
        return {
            **self._place,
            "part": self.part,
            "step": self._step,
            "rates": dict(self._rescaler.units.rates),
            "highest_rates": dict(self._rescaler.units.highest),
            "loss_scale": self._rescaler.units.scale,
            "scheme": self.scheme.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank. Call it on all ranks, with states of the same step.

        Raises ValueError for another rank's state, whose residual would count twice, and for one of another number of ranks.
        """
        wanted = ("step", "rates", "highest_rates", "loss_scale", "scheme")
        step, rates, highest, scale, scheme = (state_from(state, key, "a sparsync handle") for key in wanted)
        place = {key: state_from(state, key, "a sparsync handle") for key in self._place}
        if place != self._place or state.get("part", "") != self.part:
            raise ValueError(
                f"this is the state of {_described(place, state.get('part', ''))}, and this is {_described(self._place, self.part)}; "
                "load each rank's own. sparsync.checkpoint.load finds it, and redistributes residuals to another number of ranks"
            )
        self._flush()
        self.scheme.load_state_dict(scheme)
        self._step = step
        self._connection.continue_after(step)
        units = self._rescaler.units
        units.rates, units.highest, units.scale = dict(rates), dict(highest), scale

    def _flush(self) -> None:
        """Wait until the scheme's state is that of a whole step, and end the step."""
        self._connection.end_step()


class AttachedHandle(Handle):
    """The handle that `attach` returns. Buckets are reduced on a thread of their own, which ends with the handle."""

    def __init__(
        self, scheme: Scheme | ReduceScatterScheme, comm: GroupComm, rescaler: ResidualRescaler, part: str = ""
    ) -> None:
        super().__init__(scheme, comm, rescaler, part)
        self._dispatcher = Dispatcher(self._connection, self._reports.append)
        weakref.finalize(self, self._dispatcher.stop)

    def close(self) -> None:
        self._dispatcher.stop()
        super().close()

    def detach(self) -> None:
        """Give the model back as it was before `attach`. Raises RuntimeError for DistributedDataParallel; only FSDP2 can."""
        raise RuntimeError(
            "DistributedDataParallel cannot remove a communication hook; wrap the module again to train without one"
        )

    def _flush(self) -> None:
        self._dispatcher.flush()


def _described(place: Mapping[str, int], part: str) -> str:
    return f"rank {place['rank']} of {place['ranks']}" + (f" of {part}" if part else "")
