"""Elastic runs for tests, in which a rank that is stopped for seconds, or waits for a busy machine, does not count as lost."""

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
import sparsync_elastic as elastic
from sparsync_elastic import members
from sparsync_elastic.board import TCPStore

PATIENT_S = 60.0  # longer than any rank pauses; the end of a process is still noticed at once
EXCHANGES = {"steps": sparsync.Steps(), "local": sparsync.LocalSteps(every=3), "gradients": sparsync.Gradients()}


def served() -> TCPStore:
    """Start a store for a run, which serves as long as it is referenced."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def patient_run(port: int, timeout_s: float = PATIENT_S, wait_s: float = 4 * PATIENT_S, **given: Any) -> elastic.Run:
    """Begin a run in a fresh process, and leave its default process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    members.ANSWER_S = timeout_s
    return elastic.Run(f"127.0.0.1:{port}", timeout_s=timeout_s, wait_s=wait_s, **given)


def signals_at(port: int) -> TCPStore:
    """Connect to the store, through which ranks of a test wait for each other."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


class Training:
    """A small training in a run: a model, its handle, and steps on inputs drawn by a seed."""

    def __init__(
        self,
        run: elastic.Run,
        exchange: str = "steps",
        wrapped: bool = False,
        scheme: Any = None,
        bare: nn.Module | None = None,
        decay: float = 0.95,
        **options: Any,
    ) -> None:
        self.run, self._reduces = run, exchange == "gradients" and not wrapped
        self._local = exchange == "local"
        self.bare = network() if bare is None else bare
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, decay)
        self.model = nn.parallel.DistributedDataParallel(self.bare) if wrapped else self.bare
        self.scheme = scheme or sparsync.schemes.TwoShot(density=0.2, values="sign")
        how = {"exchange": EXCHANGES[exchange], "options": sparsync.Options(**options)}
        self.handle: Any = sparsync.attach(self.model, self.scheme, optimizer=self.optimizer, **how)
        run.add(self.model, self.handle, self.optimizer, self.schedule)

    def step(self, seed: int, after_backward: Callable[[], object] = lambda: None) -> None:
        first: Any = next(self.bare.parameters())
        inputs = torch.randn(8, first.shape[1], generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        (outputs - inputs[:, : outputs.shape[1]].sin()).square().mean().backward()
        after_backward()
        if self._reduces:
            self.handle.reduce()
        self.optimizer.step()
        self.schedule.step()

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of this rank's residual."""
        return self.handle.state.state_dict()["residual"]

    @property
    def is_common(self) -> bool:
        """Whether ranks have exchanged everything up to this step, so that their weights are equal."""
        return not self._local or self.handle.exchanged * 3 == self.run.step

    def digest(self) -> str:
        return digest_of(self.bare, self.handle)


class LastStep:
    """The number of steps of a run: `more` than were done when a rank appeared that was not in the first epoch.

    All ranks notice at the same step; `joins`: this rank is the new one.
    """

    def __init__(self, run: elastic.Run, joins: bool, more: int = 20) -> None:
        self._first, self._more, self._last = frozenset[str](), more, None if not joins else -1
        run.on_change = self._changed

    def _changed(self, run: elastic.Run) -> None:
        self._first = self._first or frozenset(run.epoch.members)
        if self._last == -1 or (self._last is None and not self._first.issuperset(run.epoch.members)):
            self._last = run.step + self._more

    @property
    def is_known(self) -> bool:
        """Whether the other rank has come."""
        return self._last is not None

    def __gt__(self, step: int) -> bool:
        return self._last is None or step < self._last


def assert_same_weights(found: list[dict[tuple[int, int], str]]) -> None:
    """Assert that ranks had the same digest in each epoch after each step."""
    seen: dict[tuple[int, int], str] = {}
    for digests in found:
        for place, digest in digests.items():
            assert seen.setdefault(place, digest) == digest, place


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert that two sets of vectors have the same names and bits, and are not all zero."""
    assert any(each.any() for each in one.values())
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def digest_of(model: nn.Module, handle: Any) -> str:
    shown = handle.averaged() if hasattr(handle, "averaged") else contextlib.nullcontext()
    with shown:
        content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(content).hexdigest()


def network() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5))
