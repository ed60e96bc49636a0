"""The processes of a trial: the store, and a rank that trains and records its events."""

import hashlib
import os
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import sparsync
import sparsync_elastic as elastic
from sparsync_elastic.__main__ import main as serve_store
from studies.elastic.drawing import Trial
from studies.trials import process
from studies.trials.process import Seat, Tell

PACE_S = 0.06  # sleep per step
WAIT_S = 30.0
EVERY = 4  # steps between two exchanges of local steps
DIGEST_EVERY = 3
AHEAD = 20  # steps between rank 0's notice of the end and the last step
_EXCHANGES = {
    "steps": sparsync.Steps,
    "gradients": sparsync.Gradients,
    "local": lambda: sparsync.LocalSteps(every=EVERY),
}
_SCHEMES = {
    "two_shot": lambda: sparsync.schemes.TwoShot(density=0.1, values="sign"),
    "topk": lambda: sparsync.schemes.TopK(density=0.1),
    "exact_micro": lambda: sparsync.schemes.ExactMiCRO(density=0.1),
    "dense": sparsync.schemes.Dense,
}


def serve(seat: Seat, port: int) -> None:
    process.take_seat(seat)
    serve_store(["--port", str(port)])


def run(seat: Seat, trial: Trial, address: str, timeout_s: float) -> None:
    """Run a rank with the store at `address`, and end the process."""
    process.run(seat, lambda tell: _Rank(seat, trial, address, timeout_s, tell).train(), finalizes=True)


class _LastStep:
    """The number of steps to take: unlimited until the supervisor ends the run; then rank 0 names one, some steps ahead."""

    def __init__(self, folder: Path, run: elastic.Run) -> None:
        self._folder, self._run, self._last = folder, run, cast("int | None", None)

    def __gt__(self, step: int) -> bool:
        named = self._folder / "last"
        if self._last is None and self._run.rank == 0 and not named.exists() and (self._folder / "finish").exists():
            own = self._folder / f"last.{os.getpid()}"
            own.write_text(str(step + AHEAD))
            with suppress(FileExistsError):  # another rank 0 was faster
                named.hardlink_to(own)
        if self._last is None and named.exists():
            self._last = int(named.read_text())
        return self._last is None or step < self._last


class _Rank:
    """A training, and this rank's residual after each step."""

    def __init__(self, seat: Seat, trial: Trial, address: str, timeout_s: float, tell: Tell) -> None:
        self.seat, self.trial, self.tell = seat, trial, tell
        kind, _, wrapped = trial.exchange.partition("_")
        torch.manual_seed(seat.number)  # weights differ between ranks until they get the run's
        self.run = elastic.Run(address, ranks=trial.ranks, timeout_s=timeout_s, wait_s=WAIT_S)
        self.run.leave_on(signal.SIGTERM)
        norm = [nn.BatchNorm1d(64)] if wrapped else []
        self.bare = nn.Sequential(nn.Linear(20, 64), *norm, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
        self.model = nn.parallel.DistributedDataParallel(self.bare) if wrapped else self.bare
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-3)
        self.handle: Any = sparsync.attach(
            self.model, _SCHEMES[trial.scheme](), optimizer=self.optimizer, exchange=_EXCHANGES[kind]()
        )  # Any: handles differ in what they can do besides
        self.reduces = kind == "gradients" and not wrapped
        self.held: dict[str, Tensor] = {}
        self.fresh = True  # no step since the last meeting
        self.run.add(self.model, self.handle, self.optimizer)
        self.run.on_change = self._changed
        tell(member=self.run.member)

    def train(self) -> None:
        run = self.run
        last = cast("int", _LastStep(self.seat.folder, run))
        for step in run.steps(last):
            with run.attempt():
                self._step(step)
                self.held = residual(self.handle)
                seen = {"digest": self._digest()} if self.fresh or self._position() % DIGEST_EVERY == 0 else {}
                self.fresh = False
                self.tell(step=run.step, epoch=run.epoch.number, rank=run.rank, position=self._position(), **seen)
                time.sleep(PACE_S)
        if run.left:
            torch.save(residual(self.handle), self.seat.folder / f"left{self.seat.number}.pt")
            self.tell(left=run.epoch.number, heir=run.epoch.leaving.get(run.member))
        else:
            self.tell(done=run.step, digest=self._digest(), position=self._position(), epoch=run.epoch.number)
        run.close()
        self.tell(closed=True)

    def _step(self, step: int) -> None:
        chance = torch.Generator().manual_seed(1000 * step + self.seat.number)
        batch = torch.randn(8, 20, generator=chance)
        self.optimizer.zero_grad()
        loss = (self.model(batch) - batch[:, :5].sin()).square().mean()
        loss.backward()
        if self.reduces:
            self.handle.reduce()
        self.optimizer.step()

    def _position(self) -> int:
        """Count the updates that all ranks share."""
        return self.handle.exchanged if self.trial.exchange.startswith("local") else self.run.step

    def _digest(self) -> str:
        with self.handle.averaged() if hasattr(self.handle, "averaged") else nullcontext():
            weights = b"".join(each.detach().numpy().tobytes() for each in self.bare.parameters())
        return hashlib.sha256(weights).hexdigest()[:16]

    def _changed(self, run: elastic.Run) -> None:
        """Record the meeting, and this rank's residual if it has changed since its last step or should have."""
        held, mass = residual(self.handle), ""
        if differing(self.held, held) or run.changes[-1].factor != 1.0:
            mass = f"mass{self.seat.number}.{run.epoch.number}.pt"
            torch.save({"before": self.held, "after": held}, self.seat.folder / mass)
        self.held, self.fresh = held, True
        lost = [[each.member, each.what] for each in run.lost]
        epoch = run.epoch
        met = {"members": epoch.members, "behind": epoch.behind, "step": run.step, "factor": run.changes[-1].factor}
        self.tell(change=epoch.number, **met, mass=mass, lost=lost)


def residual(handle: Any) -> dict[str, Tensor]:  # Any: see _Rank
    """Copy a rank's residual, by parameter."""
    return {name: each.clone() for name, each in handle.state.state_dict().get("residual", {}).items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """List the names whose bits differ; a missing vector is zero."""

    def same(name: str) -> bool:
        first, second = one.get(name), other.get(name)
        if first is None or second is None:
            return not any(each is not None and each.any() for each in (first, second))
        return torch.equal(first, second)

    return [name for name in sorted({*one, *other}) if not same(name)]
