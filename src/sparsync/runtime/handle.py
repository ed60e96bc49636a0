"""The handle that every integration returns, as its user sees it: settings, reports, summary, clipping."""

import math
import weakref
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from sparsync.base.scheme import Scheme
from sparsync.core import Report
from sparsync.runtime.findings import check_scheme
from sparsync.runtime.parameters import named_parameters, trained
from sparsync.runtime.rescaling import current_pass
from sparsync.runtime.restorable import Restorable
from sparsync.runtime.step_in_flight import StepInFlight
from sparsync.runtime.summary import Hidden, Summary


@dataclass(frozen=True)
class Gradients:
    """Exchange gradients: `sparsync.attach(..., exchange=Gradients())`. For every optimizer."""


class Handle(Restorable):
    """The reports and the state of a scheme on one model and one rank. States of different parts of a model do not fit each other."""

    switches = False  # this integration can change its scheme between two steps
    exchange: Any = Gradients()  # Any: Gradients, Steps or LocalSteps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def scheme(self) -> Any:  # Any: a Scheme, or its reduce-scatter form on a shard axis
        """The scheme that reduces the gradients. Assign another one on all ranks, between two steps, with the same settings.

        A scheme of the same class keeps the whole state. A scheme of another class takes the residual, by parameter name, if it has plain
        error feedback for all parameters. Otherwise train one step with TopK(density=1.0), which sends the residual, then detach, and
        attach with the other scheme. The next step raises RanksDifferError on all ranks if their settings differ.
        Assigning raises RuntimeError after `detach`, inside a backward pass and for handles that keep their scheme (steps, local steps, a
        shard axis), TypeError for anything but a Scheme, and ValueError if the residual cannot be carried over.
        """
        return self.state.scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        check_scheme(scheme)
        self._check_attached()
        if not self.switches:
            raise RuntimeError(
                "this handle keeps the scheme that it was made with; save a checkpoint, call detach(), and attach with another scheme or "
                "other settings"
            )
        if current_pass() != -1:
            raise RuntimeError(
                "the scheme cannot change inside a backward pass, where buckets of one step would differ; change it between two steps"
            )
        if scheme is not self.scheme:
            self._take_scheme(scheme)

    def set(self, **settings: Any) -> None:  # Any: fields of the scheme
        """Change settings of the scheme from the next step on, such as `handle.set(density=0.02)`. See `scheme`.

        For schedules: call it between steps with a value that depends only on the step, the same on all ranks. A state records its
        settings (`state_dict()["settings"]`); loading it changes none. Raises ValueError for a setting that the scheme does not have, and
        RuntimeError after `detach`.
        """
        self._check_attached()
        scheme = self.scheme
        known = [each.name for each in fields(scheme) if each.init] if is_dataclass(scheme) else []
        if unknown := sorted(settings.keys() - set(known)):
            raise ValueError(f"{self.scheme.name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        if any(getattr(scheme, key) != value for key, value in settings.items()):
            self.scheme = replace(scheme, **settings)  # pyright: ignore[reportArgumentType]  # a dataclass

    def _take_scheme(self, scheme: Scheme) -> None:
        """Reduce with another scheme from the next step on, and give it the residual of the present one."""
        self._settle()
        self.state = self.state.followed_by(scheme)
        self._use(scheme)
        self._rescaler.use(self.state)
        self._connection.use(self.state)

    def _use(self, scheme: Scheme) -> None:
        """Adapt the integration to another scheme."""

    def summary(self) -> Summary:
        """Summarise what this rank has reduced so far, for printing; nothing is sent.

        By scheme and bucket and in total: steps, bytes sent, density, exchanges, seconds by phase, and how much the backward pass hid.
        """
        module = self.module or vars(self).get("model")
        named = [] if module is None else named_parameters(module)
        frozen = {name for name, each in named if not each.requires_grad}
        parameters = sum(math.prod(shape) for name, shape in self.layout().items() if name not in frozen)
        return Summary(*self.place, self._reports.steps, parameters, dict(self._reports.totals), self._hidden())

    def _hidden(self) -> Hidden | None:
        """Measure how much of the reduction the backward pass hid; None if the reduction comes afterwards."""
        return None

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: as torch.nn.utils.clip_grad_norm_
        """Clip the gradients of the model at `max_norm`, and return their norm before, the same number on all ranks.

        Every handle has this method, so that a loop can skip a step by this norm on all ranks or on none. Reduced gradients are the same
        on all ranks, so here it calls `torch.nn.utils.clip_grad_norm_` for the trained parameters, FSDP2's too. Call it after the
        reduction and before the optimizer's step. Raises RuntimeError if the model is gone.
        """
        module = self.module
        if module is None:
            raise RuntimeError(
                "the model of this handle is gone; keep a reference to it, or call torch.nn.utils.clip_grad_norm_ yourself"
            )
        norm: Any = nn.utils.clip_grad_norm_([each for _, each in trained(module)], max_norm, **options)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of an FSDP2 model

    def close(self) -> None:
        """Close connections and threads. Reducing then raises RuntimeError; reports and state stay readable.

        For a process that trains several models in turn: `with sparsync.attach(...) as handle`. Ranks that wait for this one get an error.
        A handle without references closes itself.
        """
        self._connection.shut()
        self._end_watching()

    def reports(self) -> list[Report]:
        """List one report per bucket and step so far, oldest first: the newest 10 000."""
        return list(self._reports)

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call, and forget them."""
        return self._reports.take()


class AttachedHandle(Handle):
    """The handle that `attach` returns. Buckets are reduced on threads, which end with the handle."""

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: the arguments of Handle
        super().__init__(*args, **options)
        self._flight = StepInFlight(self._connection, self._reports.append)
        weakref.finalize(self, self._flight.stop)

    def close(self) -> None:
        self._flight.stop()
        super().close()

    def detach(self) -> None:
        """Undo `attach`: the model reduces as before. Call it on all ranks, between two steps. Reports and state stay readable."""
        raise NotImplementedError

    def _hidden(self) -> Hidden:
        return replace(self._flight.hidden)

    def _flush(self) -> None:
        self._flight.flush()
