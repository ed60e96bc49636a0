"""attach when something goes wrong: the error says what and where, on every rank, and training continues where it can."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.ddp_training import NAMES, TIMEOUT_S, AttachedTraining, known, total
from helpers.distributed import HANG_S, run
from sparsync import Bucket, Report
from sparsync.base.scheme import Scheme
from sparsync.core import Comm
from sparsync.schemes import Dense, State, TopK

pytestmark = pytest.mark.distributed

WHERE = (2, "bucket1")  # the step and bucket at which things go wrong


class Failing(Scheme):
    """A dense ring that does `what` on some ranks at one bucket of one step, before or after its communication."""

    name = "failing"

    def __init__(self, what: Callable[[], None], ranks: tuple[int, ...], after: bool = False) -> None:
        self.what, self.ranks, self.after = what, ranks, after
        self.came: list[tuple[int, str]] = []

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        self.came.append((bucket.step, bucket.key))
        now = (bucket.step, bucket.key) == WHERE and comm.rank in self.ranks
        if now and not self.after:
            self.what()
        report = Dense(form="ring").reduce(state, bucket, comm)
        if self.after and (bucket.step, bucket.key) == WHERE:
            through = dist.distributed_c10d._get_default_store()
            if now:
                through.wait([f"through/{rank}" for rank in range(comm.size) if rank not in self.ranks])
                self.what()
            through.set(f"through/{comm.rank}", "")
        return report


def fail() -> None:
    raise ValueError("no luck today")


def leave() -> None:
    raise SystemExit("leaving")


def stall() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Outcome:
    """What became of each step on one rank: its error, and whether the gradients are the right ones."""

    errors: list[str | None]
    right: list[bool]
    came: list[tuple[int, str]]  # the buckets that were handed to the scheme


def train_with(
    what: Callable[[], None],
    ranks: tuple[int, ...],
    after: bool = False,
    timeout_s: float = TIMEOUT_S,
    buckets: int = 4,
    steps: int = 6,
) -> Outcome:
    """Train so many steps, whatever they raise."""
    scheme = Failing(what, ranks, after)
    training = AttachedTraining(scheme, buckets, timeout_s=timeout_s)
    outcome = Outcome([], [], scheme.came)
    for step in range(steps):
        outcome.errors.append(error_of(training, step))
        outcome.right.append(torch.equal(training.model.gradients(), mean(step, dist.get_world_size())))
    return outcome


def error_of(training: AttachedTraining, step: int) -> str | None:
    try:
        training.step(training.model.inputs(training.rank, step))
    except RuntimeError as error:
        return str(error)
    return None


def mean(step: int, P: int) -> Tensor:
    """The dense mean gradient of that step, [elements]."""
    return torch.cat([total(known(rank, step, name) for rank in range(P)) / P for name in NAMES])


FAILED_ONCE = [True, True, False, True, True, True]  # which steps are right


def fail_in_three_ways() -> list[Outcome]:
    """A failure on all ranks, one on rank 1, and a scheme that wants to end the process."""
    everyone = tuple(range(dist.get_world_size()))
    return [train_with(*how) for how in ((fail, everyone), (fail, (1,)), (leave, everyone))]


def test_a_failure_on_any_rank_fails_the_step_on_all_with_its_cause_and_the_next_step_works() -> None:
    """Nobody waits for a timeout: the causes that are not a rank's own are those of lost connections."""
    for rank, (all_fail, one_fails, all_leave) in enumerate(run(fail_in_three_ways, 3)):
        for outcome in (all_fail, one_fails, all_leave):
            assert [error is None for error in outcome.errors] == FAILED_ONCE
            assert outcome.right == FAILED_ONCE
            # A bucket that is on its way beside the one that fails may lose its connections first.
            assert re.search(r"failing failed on bucket '\w+' at step 2: ", str(outcome.errors[2]))
            assert [len([key for step, key in outcome.came if step == number]) for number in (1, 3)] == [4, 4]
        assert "ValueError: no luck today" in str(all_fail.errors[2])
        assert "SystemExit: leaving" in str(all_leave.errors[2])
        assert ("no luck today" if rank == 1 else f"rank {rank} of 3: ") in str(one_fails.errors[2])
        assert ("rank 1 reports ValueError: no luck today" in str(one_fails.errors[2])) == (rank != 1)


