"""What a run trains: a model, its handle, and what else a rank that joins needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.comm.group import ConnectionLostError
from sparsync.exchanges.exchanged_steps import ExchangedSteps
from sparsync.exchanges.journal import Packed
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.step_method import StepMethod
from sparsync.runtime.handle import Handle


class Saved(Protocol):
    """What has a state to send to ranks that join, such as a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...  # Any: as torch's

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(eq=False)
class Trained:
    """A model and its handle, and what else a rank that joins needs."""

    model: nn.Module
    handle: Handle
    optimizers: Sequence[Optimizer]
    more: Sequence[Saved]
    steps: int = 0  # of the optimizers, where gradients are exchanged

    def count(self, *_: object) -> None:
        self.steps += 1
        self.handle.applied()

    @property
    def position(self) -> int:
        """How many updates, which all ranks share, this one has applied."""
        return self.handle.exchanged if isinstance(self.handle, LocalTraining) else self.done

    @property
    def done(self) -> int:
        """The steps that were taken."""
        return self.handle.done if isinstance(self.handle, (ExchangedSteps, LocalTraining)) else self.steps

    @property
    def lag(self) -> int:
        """How many steps one rank may be ahead of another."""
        return self.handle.options.every if isinstance(self.handle, LocalTraining) else 1

    def settings_text(self) -> str:
        """Return what must be the same on all ranks, line by line."""
        wrapped = isinstance(self.model, DistributedDataParallel)
        return f"a model {'under DistributedDataParallel' if wrapped else 'without DistributedDataParallel'}\n{self.handle.settings_text()}"

    def forget(self) -> None:
        """Forget what a step that failed has left: gradients, and that a loss scaler has unscaled them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for each in self.more:
            if isinstance(each, GradScaler):
                # HACK: torch has no public function for this. Price: a name that may change with torch; a test takes a step again.
                each._per_optimizer_states.clear()

    def state(self) -> dict[str, Any]:
        """Return what a rank that joins needs, or one that has missed a step."""
        return self._state(self.handle.shared_state())

    def _state(self, handle: Mapping[str, Any]) -> dict[str, Any]:
        local = isinstance(self.handle, LocalTraining)
        return {
            "handle": handle,
            "model": _bare(self.model).state_dict() if self.method is None else {},
            "optimizers": [] if local else [self._settings_or_all(each) for each in self.optimizers],
            "more": [each.state_dict() for each in self.more],
            "steps": self.steps,
        }

    def _settings_or_all(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer; without moments, where the handle has them."""
        found = optimizer.state_dict()
        return found if self.method is None else {**found, "state": {}}

    @property
    def method(self) -> StepMethod | None:
        """The handle, where a journal can hold what moves its common weights."""
        return self.handle if isinstance(self.handle, StepMethod) else None

    def rest(self, moves: Sequence[Packed]) -> dict[str, Any]:
        """Return what a rank lacks that has caught up but for these moves, where there is a `method`. See `load`."""
        assert self.method is not None
        handle, digests = self.method.rest_of_state(), self.method.digests()
        return {**self._state(handle), "moves": list(moves), "digests": digests}

    def load(self, state: Mapping[str, Any], late: bool, moved: Callable[[], None] = lambda: None) -> None:
        """Continue where the rank of this state is; `late`: it has gone on without this one. `moved` is called after each move.

        Raises ConnectionLostError where this rank should have caught up and has other weights: it needs all then.
        """
        if "moves" in state:
            assert self.method is not None
            for each in state["moves"]:
                self.method.replay([each])
                moved()
            if self.method.digests() != state["digests"]:
                raise ConnectionLostError("a rank that was to catch up has other weights than its source, and gets all")
        if state["model"]:
            _bare(self.model).load_state_dict(state["model"])
        if state["optimizers"]:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                own = saved["state"] if self.method is None else optimizer.state_dict()["state"]
                optimizer.load_state_dict({**saved, "state": own})
        for each, saved in zip(self.more, state["more"], strict=True):
            each.load_state_dict(saved)
        self.steps = state["steps"]
        self.handle.follow(state["handle"], late)


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
