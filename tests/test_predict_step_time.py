"""Step times on cases worked out by hand."""

import pytest

from sparsync_lab.predict.exchanges import Exchange, Plan
from sparsync_lab.predict.network import Link, flat_switch
from sparsync_lab.predict.probe_file import Backward, ReadyBucket
from sparsync_lab.predict.step_time import Ranks, even_backward, overlapped, periodic, serial


def ready_at(*seconds: float, end_s: float, optimizer_s: float = 0.0) -> Backward:
    """Return a backward pass that begins at once; a bucket is ready at each of these times."""
    return Backward("", 0.0, end_s, optimizer_s, tuple(ReadyBucket(1, each) for each in seconds))


ONE_SECOND = ready_at(end_s=1)


def test_reductions_that_keep_up_cost_only_the_last_one():
    step = overlapped(ready_at(2, 3, 4, end_s=4, optimizer_s=1), [0.5, 0.5, 0.5])
    assert (step.step_s, step.compute_s, step.exposed_s) == (5.5, 5, 0.5)
    assert step.hidden == 1 - 0.5 / 1.5


def test_reductions_that_do_not_keep_up_queue():
    step = overlapped(ready_at(2, 3, 4, end_s=4), [2, 2, 2])
    assert (step.step_s, step.exposed_s, step.hidden) == (8, 4, 1 - 4 / 6)


def test_buckets_are_reduced_in_the_order_in_which_they_become_ready():
    """Bucket 0 is ready last: two are reduced before it, where in their own order none would be, until 7."""
    assert overlapped(ready_at(4, 2, 3, end_s=4), [1, 1, 1]).step_s == 5


def test_a_reduction_that_takes_half_the_processor_delays_what_comes_after():
    """At 2 the first reduction begins; at 4 it ends, and the backward pass has done 3 of its 4; the second bucket is ready at 5."""
    assert overlapped(ready_at(2, 4, end_s=4), [2, 1], steals=0.5).step_s == 6


def test_with_one_processor_for_both_nothing_is_hidden():
    step = overlapped(ready_at(1, 2, end_s=3), [1, 1], steals=1.0)
    assert (step.step_s, step.hidden) == (5, 0)


def test_a_bucket_that_is_ready_after_the_backward_pass_lengthens_it():
    assert overlapped(ready_at(1, 4, end_s=3), [0, 0]).step_s == 4


def test_serial_reductions_add_up():
    assert serial(ready_at(1, 2, end_s=3, optimizer_s=0.5), [1, 2]).step_s == 6.5
    assert serial(ready_at(1, 2, end_s=3), [1, 2]).hidden == 0


def test_no_bucket_costs_nothing():
    step = overlapped(ready_at(end_s=3), [])
    assert (step.step_s, step.hidden) == (3, 1)


def test_even_buckets_end_with_the_backward_pass():
    assert [each.ready_s for each in even_backward([1] * 4, 1, 2).bucket] == [0.5, 1, 1.5, 2]
    assert [each.ready_s for each in even_backward([1, 3], 1, 2).bucket] == [0.5, 2]


def test_steps_that_exchange_now_and_then():
    assert periodic(ONE_SECOND, every=10, exchange_s=5).step_s == 1.5
    # Two fragments of 2.5 s each, one every 5 steps, of which 2 go on meanwhile: 0.5 s seen in 5 steps.
    assert periodic(ONE_SECOND, every=10, exchange_s=5, fragments=2, delay=2).step_s == 1.1
    assert periodic(ONE_SECOND, every=10, exchange_s=5, fragments=2, delay=3).step_s == 1
    # Five fragments of 10 s each, one every 2 steps: whatever the delay, each waits for the one before, and a step takes 5 s.
    delays = (2, 3, 10)
    found = [periodic(ONE_SECOND, every=10, exchange_s=50, fragments=5, delay=delay).step_s for delay in delays]
    assert found == [5, 5, 5]


def test_a_reduction_is_its_exchanges_its_announcement_and_its_work():
    network = flat_switch(Link(8.0, latency_s=1.0))  # a byte a second
    made = Plan((Exchange("all_gather", 4, 1, 1, 4), Exchange("all_to_all", 2, 1, 1, 2)), passes=10)
    announced = Plan(made.exchanges, made.passes, beside=(Exchange("all_gather", 32, 1, 1, 32),))
    ranks = Ranks(2, network, lambda plan: plan.passes / 5, announce_s=0.5)
    assert (ranks.seconds(made), ranks.seconds(announced)) == (5 + 3 + 2, 5 + 3 + 2 + 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlapped(ready_at(1, end_s=3), [1, 2]), "longer"),
        (lambda: overlapped(ready_at(1, end_s=3), [1], steals=2), r"in \[0, 1\], got 2"),
        (lambda: periodic(ONE_SECOND, every=0, exchange_s=1), "at least 1, got 0 and 1"),
        (lambda: periodic(ONE_SECOND, every=10, exchange_s=1, fragments=5, delay=11), r"in \[0, 10\].*got 11"),
    ],
)
def test_steps_that_cannot_be_say_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()
