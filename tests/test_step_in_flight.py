"""Several buckets on their way at once: what one that fails means for those of its step, and for the next step."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.distributed import run
from sparsync import Bucket, Report
from sparsync.base.scheme import Scheme
from sparsync.comm import GroupComm, LocalWorld
from sparsync.core import Comm
from sparsync.runtime.connection import Connection
from sparsync.runtime.step_in_flight import StepInFlight
from sparsync.schemes import Dense, State

pytestmark = pytest.mark.distributed

FAILS, BUCKETS, STEPS = 2, 4, 4


class FirstFails(Scheme):
    """Dense, but that the first bucket of one step fails on rank 1."""

    name = "first_fails"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if (bucket.step, bucket.key, comm.rank) == (FAILS, "bucket0", 1):
            raise ValueError("no luck today")
        return Dense().reduce(state, bucket, comm)


class NoStream(StepInFlight):
    """Cannot enter the stream of the first bucket of one step on rank 1, as after a CUDA error."""

    def _enter_stream(self, submitted: Any, stack: ExitStack) -> None:
        if (submitted.bucket.step, submitted.bucket.key, dist.get_rank()) == (FAILS, "bucket0", 1):
            raise RuntimeError("no luck today")


def late_buckets(waits_s: list[float], scheme: Scheme, kind: type[StepInFlight] = StepInFlight) -> list[list[str]]:
    """Train; after the bucket that fails, the next ones of its step come so many seconds later on each rank. Return errors by step."""
    comm, state = GroupComm.private(timeout_s=30), scheme.start()
    reports: list[Report] = []
    flight = kind(Connection(state, comm), reports.append)
    errors = []
    for step in range(STEPS):
        submitted = []
        for number in range(BUCKETS):
            if step == FAILS and number:
                time.sleep(waits_s[comm.rank])
            bucket = Bucket(f"bucket{number}", torch.full((9,), float(step + comm.rank)), step)
            submitted.append((bucket, flight.submit(bucket, state)))
        errors.append([])
        for bucket, promised in submitted:
            try:
                promised.wait()
                assert bucket.grad.tolist() == [step + (comm.size - 1) / 2] * 9
            except RuntimeError as error:
                errors[-1].append(str(error))
    flight.stop()
    return errors


# A failure is told to the other ranks for up to 3 seconds, while the backward pass goes on.
@pytest.mark.parametrize(
    ("waits_s", "how"),
    [
        ([0.0, 0.8], {"scheme": FirstFails()}),
        ([0.8, 0.02], {"scheme": FirstFails()}),
        ([0.0, 0.0], {"scheme": Dense(), "kind": NoStream}),  # before its turn
    ],
    ids=["late on rank 1", "late on rank 0", "no stream"],
)
def test_buckets_that_come_while_a_failure_is_told_fail_with_it_and_the_next_step_works(
    waits_s: list[float], how: dict[str, Any]
) -> None:
    for errors in run(late_buckets, 2, waits_s=waits_s, **how, within_s=60):
        assert [len(each) for each in errors] == [BUCKETS if step == FAILS else 0 for step in range(STEPS)]
        assert all("no luck today" in each for each in errors[FAILS])


class Slow(Scheme):
    """Dense, of which the first bucket computes for long."""

    name = "slow"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if bucket.key == "bucket0":
            time.sleep(1.0)
        return Dense().reduce(state, bucket, comm)


def timed() -> list[float]:
    """Return the seconds of each bucket's report."""
    comm, state, reports = GroupComm.private(timeout_s=30), Slow().start(), list[Report]()
    flight = StepInFlight(Connection(state, comm), reports.append)
    for number in range(BUCKETS):
        flight.submit(Bucket(f"bucket{number}", torch.ones(9), 0), state)
    flight.flush()
    return [each.seconds or 0.0 for each in reports]


def test_the_time_of_a_bucket_leaves_out_that_in_which_it_waited_for_others_to_be_computed() -> None:
    for first, *others in run(timed, 2, within_s=60, fresh=True):
        assert first > 1.0 > 0.5 > max(others)


class Broken(Connection):
    """A connection whose handling of failures fails."""

    def close(self, cause: BaseException | str) -> str:
        raise OSError("no more files")


class Fails(Scheme):
    name = "fails"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        raise ValueError("no luck today")


def test_a_failure_of_the_runtime_itself_reaches_whoever_waits() -> None:
    def broken(comm: Comm) -> None:
        state = Fails().start()
        flight = StepInFlight(Broken(state, comm), lambda report: None)
        first, second = (flight.submit(Bucket(key, torch.ones(9), 0), state) for key in ("first", "second"))
        with pytest.raises(RuntimeError, match="bucket 'first' was not reduced: OSError: no more files"):
            first.wait()
        with pytest.raises(RuntimeError, match=r"bucket 'second' was not reduced: .*OSError: no more files"):
            second.wait()
        flight.stop()

    LocalWorld(1).run(broken)


@dataclass(frozen=True)
class Around(Scheme):
    """A wrapper of a third party, which says nothing of its own about interleaving."""

    inside: Scheme

    name = "around"

    @property
    def inner(self) -> dict[str, Scheme]:
        return {"": self.inside}

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return state.inner[""].reduce(bucket, comm)


class InOrder(Dense):
    interleaves = False


def test_a_wrapper_of_a_scheme_interleaves_only_if_the_scheme_inside_does() -> None:
    assert Around(Dense()).start().interleaves and not Around(InOrder()).start().interleaves
