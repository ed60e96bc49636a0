"""The handle of a model whose gradients a scheme reduces: reports, and the state to save. Every integration returns one."""

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from sparsync.base.scheme import Scheme
from sparsync.base.sharded import ReduceScatterScheme
from sparsync.comm.group import GroupComm
from sparsync.core import Comm, Report
from sparsync.feedback import state_from
from sparsync.integrations.connection import Connection
from sparsync.integrations.dispatcher import Dispatcher
from sparsync.integrations.residual_units import ResidualRescaler
from sparsync.integrations.state_checks import (
    check_model,
    check_numbers,
    check_residuals,
    check_version,
    refuse_distributed_checkpoint,
)
from sparsync.integrations.state_file import VERSION

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

    def layout(self) -> dict[str, list[int]]:
        """Return the shape of each parameter of the model by name; {} where the model is not known."""
        model = vars(self).get("model")
        return {} if model is None else {name: list(each.shape) for name, each in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme.state_dict
        """Return this rank's state. It differs from rank to rank: save each one's, between two steps. See sparsync.checkpoint.

        Raises TypeError inside torch.distributed.checkpoint, which would keep one rank's only; see sparsync.checkpoint.entries. Raises
        RuntimeError where an error has left a step applied in part, until a state was loaded.
        """
        refuse_distributed_checkpoint()
        if self._connection.partly_applied:
            raise RuntimeError(
                "an error has left a step applied in part on this rank, which is no state to continue from; load an older one on all ranks"
            )
        self._flush()
        return {
            "version": VERSION,
            **self._place,
            "part": self.part,
            "step": self._step,
            "scheme_name": self.scheme.name,
            "layout": self.layout(),
            "rates": dict(self._rescaler.units.rates),
            "highest_rates": dict(self._rescaler.units.highest),
            "loss_scale": self._rescaler.units.scale,
            "scheme": self.scheme.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned on this rank. Call it on all ranks, with states of the same step.

        Settings of the scheme may have changed. Raises ValueError, and changes nothing, for a state of another scheme, model or format, for
        one that holds NaN or Inf, for another rank's, whose residual would count twice, and for one of another number of ranks. Copies
        the present state once, to return to it; where an error has left none that can be read, there is none to return to.
        """
        refuse_distributed_checkpoint()
        with _as_value_errors(self):
            self.check_state(state)
            self._check_place(state)
            self._check(state)
        before = self._state_or_none()
        try:
            with _as_value_errors(self):
                self._load(state)
        except BaseException:
            if before is not None:
                self._load(before)
            raise

    def _state_or_none(self) -> dict[str, Any] | None:  # Any: as state_dict
        """Return the present state; None where it cannot be read, as after the failure that loading another one is to mend."""
        try:
            return self.state_dict()
        except RuntimeError:
            return None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is of this format, scheme and model, on whatever rank of how many it was made."""
        check_version(state)
        wanted = (
            *self._place,
            "part",
            "step",
            "scheme_name",
            "layout",
            "rates",
            "highest_rates",
            "loss_scale",
            "scheme",
        )
        for key in wanted:
            state_from(state, key, "a sparsync handle")
        layout = self.layout()
        check_model(state, self.scheme.name, layout)
        check_numbers(state)
        check_residuals(state["scheme"], layout, self._residual_sizes())

    def _residual_sizes(self) -> dict[str, int]:
        """Return how many elements of each parameter this rank's state has, by name, where that is known."""
        return {name: math.prod(shape) for name, shape in self.layout().items()}

    def _check_place(self, state: Mapping[str, Any]) -> None:
        place = {key: state[key] for key in self._place}
        if place != self._place or state["part"] != self.part:
            raise ValueError(
                f"this is the state of {_described(place, state['part'])}, and this is {_described(self._place, self.part)}; "
                "load each rank's own. sparsync.checkpoint.load finds it, and redistributes residuals to another number of ranks"
            )

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state that this integration cannot continue from."""
        return

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that was checked."""
        self._flush()
        self.scheme.load_state_dict(state["scheme"])
        self._step = state["step"]
        self._connection.continue_after(state["step"])
        units = self._rescaler.units
        units.rates, units.highest = dict(state["rates"]), dict(state["highest_rates"])
        units.scale = state["loss_scale"]

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


@contextmanager
def _as_value_errors(handle: Handle) -> Iterator[None]:
    """Turn what a state of a wrong form leads to into a ValueError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"this state does not fit {type(handle).__name__} with {handle.scheme.name!r} ({type(error).__name__}: {error}); "
            "load the state of the same scheme and model"
        ) from error


def _described(place: Mapping[str, int], part: str) -> str:
    return f"rank {place['rank']} of {place['ranks']}" + (f" of {part}" if part else "")
