"""Step times on cases worked out by hand."""

import pytest

from sparsync_lab.predict.exchanges import Exchange, Plan
from sparsync_lab.predict.network import Link, Nodes
from sparsync_lab.predict.probe_file import Backward, ReadyBucket
from sparsync_lab.predict.step_time import Ranks, StepTime, even_backward, overlapped, periodic, serial


def ready_at(*seconds: float, end_s: float, optimizer_s: float = 0.0) -> Backward:
    """Return a backward pass that begins at once; a bucket is ready at each of these times."""
    return Backward("", 0.0, end_s, optimizer_s, tuple(ReadyBucket(1, each) for each in seconds))


ONE_SECOND = ready_at(end_s=1)


@pytest.mark.parametrize(
    ("step", "step_s", "hidden"),
    [
        pytest.param(
            overlapped(ready_at(2, 3, 4, end_s=4, optimizer_s=1), [0.5] * 3), 5.5, 1 - 0.5 / 1.5, id="keeps up"
        ),
        pytest.param(overlapped(ready_at(2, 3, 4, end_s=4), [2, 2, 2]), 8, 1 - 4 / 6, id="queues"),
        # Bucket 0 is ready last: two are reduced before it, while in their own order none would be, until 7.
        pytest.param(overlapped(ready_at(4, 2, 3, end_s=4), [1, 1, 1]), 5, 1 - 1 / 3, id="in order of becoming ready"),
        # At 2 the first reduction begins; at 4 it ends, and the backward pass has done 3 of its 4; the second bucket is ready at 5.
        pytest.param(
            overlapped(ready_at(2, 4, end_s=4), [2, 1], steals=0.5), 6, 1 - 2 / 3, id="takes half the processor"
        ),
        pytest.param(overlapped(ready_at(1, 2, end_s=3), [1, 1], steals=1.0), 5, 0, id="one processor for both"),
        pytest.param(overlapped(ready_at(1, 4, end_s=3), [0, 0]), 4, 1, id="a bucket lengthens the backward pass"),
        pytest.param(serial(ready_at(1, 2, end_s=3, optimizer_s=0.5), [1, 2]), 6.5, 0, id="serial"),
        pytest.param(overlapped(ready_at(end_s=3), []), 3, 1, id="no bucket"),
        pytest.param(periodic(ONE_SECOND, every=10, exchange_s=5), 1.5, 0, id="every ten steps"),
        # Two fragments of 2.5 s each, one every 5 steps, of which 2 go on meanwhile: 0.5 s seen in 5 steps.
        pytest.param(periodic(ONE_SECOND, 10, 5, fragments=2, delay=2), 1.1, 1 - 0.1 / 0.5, id="fragments"),
        pytest.param(periodic(ONE_SECOND, 10, 5, fragments=2, delay=3), 1, 1, id="hidden fragments"),
        # Five fragments of 10 s each, one every 2 steps: whatever the delay, each waits for the one before, and a step takes 5 s.
        *[
            pytest.param(periodic(ONE_SECOND, 10, 50, fragments=5, delay=delay), 5, 1 - 4 / 5, id=f"delay {delay}")
            for delay in (2, 3, 10)
        ],
    ],
)
def test_the_time_of_a_step(step: StepTime, step_s: float, hidden: float) -> None:
    assert step.step_s == step_s
    assert step.hidden == pytest.approx(hidden)


def test_even_buckets_end_with_the_backward_pass() -> None:
    assert [each.ready_s for each in even_backward([1] * 4, 1, 2).bucket] == [0.5, 1, 1.5, 2]
    assert [each.ready_s for each in even_backward([1, 3], 1, 2).bucket] == [0.5, 2]


def test_a_reduction_is_its_exchanges_its_announcement_and_its_work() -> None:
    network = Nodes(Link(8.0, latency_s=1.0))  # a byte a second
    made = Plan((Exchange("all_gather", 4, 1, 1, 4), Exchange("all_to_all", 2, 1, 1, 2)), passes=10)
    announced = Plan(made.exchanges, made.passes, beside=(Exchange("all_gather", 32, 1, 1, 32),))
    ranks = Ranks(2, network, lambda plan: plan.passes / 5, announce_s=0.5)
    assert (ranks.seconds(made), ranks.seconds(announced)) == (5 + 3 + 2, 5 + 3 + 2 + 0.5)
