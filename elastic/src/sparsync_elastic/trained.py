"""A model that a run trains, with its handle, and everything else that a joining rank needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import sparsync
from sparsync_elastic.epochs import Factors
from sparsync_elastic.journal import Packed, unpacked_move

FULL_AFTER = 100  # the fewest steps after which a new residual is as large as an old one
Own = Mapping[str, Any]  # Any: as Snapshot.own
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_NOTHING_LEARNT: Own = {"learnt": {}}


class Saved(Protocol):
    """An object whose state joining ranks need, such as a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...  # Any: as torch's

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(eq=False)
class Trained:
    """A model with its handle, and the other objects whose state a joining rank needs. Raises as `Run.add`."""

    model: nn.Module
    handle: sparsync.Handle
    optimizers: Sequence[Optimizer]
    more: Sequence[Saved]

    def __post_init__(self) -> None:
        local = self._local
        if any(isinstance(each, FSDPModule) for each in self.model.modules()):
            raise TypeError(
                "a run cannot change the mesh of an FSDP2 model; wrap it by DistributedDataParallel, or leave it bare"
            )
        if local is not None and local.delay:
            raise ValueError(
                f"a run takes local steps without a delay, got delay={local.delay}: after a loss, only some ranks would apply an exchange "
                "that was under way; pass delay=0"
            )
        if getattr(self.handle, "chooses", False):
            raise ValueError(
                'bits="auto" chooses by the first 20 steps, which a rank that joins later has not measured; pass a number of bits'
            )
        if self.handle.done is None:
            raise ValueError(
                "a run counts optimizer steps, but this handle has no optimizer; pass optimizer= to sparsync.attach"
            )

    @property
    def _local(self) -> sparsync.LocalSteps | None:
        return self.handle.exchange if isinstance(self.handle.exchange, sparsync.LocalSteps) else None

    @property
    def position(self) -> int:
        """The number of common updates applied."""
        handle: Any = self.handle  # Any: only local steps count exchanges
        return self.done if self._local is None else handle.exchanged

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.handle.done or 0

    def last(self, step: int | None) -> int:
        """Return the last applied step. With local steps it is `step` - 1, because ranks may have taken different numbers of them."""
        return (self.done if self._local is None or step is None else step) - 1

    @property
    def lag(self) -> int:
        """The most steps that one rank may be ahead of another."""
        return 1 if self._local is None else self._local.every

    @property
    def catches_up(self) -> bool:
        """True if a joining rank can catch up by a copy of older weights and their moves since."""
        return self.handle.integration != "gradients"

    def settings_text(self) -> str:
        """List the settings that must be the same on all ranks, one per line."""
        wrapped, exchange = isinstance(self.model, DistributedDataParallel), self.handle.exchange
        settings = ", ".join(f"{name}={value!r}" for name, value in getattr(exchange, "described", dict)().items())
        lines = [
            f"a model {'under DistributedDataParallel' if wrapped else 'without DistributedDataParallel'}",
            self.handle.state.settings,
            f"{type(exchange).__name__}({settings})",
            *(f"parameter {name!r} of {shape}" for name, shape in self.handle.layout().items()),
        ]
        return "\n".join(lines)

    def forget(self) -> None:
        """Drop the gradients of a failed step, and reset the loss scaler that has unscaled them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for each in self.more:
            if isinstance(each, GradScaler):
                # HACK: torch has no public function for this. Price: the name may change with torch; a test takes a step again.
                each._per_optimizer_states.clear()

    def take_back(self) -> None:
        """Restore the residuals from before a failed step that is taken again.

        Not if other ranks have applied the step: then the weights contain what was sent, and the residual the rest.
        """
        self.handle.restore(self.handle.snapshot(shared=False))

    def own(self) -> Own:
        """Copy the residuals of this rank, for an heir."""
        return self.handle.snapshot(shared=False).own or {}

    def take_over(self, own: Own) -> None:
        """Add the residuals of a leaving rank to those of this rank."""
        self.handle.restore(sparsync.Snapshot(own=_added(self.own(), own)))

    def multiply(self, factors: Callable[[int], Factors]) -> float:
        """Multiply the residuals of this rank, because the mean is over other ranks now; return the factor.

        `factors` gets the number of steps after which a rank that began with nothing has about as large a residual as the others.
        """
        held, still, learnt = factors(self.lag * max(FULL_AFTER, math.ceil(3 / self.handle.scheme.share_sent)))
        if (held, still, learnt) != (1.0, 1.0, 1.0):
            own = self.own()
            _multiply(own["scheme"], dict.fromkeys(own["still"], still), held)
            _multiply(own.get("learnt", {}), {}, learnt)
            self.handle.restore(sparsync.Snapshot(own=own))
        return held

    def state(self, moves: Sequence[Packed] | None = None) -> dict[str, Any]:
        """Return the state for a rank that joins or has missed a step; with `moves`, these instead of the weights."""
        snapshot = self.handle.snapshot()
        digest, without = None if moves is None else digest_of(snapshot), {"state": {}} if self.catches_up else {}
        return {
            "moved": snapshot.moved if moves is None else None,
            "shared": snapshot.shared,
            "moves": list(moves or ()),
            "digest": digest,
            "model": {} if self.catches_up else _bare(self.model).state_dict(),
            # The handle has the optimizer's state with local steps, and the moments with other steps.
            "optimizers": [] if self._local else [{**each.state_dict(), **without} for each in self.optimizers],
            "more": [each.state_dict() for each in self.more],
        }

    def load(self, state: Mapping[str, Any], late: bool, moved: Callable[[], None] = lambda: None) -> None:
        """Continue from the state of another rank; `late`: it has gone on without this one. `moved` is called after every move.

        Raises ConnectionLostError if this rank should have caught up but has other weights; then it needs the whole state.
        """
        for each in state["moves"]:
            self.replay(each)
            moved()
        if state["digest"] is not None and digest_of(self.handle.snapshot()) != state["digest"]:
            raise sparsync.ConnectionLostError(
                "a rank that caught up has other weights than its source, and gets all of them"
            )
        if state["model"]:
            _bare(self.model).load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=bool(state["optimizers"])):
            own = optimizer.state_dict()["state"] if self.catches_up else saved["state"]
            optimizer.load_state_dict({**saved, "state": own})
        for each, saved in zip(self.more, state["more"], strict=True):
            each.load_state_dict(saved)
        # The others still lack the local steps of a late rank.
        own = None if late or self._local is None else _NOTHING_LEARNT
        self.handle.restore(sparsync.Snapshot(state["moved"], state["shared"], own))

    def replay(self, move: Packed) -> None:
        """Move the common weights as another rank has moved them."""
        self.handle.restore(sparsync.Snapshot(moves=[unpacked_move(move)]))


def digest_of(snapshot: sparsync.Snapshot) -> int:
    """Compute a digest of the common weights' bits."""
    digest = 0
    for each in (snapshot.moved or {})["common"].values():
        words = each.detach().view(-1).view(_WORDS[each.element_size()]).long()
        digest = 31 * digest + int((words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum())
    return digest


def _added(one: Own, other: Own) -> dict[str, Any]:
    """Add the vectors of two trees; other entries come from the first one."""
    sums = {
        key: _added(one[key], each) if isinstance(each, Mapping) else one[key] + each
        for key, each in other.items()
        if key in one and isinstance(each, (Mapping, Tensor))
    }
    return {**other, **one, **sums}


def _multiply(tree: Own, factors: Mapping[str, float], otherwise: float) -> None:
    """Multiply the vectors in a tree in place by the factors of their names."""
    for name, each in tree.items():
        if isinstance(each, Tensor):
            each.mul_(factors.get(name, otherwise))
        else:
            _multiply(each, factors, otherwise)


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