def fail_outside_the_scheme() -> dict[str, list[str | None]]:
    """The errors of 5 steps in which rank 0 fails once: before the first bucket is reduced, or in the hook itself."""
    found: dict[str, list[str | None]] = {}
    for name in ("prepare", "hook"):
        training = AttachedTraining(TopK(0.5), buckets=2, timeout_s=TIMEOUT_S)
        found[name] = []
        for step in range(5):
            if step == 2 and training.rank == 0:
                handle = training.handle
                fails_once(*((handle._rescaler, "rescale") if name == "prepare" else (handle, "_bucket")))
            found[name].append(error_of(training, step))
    return found


def fails_once(owner: object, name: str) -> None:
    whole = getattr(owner, name)

    def failing(*arguments: object) -> object:
        setattr(owner, name, whole)
        raise ValueError("no luck today")

    setattr(owner, name, failing)


def test_a_failure_outside_the_scheme_fails_the_step_on_all_ranks_and_the_next_one_works() -> None:
    for found in run(fail_outside_the_scheme, 2):
        for name, errors in found.items():
            assert [error is None for error in errors] == [True, True, False, True, True], (name, errors)
            assert "no luck today" in str(errors[2])


def fail_and_go_back() -> list[bool]:
    """Return which steps were right: one that fails is tried again from the state before it."""
    bad_luck = [fail]
    training = AttachedTraining(
        Failing(lambda: bad_luck.pop()() if bad_luck else None, (0, 1)), buckets=2, timeout_s=TIMEOUT_S
    )
    right, step = list[bool](), 0
    while step < 4:
        before = training.handle.state_dict()
        if (error := error_of(training, step)) is not None:
            assert "no luck today" in error
            training.handle.load_state_dict(before)
            continue
        right.append(torch.equal(training.model.gradients(), mean(step, 2)))
        step += 1
    assert not bad_luck
    return right


def test_a_failed_step_can_be_tried_again_from_the_state_before_it() -> None:
    assert run(fail_and_go_back, 2) == [[True] * 4] * 2


@pytest.mark.slow
def test_a_rank_that_stalls_is_an_error_on_the_others_after_the_timeout() -> None:
    outcomes = run(train_with, 3, what=stall, ranks=(1,), timeout_s=5.0, steps=4, doomed=[1])
    for rank in (0, 2):
        error = outcomes[rank].errors[2]
        assert f"rank {rank} of 3: " in str(error)
        assert "(rank 1 does not answer)" in str(error)
        assert "rank 1 did not come" in str(outcomes[rank].errors[3])


def test_a_rank_that_is_killed_is_an_error_on_the_others() -> None:
    outcomes = run(train_with, 3, what=die, ranks=(1,), steps=3, doomed=[1])
    for rank in (0, 2):
        assert f"rank {rank} of 3: " in str(outcomes[rank].errors[2])
        assert "(rank 1 does not answer)" in str(outcomes[rank].errors[2])
        assert not any(outcomes[rank].right[2:])


def test_after_a_failure_that_one_rank_did_not_see_every_step_says_that_a_checkpoint_must_be_loaded() -> None:
    """Rank 0 fails in the last bucket of step 2 when rank 1 is through with it, and has applied it."""
    behind, ahead = run(train_with, 2, what=fail, ranks=(0,), after=True, timeout_s=5.0, buckets=2)
    assert "no luck today" in str(behind.errors[2])
    assert ahead.errors[2] is None
    assert "rank 1 of 2: " in str(ahead.errors[3])
    for step in (3, 4):
        assert "step 1 as the last one before that was reduced, rank 1 has gradients" in str(behind.errors[step])
        assert "step 2 as the last one before that was reduced, rank 0 has gradients" in str(ahead.errors[step + 1])
        assert "load a checkpoint on all ranks" in str(behind.errors[step])
    assert behind.right == [True, True, False, False, False, False]
    assert ahead.right == [True, True, True, False, False, False]


PROGRAM = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, folder, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, tests)
from test_ddp_failures import die, train_with
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
outcome = train_with(die, (1,), steps=3)
print(outcome.errors[2])
if sys.argv[4] == "uncaught":
    raise RuntimeError("nobody catches this")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["caught", "uncaught"])
def test_a_process_whose_peer_was_killed_can_exit(how: str, tmp_path: Path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), str(Path(__file__).parent), how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, err = started[0].communicate(timeout=HANG_S)
        assert "rank 0 of 2: " in out, err
        assert started[0].returncode == (1 if how == "uncaught" else 0)
        assert ("nobody catches this" in err) == (how == "uncaught")
        assert started[1].wait(timeout=HANG_S) == -signal.SIGKILL
    finally:
        for process in started:
            process.kill()
            process.communicate()
