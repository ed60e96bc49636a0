"""A training that continues while ranks die, freeze, leave and join."""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from sparsync import ConnectionLostError, Handle
from sparsync.comm import GroupComm
from sparsync_elastic.board import store_address
from sparsync_elastic.catching_up import Joiner, Sources
from sparsync_elastic.changes import Change, Failures, Lost, losses
from sparsync_elastic.epochs import Epoch, Note
from sparsync_elastic.members import Members
from sparsync_elastic.presence import Presence
from sparsync_elastic.trained import Saved, Trained
from sparsync_elastic.world import StoreSilentError, comm_of, end_world, forget_frames, is_loss, receive, send, world

_LOG = logging.getLogger("sparsync")
_LEAST_TIMEOUT_S, _ROUND_TRIPS = 10.0, 100  # the sum of both is the default timeout
_LEAST_MARGIN, _MOST_MARGIN = 2, 64  # steps between the call and the meeting, so that all hear of it in time


class Run:
    """A training that continues while ranks die, freeze, leave and join, without a restart and without a checkpoint.

    All ranks meet over a store, a small process: `python -m sparsync_elastic --port 29400`. Until `steps` begins, every rank is alone in a
    process group; wrap and attach the model there as usual. Then the ranks meet, and ranks that come later get the weights, the
    optimizer's state and the step from a member. torch's default process group always has the present ranks.

        run = elastic.Run("10.0.0.1:29400", ranks=4)
        handle = sparsync.attach(model, scheme, optimizer=optimizer)
        run.add(model, handle, optimizer, schedule)
        for step in run.steps(10_000):
            with run.attempt():
                optimizer.zero_grad()
                loss_of(model, batch(step, run.rank, run.size)).backward()
                optimizer.step()
                schedule.step()

    After the loss of a rank the others take the step again, unless it was applied. `lost` lists the updates that are lost for good.

    Args:
        address: "host:port" of the store. None: from the environment variables MASTER_ADDR and MASTER_PORT.
        ranks: the number of ranks that the first meeting waits for.
        least: the fewest ranks that continue; fewer wait for more.
        name: of the run, if several use one store.
        timeout_s: seconds until a rank that does not answer counts as lost. Must exceed the longest step, with all that a rank does between
            two steps. None: 10 s plus 100 measured round trips to the store.
        wait_s: seconds that a rank waits for the store, for the first meeting, and to join.
        background: True: a joining rank gets the state while the others train, and only the last changes when it joins. Works with steps
            and local steps, and needs twice the memory of the state on one rank. False: the others wait.
        on_change: called with the run after every meeting, on all ranks at the same step, for instance to divide the batch again.

    Raises:
        ValueError: if the address is invalid or a number is out of range.
        RuntimeError: if torch.distributed is initialised already.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        ranks: int = 1,
        least: int = 1,
        name: str = "run",
        timeout_s: float | None = None,
        wait_s: float = 300.0,
        background: bool = True,
        on_change: Callable[["Run"], None] | None = None,
    ) -> None:
        host, port = store_address(address)
        if not 1 <= least <= ranks:
            raise ValueError(f"least must be in [1, ranks={ranks}], got {least}")
        if wait_s <= 0 or (timeout_s is not None and timeout_s <= 0):
            raise ValueError(f"timeout_s and wait_s must be above 0 seconds, got {timeout_s} and {wait_s}")
        if dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is initialised already, and a run makes its process groups itself; leave init_process_group out"
            )
        presence = Presence(host, port)
        self.member, self.on_change = presence.member, on_change
        self._members = Members(host, port, name, presence, ranks=ranks, least=least, wait_s=wait_s)
        self.timeout_s = timeout_s or _LEAST_TIMEOUT_S + _ROUND_TRIPS * self._members.round_trip_s()
        self._members.timeout_s = self.timeout_s
        self._trained: list[Trained] = []
        self.lost: list[Lost] = []  # updates that the weights lack for good, as far as this rank has seen
        self.left = False  # this rank has left
        self._leaves = self._failed = False
        self._knows = False  # this rank has a state of the run
        self._late = False  # the others have gone on without this rank
        self._margin = _LEAST_MARGIN
        self._background = background
        self._sources = Sources(self._members, self._trained)
        self._joiner = Joiner(self._members, self._trained)
        self._weighed = Epoch()  # the residuals of this rank suit the mean over the ranks of this epoch
        self._factor = 1.0  # multiplied into them since the last successful meeting
        self._failures = Failures()
        self._comms = list[GroupComm]()  # of the handles
        self.changes: list[Change] = []
        self._begin_world(dist.HashStore(), 0, 1)  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from __all__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def epoch(self) -> Epoch:
        """The present members."""
        return self._members.current

    @property
    def rank(self) -> int:
        """The rank of this process among the present ranks; it may change between two steps."""
        return self.epoch.rank(self.member) if self.member in self.epoch.members else 0

    @property
    def size(self) -> int:
        """The number of present ranks."""
        return max(1, len(self.epoch.members))

    @property
    def step(self) -> int:
        """The number of steps done, which is the number of the next step."""
        return self._trained[0].done if self._trained else 0

    def add(self, model: nn.Module, handle: Handle, optimizer: Optimizer | Sequence[Optimizer], *more: Saved) -> None:
        """Add a model, bare or wrapped by DistributedDataParallel, with the handle from `sparsync.attach`. Call it before `steps`.

        `more`: other objects whose state a joining rank needs, such as a learning-rate schedule. Raises TypeError for FSDP2, whose mesh
        cannot change, and ValueError for local steps with a delay, for `bits="auto"`, and for gradients if `attach` has no optimizer.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._trained.append(Trained(model, handle, optimizers, more))

    def steps(self, until: int) -> Iterator[int]:
        """Yield the number of each step until this many are done or this rank has left; after a loss the same number again.

        Meets the other ranks first, and lets others join and leave between two steps. Put `attempt` around every step.
        Raises RuntimeError if the others leave this rank out, as the cause of repeated failures of the same members.
        """
        if not self._trained:
            raise RuntimeError("there is nothing to train; call run.add(model, handle, optimizer) before run.steps()")
        if not self.epoch.members:
            self._members.agree("\n".join(each.settings_text() for each in self._trained))
            self._change(joins=True)
        elif self.step < until:
            self._members.go_on()
        while not self.left:
            self._failed |= self._members.dropped
            stop_at = self._members.stop_at
            if self._failed or (stop_at is not None and self.step >= stop_at):
                self._change()
            elif self.step < until:
                self._ask()
                if not self.left:
                    yield self.step
            elif self._all_done():
                return

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Guard one step: if another rank is lost, suppress the error, so that `steps` meets the others."""
        try:
            yield
        except Exception as error:
            if not (is_loss(error) or any(each.handle.lost for each in self._trained)):
                raise
            _LOG.warning("rank %d of %d has lost others at step %d: %s", self.rank, self.size, self.step, error)
            self._failed = True
            self._failures.note(error, self.epoch)
            forget_frames(error)

    def leave(self) -> None:
        """Leave the run in a few steps: this rank hands its unsent updates to another rank, and `steps` ends."""
        self._leaves = True

    def leave_on(self, *signals: int) -> None:
        """Leave the run when the process gets one of these signals; by default SIGTERM, which spot machines send."""
        for each in signals or (signal.SIGTERM,):
            signal.signal(each, lambda *_: self.leave())

    def close(self) -> None:
        """Close the handles, the process group and the connections to the store."""
        self._sources.end()
        for each in self._trained:
            each.handle.close()
        self._members.close()
        end_world()

    def _ask(self) -> None:
        """Call a meeting if a rank wants to join or leave; answer processes that ask for the state."""
        members = self._members
        self._sources.answer(not self._leaves and self._catches_up)
        if self._leaves and self.size == 1 and not members.asked_for:
            _LOG.warning("the last rank of this run leaves; the trained weights are in this process only")
            members.end()
            self.left = True
        elif members.stop_at is None and (self._leaves or (members.asked_for and self.rank == 0)):
            members.stop_before(self.step + self._margin * max(each.lag for each in self._trained))

    @property
    def _catches_up(self) -> bool:
        return self._background and all(each.catches_up for each in self._trained)

    def _get_ahead(self) -> None:
        if self._catches_up and self._joiner.get_ahead():
            self._knows = False

    def _all_done(self) -> bool:
        """Wait until all have taken the last step; return False if one has called a meeting instead."""
        done = f"done/{self.step}"  # with the number, because `steps` may be called again
        self._members.say(done)
        if self._members.wait_for(done, self.epoch.members):
            self._members.end()
            return True
        self._failed = True
        return False

    def _change(self, joins: bool = False) -> None:
        """Meet the others and continue with the ranks that come; meet again if one of them is lost meanwhile."""
        began, whole = time.monotonic(), not (joins or self._failed)
        if self._failed:
            for each in self._trained:
                each.forget()
        while True:
            self._meet(joins, whole)
            joins = False
            if self.left:
                return
            self._members.watch()
            try:
                received = self._gather(self.epoch)
                break
            except Exception as error:
                if is_loss(error):
                    self._failures.note(error, self.epoch)
                elif not isinstance(error, StoreSilentError):  # then the next meeting waits for the store
                    raise
                _LOG.warning("a rank was lost in epoch %d before its first step: %s", self.epoch.number, error)
                forget_frames(error)
            whole = False
        self._failed = self._late = False
        self._failures.begin([each.position for each in self._trained])
        seconds = time.monotonic() - began
        self.changes.append(
            Change(self.epoch.number, self.size, self.step, seconds, *received, *self._joiner.take(), self._factor)
        )
        self._factor = 1.0
        if self.on_change is not None:
            with self.attempt():
                self.on_change(self)

    def _meet(self, joins: bool, whole: bool) -> None:
        """Meet the others: take the next epoch, or leave."""
        if not whole:
            self._cut()
        members, before = self._members, self._members.current
        position = self._position
        # A rank that begins from a checkpoint may have a residual too.
        since = self._weighed.since.get(self.member, 0 if any(each.done for each in self._trained) else -1)
        if joins:
            self._get_ahead()
        told = self._failures.told(before.members, position)
        note = Note(position, self.step, whole, self._leaves, self._joiner.source, since, **told)
        epoch = members.join(note) if joins else members.meet(note, self._give_up)
        if whole:
            self._hand_over(epoch, before)
        if self.member in epoch.leaving:
            self.left = True
            return
        for each, why in epoch.refused.items():
            _LOG.warning("rank %s is left out of this run: %s", each, why)
        self.lost += losses(epoch, before)
        if self.member not in epoch.members:
            end_world()
            self._late = True
            for each in self._trained if self._failed else ():
                each.take_back()
            self._get_ahead()
            note = replace(note, position=self._position, source=self._joiner.source)
            members.join(replace(note, whole=False, leaves=False))

    @property
    def _position(self) -> list[int]:
        return [each.position if self._knows else -1 for each in self._trained]

    def _give_up(self) -> None:
        """End a step that others have begun because they heard of the meeting too late; call the next meeting earlier."""
        self._margin = min(2 * self._margin, _MOST_MARGIN)
        self._cut()

    def _cut(self) -> None:
        """Close the connections, so that others stop waiting for this rank."""
        for each in self._comms:
            each.close()
        end_world()

    def _hand_over(self, epoch: Epoch, before: Epoch) -> None:
        """Send the unsent updates of a leaving rank to its heir, over the connections of the last epoch."""
        for member, heir in epoch.leaving.items():
            try:
                if self.member in (member, heir) and not dist.is_initialized():
                    raise ConnectionLostError("this rank closed its connections before all had come to the meeting")
                if self.member == member:
                    send([each.own() for each in self._trained], world(), before.rank(heir))
                elif self.member == heir:
                    for each, held in zip(self._trained, receive(world(), before.rank(member))[0], strict=True):
                        each.take_over(held)
            except RuntimeError as error:
                if not is_loss(error):
                    raise
                self.lost.append(Lost(member, epoch.step, "what it had not sent: lost on the way to another rank"))

    def _gather(self, epoch: Epoch) -> tuple[int, float]:
        """Make the process group of an epoch, and send the state to ranks that lack it; return the bytes and seconds received."""
        end_world()
        store = self._members.store_of(epoch)
        self._begin_world(store, epoch.rank(self.member), len(epoch.members))
        behind = self.member in epoch.behind
        # If this rank is behind, the others' weights contain what it sent in the failed step.
        for each in self._trained if self._failed and not behind else ():
            each.take_back()
        for place, each in enumerate(self._trained):
            if isinstance(each.model, DistributedDataParallel):
                # HACK: torch has no public function for this. Price: it may change with torch; tests train a DDP model on changing ranks.
                each.model._update_process_group(dist.group.WORLD)
            self._comms[place:] = [comm_of(f"handle{place}", self.timeout_s)]
            each.handle.regroup(self._comms[place], step=each.last(None if behind else epoch.step))
        received = 0, 0.0
        for receiver, source in epoch.behind.items():
            if self.member == source:
                send(self._sources.state_for(receiver, receiver in epoch.ahead), world(), epoch.rank(receiver))
            elif self.member == receiver:
                began = time.monotonic()
                states, nbytes = receive(world(), epoch.rank(source), self._members.moved)
                received = nbytes, time.monotonic() - began
                self._joiner.arrive(states, self._late)
        self._knows = True
        self._weigh(epoch)
        if epoch.behind:
            if behind:
                self._members.say("ready")
            if not self._members.wait_for("ready", list(epoch.behind)):
                raise ConnectionLostError("a rank was lost while others got the weights")
        else:
            self._members.look()
        return received

    def _begin_world(
        self, store: Any, rank: int, size: int
    ) -> None:  # Any: stores have no common class in torch's stubs
        timeout = timedelta(seconds=self.timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    def _weigh(self, epoch: Epoch) -> None:
        """Scale the residuals of this rank so that they move the weights as far as with the ranks before."""
        if self._weighed.members:
            last = self._weighed
            first, *_ = [each.multiply(partial(epoch.factors_after, last)) for each in self._trained]
            self._factor *= first
        self._weighed = epoch
