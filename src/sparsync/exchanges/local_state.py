"""The state of LocalTraining: saving, loading, and following other ranks."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from sparsync.core import Comm
from sparsync.exchanges.local_exchange import Exchanger, PendingExchange, merged
from sparsync.exchanges.step_method import StepMethod
from sparsync.runtime.restorable import Part, SavedState, Snapshot


class LocalState(StepMethod):
    """Saves, loads and moves the state of LocalTraining."""

    optimizers: Sequence[Optimizer]
    _exchanger: Exchanger
    _failed = False  # an exchange has failed: the next one compares the weights

    def _method_state(self) -> dict[str, Any]:  # Any: as Handle.state_dict
        return {**self._exchanger.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def resized(self, states: Sequence[SavedState]) -> dict[str, Any]:  # Any: as Handle
        """Make a state for this rank from the states of another number of ranks, in rank order.

        The mean of what the ranks have learnt since the last exchange moves the common weights. Optimizers come from the old ranks in turn.
        """
        saved = [each[self.integration] for each in states]
        more = {"optimizers": saved[self.place[0] % len(saved)]["optimizers"]}
        return {**super().resized(states), self.integration: {**merged(saved), **more}}

    @property
    def done(self) -> int:
        """The number of steps that this rank has taken."""
        return self._step + 1

    @property
    def exchanged(self) -> int:
        """The number of exchanges that were applied, of all fragments."""
        return sum(self._exchanger.applied)

    def _regrouped(self, comm: Comm) -> None:
        super()._regrouped(comm)
        self._failed = True  # the next exchange compares the weights
        self._exchanger.comm = comm

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        self._check_own()
        return super().snapshot(shared=shared)

    def _own(self, scheme: Part) -> dict[str, Any]:  # Any: as Snapshot.own
        learnt = self._weights.saved(each.start - each.own() for each in self._weights.buckets)
        return {**super()._own(scheme), "learnt": learnt}

    def _parts(self, state: SavedState) -> tuple[dict[str, Any], dict[str, Any]]:
        # Copied, because optimizers change their state in place.
        moved = {
            "common": state["common"],
            "outer": deepcopy(state["outer"]),
            "optimizers": deepcopy(state["optimizers"]),
        }
        settings = [{**each, "state": {}} for each in moved["optimizers"]]
        rest = {key: value for key, value in state.items() if key not in moved}
        return moved, {**rest, "start": {}, "own": {}, "optimizers": settings}

    def restore(self, snapshot: Snapshot) -> None:
        self._check_own()
        follows, own, buckets = snapshot.shared is not None, snapshot.own or {}, self._weights.buckets
        saved = own.get("learnt", self._own({})["learnt"] if follows else {})
        learnt = self._weights.from_saved(saved) if saved else []
        super().restore(snapshot)
        self._failed |= follows  # the next exchange compares the weights
        for bucket, change in zip(buckets, learnt, strict=bool(learnt)):
            now = bucket.own()
            if not change.isfinite().all() or torch.equal(change, bucket.start - now):
                continue
            if follows:
                bucket.write(bucket.start - change)
            else:
                bucket.start = now + change
        if follows:
            self._note_written()

    def _joined(self, snapshot: Snapshot, mine: SavedState) -> dict[str, Any]:  # Any: as Handle.state_dict
        joined, mine_here = super()._joined(snapshot, mine), mine[self.integration]
        rest = joined[self.integration]
        theirs = {**rest, **(snapshot.moved or {key: mine_here[key] for key in ("common", "outer")})}
        # Moments are a rank's own, but rates and other settings are the same on all.
        if mine["step"] >= 0 or snapshot.moved is None:
            pairs = zip(mine_here["optimizers"], rest["optimizers"], strict=True)
            theirs["optimizers"] = [{**one, "param_groups": other["param_groups"]} for one, other in pairs]
        return {**joined, self.integration: theirs}

    def _start_from(self, moved: SavedState) -> None:
        self._check_own()
        for bucket in self._weights.buckets:
            # The changes since the last exchange are the difference to `start`.
            bucket.start = bucket.start.clone() if bucket.start is bucket.common else bucket.start
        self._take_common(self._weights.from_saved(moved["common"]))
        if self._exchanger.outer is not None:
            self._exchanger.outer.optimizer.load_state_dict(moved["outer"])
        for optimizer, one in zip(self.optimizers, moved["optimizers"], strict=True) if self._step < 0 else ():
            optimizer.load_state_dict(one)

    def _replay(self, move: Part) -> None:
        self._take_settings(move["groups"])
        buckets = self._weights.fragments[move["fragment"]]
        exchange = PendingExchange(buckets, 0, background=False, idle=frozenset(move["idle"]))
        pairs = zip(buckets, move["means"], strict=True)
        exchange.changes = [bucket.bucket(mean.to(bucket.common.device), 0) for bucket, mean in pairs]
        self._exchanger.apply_to_common(exchange)

    def _movers(self) -> Sequence[Optimizer]:
        return [] if self._exchanger.outer is None else [self._exchanger.outer.optimizer]

    def _check(self, state: SavedState) -> None:
        super()._check(state)
        saved = state[self.integration]
        self._exchanger.check(saved)

    def _load(self, state: SavedState) -> None:
        for exchange in self._exchanger.pending.values():
            exchange.wait()  # its outcome does not matter any more
        super()._load(state)
        self._failed = False
        for optimizer, one in zip(self.optimizers, state[self.integration]["optimizers"], strict=True):
            # A copy: an optimizer keeps the tensors that it loads, which may be mapped from a file.
            optimizer.load_state_dict(deepcopy(one))
        self._exchanger.load_state_dict(state[self.integration])
        self._note_written()

    @abstractmethod
    def _note_written(self) -> None:
        """Note that the model has the weights of this handle: later changes count as learnt or as set from outside."""
