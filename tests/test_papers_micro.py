"""What the study of MiCRO's and ExDyna's claims computes from counts, without its trainings."""

from sparsync import Bucket, schemes
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.schemes.exdyna import BlockLoads
from sparsync_lab.traffic.stream import Synthetic
from studies.papers.thresholds import STRETCH, Course, followed, step_ms


def test_a_union_has_settled_where_it_stays_close_to_its_target_for_a_stretch():
    course = Course(100, 1000, [400, 300, 100, *[104] * STRETCH, 20], [[3, 1]] * (STRETCH + 4))
    assert course.settled_after() == 2
    assert (course.worst(), course.ratio(3, 3 + STRETCH), course.imbalance()) == (0.2, 1.04, 1.5)
    assert Course(100, 1000, [100] * (STRETCH - 1), []).settled_after() is None


def test_after_a_jump_each_factor_continues_from_the_same_state():
    courses = followed(("exact_micro", "micro"), Synthetic(2, 2000), 2, (1.0, 10.0), 1)
    unions = {name: course["union"] for name, course in courses.items()}
    assert unions["exact_micro"] == [20, 20]
    assert unions["exact_micro x1"] == unions["exact_micro x10"] == [20]
    assert unions["micro x1"] == followed(("micro",), Synthetic(2, 2000), 3)["micro"]["union"][2:]
    assert unions["micro x10"][0] > unions["micro x1"][0]


def test_the_blocks_of_exdyna_follow_from_its_counts():
    P, n, steps = 4, 40_000, 12
    stream = Synthetic(P, n)
    states = [schemes.ExDyna().start() for _ in range(P)]
    used = list[list[int]]()
    for step in range(steps):
        buckets = [Bucket("traffic", gradient, step, stream.layout) for gradient in stream.gradients(step)]

        def body(comm: LocalComm, buckets: list[Bucket] = buckets) -> None:
            states[comm.rank].reduce(buckets[comm.rank], comm)

        LocalWorld(P).run(body)
        used.append(states[0].shared_state("blocks", BlockLoads, buckets[0], P).blocks)
    course = Course(**followed(("exdyna",), stream, steps)["exdyna"])
    assert used == course.blocks()
    assert course.moved_blocks(0, steps) > 0


def test_an_uneven_selection_lengthens_the_predicted_step():
    even, uneven = (step_ms("micro-lstm-16", "micro", 8, imbalance) for imbalance in (1.0, 2.0))
    assert even < uneven
