"""Step times from timelines, on cases worked out by hand."""

import pytest

from sparsync.predict.timeline import Unit, even_buckets, fsdp2, overlapped, periodic, serial


def test_reductions_that_keep_up_cost_only_the_last_one():
    step = overlapped([2, 3, 4], [0.5, 0.5, 0.5], backward_end_s=4, after_s=1)
    assert step.intervals == ((2, 2.5), (3, 3.5), (4, 4.5))
    assert (step.step_s, step.compute_s, step.exposed_s) == (5.5, 5, 0.5)
    assert step.hidden == 1 - 0.5 / 1.5


def test_reductions_that_do_not_keep_up_queue():
    step = overlapped([2, 3, 4], [2, 2, 2], backward_end_s=4)
    assert step.intervals == ((2, 4), (4, 6), (6, 8))
    assert (step.step_s, step.exposed_s, step.hidden) == (8, 4, 1 - 4 / 6)


def test_ddp_keeps_the_order_of_the_buckets_and_ours_that_of_readiness():
    """Bucket 0 is ready last: DDP reduces nothing before, ours two buckets."""
    ready, reduce = [4, 2, 3], [1, 1, 1]
    assert overlapped(ready, reduce, 4, order="index").intervals == ((4, 5), (5, 6), (6, 7))
    assert overlapped(ready, reduce, 4).intervals == ((4, 5), (2, 3), (3, 4))
    assert (overlapped(ready, reduce, 4, order="index").step_s, overlapped(ready, reduce, 4).step_s) == (7, 5)


def test_a_reduction_that_takes_half_the_processor_delays_what_comes_after():
    """At 2 the first reduction begins; at 4 it ends, and the backward pass has done 3 of its 4; the second bucket is ready at 5."""
    step = overlapped([2, 4], [2, 1], backward_end_s=4, steals=0.5)
    assert step.intervals == ((2, 4), (5, 6))
    assert step.step_s == 6


def test_with_one_processor_for_both_nothing_is_hidden():
    step = overlapped([1, 2], [1, 1], backward_end_s=3, steals=1.0)
    assert step.intervals == ((1, 2), (3, 4))
    assert (step.step_s, step.hidden) == (5, 0)


def test_serial_reductions_add_up():
    assert serial([1, 2], backward_end_s=3, after_s=0.5).step_s == 6.5
    assert serial([1, 2], backward_end_s=3).hidden == 0


def test_no_bucket_costs_nothing():
    step = overlapped([], [], backward_end_s=3)
    assert (step.step_s, step.hidden) == (3, 1)


def test_even_buckets_end_with_the_backward_pass():
    assert even_buckets(1, 2, 4) == [1.5, 2, 2.5, 3]


def test_fsdp2_hides_what_is_shorter_than_a_units_work():
    """Gathers of 1 beside forward passes of 2: only the first is seen, and at the end the last reduce-scatter."""
    step = fsdp2([Unit(2, 4, 1, 1)] * 3)
    assert step.intervals == ((0, 1), (1, 2), (3, 4), (7, 8), (11, 12), (12, 13), (15, 16), (19, 20))
    assert (step.step_s, step.compute_s) == (20, 18)


def test_fsdp2_waits_for_gathers_that_are_longer():
    """One unit after the other: gathered at 3 and 6; the second is kept, the first gathered again behind nothing."""
    step = fsdp2([Unit(1, 1, 3, 3)] * 2)
    assert step.intervals == ((0, 3), (3, 6), (7, 10), (10, 13), (13, 16))
    # Forward ends at 7, backward of unit 1 at 8, its gradients wait for the link until 10; unit 0 computes from 10 to 11.
    assert step.step_s == 16


def test_parameters_that_stay_are_not_gathered_again():
    step = fsdp2([Unit(1, 1, 3, 3)] * 2, reshard_after_forward=False)
    assert step.intervals == ((0, 3), (3, 6), (8, 11), (11, 14))
    assert step.step_s == 14


def test_one_unit():
    assert fsdp2([Unit(1, 2, 4, 8)], after_s=1).step_s == 16


def test_steps_that_exchange_now_and_then():
    assert periodic(1, every=10, exchange_s=5) == 1.5
    # Two fragments of 2.5 s each, one every 5 steps, of which 2 go on meanwhile: 0.5 s seen in 5 steps.
    assert periodic(1, every=10, exchange_s=5, fragments=2, delay=2) == 1.1
    assert periodic(1, every=10, exchange_s=5, fragments=2, delay=3) == 1
    # Five fragments of 10 s each, one every 2 steps: whatever the delay, each waits for the one before, and a step takes 5 s.
    assert [periodic(1, every=10, exchange_s=50, fragments=5, delay=delay) for delay in (2, 3, 10)] == [5, 5, 5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: overlapped([1], [1, 2], 3), "got 1 and 2"),
        (lambda: overlapped([4], [1], 3), r"by the end of the backward pass, 3 s, got \[4\]"),
        (lambda: overlapped([1], [-1], 3), "at least 0"),
        (lambda: overlapped([1], [1], 3, steals=2), r"in \[0, 1\], got 2"),
        (lambda: fsdp2([]), "at least 1 unit"),
        (lambda: periodic(1, every=0, exchange_s=1), "at least 1, got 0 and 1"),
        (lambda: periodic(1, every=10, exchange_s=1, fragments=5, delay=11), r"in \[0, 10\].*got 11"),
    ],
)
def test_timelines_that_cannot_be_say_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()
