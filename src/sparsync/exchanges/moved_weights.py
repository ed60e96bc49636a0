"""How ranks that come later, or have failed in a step, follow those that have the common weights: by snapshots, and by each move since."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsync.exchanges.weights import Weights
from sparsync.runtime.handle import Handle
from sparsync.runtime.restorable import Part, SavedState, Snapshot


class MovedWeights(Handle):
    """A handle that moves common weights itself, and tells of each move."""

    _weights: Weights
    _callbacks: list[Callable[[Part | None], None]]  # see `on_move`

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        found = super().snapshot(shared=shared)
        if found.shared is None:
            return found
        moved, rest = self._parts(found.shared[self.integration])
        return found._replace(moved=moved, shared={**found.shared, self.integration: rest})

    @abstractmethod
    def _parts(self, state: SavedState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what moves with the common weights, and the rest, without what is a rank's own."""

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; see Handle. With `moved` alone this is a beginning for `moves`, and nothing to train with."""
        with torch.no_grad():
            for move in snapshot.moves:
                self._replay(move)
        if snapshot.moved is not None and snapshot.shared is None:
            self._start_from(snapshot.moved)
        super().restore(snapshot)

    @abstractmethod
    def _start_from(self, moved: SavedState) -> None:
        """Take what moves with the common weights of another rank."""

    @abstractmethod
    def _replay(self, move: Part) -> None:
        """Move the common weights as another rank has moved its own."""

    def on_move(self, callback: Callable[[Part | None], None]) -> Callable[[], None]:
        def end() -> None:
            self._callbacks = [each for each in self._callbacks if each is not callback]

        self._callbacks.append(callback)
        return end

    def _note_move(self, means: Sequence[Tensor], **more: Any) -> None:  # Any: numbers, names and settings
        """Tell of what moves the common weights now: `means` [n] and what else `_replay` needs."""
        for each in self._callbacks:
            each({"means": means, "groups": self._settings(), **more})

    def _settings(self) -> list[dict[str, Any]]:  # Any: settings
        """Return the settings of the optimizer of the common weights, by group."""
        return [_settings(group) for each in self._movers() for group in each.param_groups]

    def _take_settings(self, found: Sequence[Mapping[str, Any]]) -> None:  # Any: settings
        groups = [group for each in self._movers() for group in each.param_groups]
        for group, settings in zip(groups, found, strict=True):
            group.update(settings)

    @abstractmethod
    def _movers(self) -> Sequence[Optimizer]:
        """Return the optimizers whose settings say how the common weights move."""

    def _take_common(self, common: Sequence[Tensor]) -> None:
        for bucket, weights in zip(self._weights.buckets, common, strict=True):
            bucket.put_common(weights)
        self._note_other_move()

    def _note_other_move(self) -> None:
        for each in self._callbacks:
            each(None)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: settings
    return {key: deepcopy(value) for key, value in group.items() if key != "params"}
