"""Published schemes to compare with: what their papers promise, and what they refuse. Invariants are in tests/invariants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.distributed import run as run_processes
from invariants.world import COUNT, integers, layout, reals, run, same_bits
from sparsync import Bucket, GroupComm, LocalWorld, MeteredComm, schemes
from sparsync.core import ParameterSpan, Report, Span, Sparse
from sparsync.schemes.topk_allgather import TopK
from sparsync.wire import Elements, Raw
from sparsync_lab.rivals.cltk import CLTk
from sparsync_lab.rivals.deft import DEFT, packed, pieces_of, shares
from sparsync_lab.rivals.gaussiank import GaussianK
from sparsync_lab.rivals.gtopk import GTopK
from sparsync_lab.rivals.hard_threshold import HardThreshold
from sparsync_lab.rivals.sidco import SIDCo, Stages, estimate
from sparsync_lab.rivals.spar_reduce_scatter import bruck_all_gather
from sparsync_lab.rivals.spardl import SparDL
from sparsync_lab.rivals.topk_dsa import TopKDSA
from sparsync_lab.rivals.topk_union import TopKUnion
from sparsync_lab.rivals.tree_top_k import cut, rounds, tree_top_k

NAMES = ("topk_union", "hard_threshold", "gaussiank", "sidco", "cltk", "gtopk", "deft", "topk_dsa", "spardl")


def drawn(distribution: torch.distributions.Distribution, n: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return distribution.sample((n,))


@pytest.mark.parametrize(
    ("make", "config", "told"),
    [
        (HardThreshold, {"threshold": -1.0}, "threshold must be a finite magnitude, 0 or more, got -1.0"),
        (HardThreshold, {"threshold": math.nan}, "threshold must be a finite magnitude, 0 or more, got nan"),
        (
            SIDCo,
            {"distribution": "normal"},
            "distribution must be one of exponential, pareto, gamma_pareto, got 'normal'",
        ),
        (SIDCo, {"stages": 0}, "stages must be at least 1, or None to adapt them, got 0"),
        (CLTk, {"low_pass": 0.0}, r"low_pass must be in \(0, 1\], .*, got 0.0"),
        (TopKDSA, {"dense_from": 1.5}, r"dense_from must be in \[0, 1\], .*, got 1.5"),
        *[(schemes.get, {"name": name, "density": 0.0}, r"density must be in \(0, 1\]") for name in NAMES],
        *[(schemes.get, {"name": name, "values": "int5"}, "values must be one of .*, got 'int5'") for name in NAMES],
    ],
)
def test_a_bad_setting_names_the_value_and_what_is_allowed(make: Any, config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(**config)


@pytest.mark.slow
@pytest.mark.distributed
def test_on_gloo_they_write_and_send_the_same_as_in_one_process() -> None:
    P = 3
    grads = reals(P, COUNT, 2)
    local = {name: run([schemes.get(name, density=0.1) for _ in range(P)], grads) for name in NAMES}
    for rank, found in enumerate(run_processes(reduced_on_gloo, P, grads=grads)):
        for name, (written, reports) in found.items():
            for step in range(2):
                # All but the sums of gloo's own all_reduce, which adds in another order.
                torch.testing.assert_close(written[step], local[name][step].written[rank])
                assert reports[step].sent == reports[step].cost == local[name][step].reports[rank].cost


def reduced_on_gloo(grads: list[list[Tensor]]) -> dict[str, tuple[list[Tensor], list[Report]]]:
    comm, found = MeteredComm(GroupComm()), {}
    for name in NAMES:
        scheme, written, reports = schemes.get(name, density=0.1), [], []
        for step, ranks in enumerate(grads):
            bucket = Bucket("bucket0", ranks[comm.rank].clone(), step, layout(COUNT))
            report = scheme.reduce(bucket, comm)
            written.append(bucket.grad)
            reports.append(Report(**{**vars(report), "sent": comm.take()[0]}))
        found[name] = written, reports
    return found


# ---- top-k with a union all-reduce, and TopkDSA


def test_the_union_is_the_dense_mean_and_leaves_no_residual() -> None:
    P = 4
    step = run([TopKUnion(0.1) for _ in range(P)], integers(P, COUNT, 1))[0]
    written = step.written[0]
    at = written != 0
    dense = torch.stack(step.grads).sum(0) / P
    assert 9 <= step.reports[0].union <= 9 * P
    assert torch.equal(written[at], dense[at])
    assert not any(residual[at].any() for residual in step.residuals)


@pytest.mark.parametrize("dense_from", [None, 0.0, 1 / 3])
def test_dsa_writes_what_topk_writes(dense_from: float | None) -> None:
    P, grads = 4, integers(4, COUNT, 3)
    expected = run([TopK(0.1) for _ in range(P)], grads)
    for step, topk in zip(run([TopKDSA(0.1, dense_from) for _ in range(P)], grads), expected, strict=True):
        assert torch.equal(step.written[0], topk.written[0])
        assert all(map(same_bits, step.residuals, topk.residuals))
        assert step.reports[0].details["dense"] == (dense_from == 0 or bool(dense_from and step.reports[0].union > 32))


def test_dsa_turns_dense_where_that_is_shorter() -> None:
    dense = [run([TopKDSA(density)] * 1, reals(1, 1000, 1))[0].reports[0].details["dense"] for density in (0.5, 1.0)]
    assert dense == [False, True]


def test_dsa_sends_less_than_topk_where_ranks_agree() -> None:
    P, n = 8, 4000
    same = [reals(1, n, 1)[0] * P]
    sent = [
        max(report.cost.nbytes for report in run([make(0.05) for _ in range(P)], same)[0].reports)
        for make in (TopK, TopKDSA)
    ]
    assert sent[1] < 0.5 * sent[0]


# ---- thresholds


def test_a_hard_threshold_sends_what_reaches_it_and_keeps_the_rest() -> None:
    grad = torch.tensor([3.0, -4.0, 0.0, 5.0, -2.9])
    step = run([HardThreshold(threshold=3.0)], [[grad]])[0]
    assert step.written[0].tolist() == [3.0, -4.0, 0.0, 5.0, 0.0]
    assert step.residuals[0].tolist() == [0.0, 0.0, 0.0, 0.0, grad[4].item()]


def test_a_derived_hard_threshold_is_that_of_the_authors_code() -> None:
    report = run([HardThreshold(0.25)], reals(1, 400, 1))[0].reports[0]
    assert report.details["threshold"] == 1 / (2 * math.sqrt(100))


def test_gaussiank_selects_about_k_of_normal_numbers() -> None:
    n = 50_000
    for density in (0.1, 0.01, 0.001):
        report = run([GaussianK(density)], [[drawn(torch.distributions.Normal(0.0, 3.0), n)]])[0].reports[0]
        assert abs(report.selected / (density * n) - 1) < 0.25


def test_gaussiank_corrects_its_threshold_into_the_band() -> None:
    n = 50_000
    report = run([GaussianK(0.01)], [[drawn(torch.distributions.Uniform(-1.0, 1.0), n)]])[0].reports[0]
    assert float(report.details["threshold"]) < 1.0  # no number reaches the normal one, m + z s = 1.49
    assert report.selected > 0


@pytest.mark.parametrize(
    ("distribution", "drawn_from", "stages"),
    [
        ("exponential", torch.distributions.Laplace(0.0, 1.0), 1),
        ("exponential", torch.distributions.Laplace(0.0, 1e30), 3),
        ("pareto", torch.distributions.StudentT(3.0), 3),
        ("gamma_pareto", torch.distributions.StudentT(3.0), 3),
        ("gamma_pareto", torch.distributions.Laplace(0.0, 1e-30), 1),
    ],
)
def test_sidco_finds_the_share_of_a_distribution_of_its_kind(distribution: Any, drawn_from: Any, stages: int) -> None:
    n, density = 200_000, 0.001
    size = drawn(drawn_from, n).abs()
    found = int((size >= estimate(size, density, stages, distribution)).sum())
    assert abs(found / (density * n) - 1) < 0.25


@pytest.mark.parametrize("distribution", ["exponential", "pareto", "gamma_pareto"])
def test_sidco_takes_numbers_that_fit_no_distribution(distribution: Any) -> None:
    for size in (torch.zeros(5), torch.ones(5), torch.ones(1), torch.tensor([0.0, 0.0, 1.0])):
        for stages in (1, 2, 5):
            assert 0 <= estimate(size, 0.1, stages, distribution) < math.inf


def test_the_stages_of_sidco_change_until_selections_are_as_asked() -> None:
    stages = Stages()
    for _ in range(5):
        stages.accept(60, k=100, most=7)  # too few: one stage more
    assert stages.count == 2
    for _ in range(5):
        stages.accept(130, k=100, most=7)  # too many, but nearer: one stage less
    assert stages.count == 1
    for _ in range(5):
        stages.accept(110, k=100, most=7)  # near enough
    assert stages.count == 1
    for _ in range(5):
        stages.accept(200, k=100, most=7)  # farther than before: the other way round
    assert stages.count == 2


def test_sidco_adapts_its_stages_while_it_runs() -> None:
    source = torch.Generator().manual_seed(0)
    grads = [[torch.randn(20_000, generator=source)] for _ in range(60)]
    reports = [step.reports[0] for step in run([SIDCo(0.001)], grads)]
    assert reports[0].details["stages"] == 1
    assert reports[0].selected < 5  # one exponential stage finds next to nothing of normal numbers
    assert 10 <= sum(report.selected for report in reports[-20:]) / 20 <= 40


# ---- CLT-k


def test_the_leader_of_cltk_takes_turns_and_chooses_for_all() -> None:
    P, k = 3, 9
    steps = run([CLTk(0.1) for _ in range(P)], reals(P, COUNT, 4))
    assert [step.reports[1].details["leader"] for step in steps] == [0, 1, 2, 0]
    chosen = steps[0].grads[0].abs().topk(k).indices.sort().values
    assert torch.equal(steps[0].written[2].nonzero().view(-1), chosen)
    assert not any(residual[chosen].any() for residual in steps[0].residuals)
    nbytes = [report.cost.nbytes for report in steps[0].reports]
    assert nbytes[0] > nbytes[1]  # the leader sends the positions, too


def test_the_low_pass_filter_takes_up_a_share_of_what_was_not_sent() -> None:
    P, beta = 2, 0.25
    grads = integers(P, COUNT, 2, unit=8)
    plain = [CLTk(0.1, low_pass=beta) for _ in range(P)]
    first, second = run(plain, grads)
    for rank in range(P):
        before = torch.zeros(COUNT)
        for step, leader in ((first, 0), (second, 1)):
            leading = step.grads[leader] + (first.residuals[leader] if step is second else 0)
            sent = leading.abs().sort(descending=True, stable=True).indices[:9]
            mask = torch.zeros(COUNT).index_fill_(0, sent, 1.0)
            m, g = before, step.grads[rank]
            expected = (1 - beta) * m + beta * (m + g) * (1 - mask)
            assert torch.equal(step.residuals[rank], expected)
            before = step.residuals[rank]


# ---- gTop-k and SparDL


def test_gtopk_of_two_ranks_is_the_top_k_of_the_sum_of_their_selections() -> None:
    P, k = 2, 9
    grads = reals(P, COUNT, 1)
    step = run([GTopK(0.1) for _ in range(P)], grads)[0]
    total = torch.zeros(COUNT)
    for grad in grads[0]:
        own = grad.abs().topk(k).indices
        total[own] += grad[own]
    kept = total.abs().topk(k).indices
    expected = torch.zeros(COUNT).index_copy_(0, kept, total[kept] / P)
    assert torch.equal(step.written[0], expected)


def test_what_a_merge_drops_of_a_survivor_is_in_a_residual() -> None:
    """Ranks 2 and 3 drop position 0 when they merge, which ranks 0 and 1 keep."""
    grads = [torch.zeros(8) for _ in range(4)]
    grads[0][0], grads[1][1] = 100.0, 1.0
    grads[2][0], grads[3][2] = 4.0, 8.0
    step = run([GTopK(0.125) for _ in range(4)], [grads])[0]
    assert step.written[0].tolist() == [25.0, *[0.0] * 7]
    assert [residual[0].item() for residual in step.residuals] == [0.0, 0.0, 4.0, 0.0]
    assert step.residuals[3][2] == 8.0


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 7, 8, 16])
def test_logarithmic_schemes_take_logarithmically_many_rounds_and_write_k_elements(P: int) -> None:
    n, k = 4096, 64
    for make in (GTopK, SparDL):
        for step in run([make(k / n) for _ in range(P)], reals(P, n, 2)):
            assert step.reports[0].union == k
            assert {report.cost.steps for report in step.reports} == {2 * rounds(P)}


def test_a_rank_of_gtopk_sends_once_up_and_to_each_child() -> None:
    P, n, k = 8, 4096, 64

    def body(comm: Any) -> tuple[int, int]:  # Any: a LocalComm
        own = Sparse(torch.arange(k, dtype=torch.int32), torch.ones(k), n)
        metered = MeteredComm(comm)
        tree_top_k(own, metered, Raw())
        return metered.sent.messages, metered.sent.nbytes

    sent = LocalWorld(P).run(body)
    assert [messages for messages, _ in sent] == [3, 1, 2, 1, 3, 1, 2, 1]
    assert all(nbytes == messages * 8 * k for messages, nbytes in sent)


def test_spardl_sends_no_more_than_its_bound() -> None:
    n, k = 65536, 1024
    for P in (2, 4, 5, 8, 16):
        for report in run([SparDL(k / n) for _ in range(P)], reals(P, n, 1))[0].reports:
            assert (
                report.cost.nbytes <= 4 * 4 * k * (P - 1) / P + 8 * P
            )  # words of 4 bytes; blocks differ by an element


def test_blocks_of_spardl_take_turns_where_there_are_fewer_elements_than_ranks() -> None:
    P, n = 4, 8
    grads = [[torch.full((n,), 4.0)] * P] + [[torch.zeros(n)] * P] * (n - 1)
    written = [step.written[0].nonzero().view(-1).tolist() for step in run([SparDL(0.01) for _ in range(P)], grads)]
    assert sorted(place for places in written for place in places) == list(range(n))


def test_cutting_keeps_the_largest_and_loses_none() -> None:
    elements = Sparse(torch.tensor([1, 4, 6, 9], dtype=torch.int32), torch.tensor([2.0, -3.0, 2.0, 1.0]), 10)
    kept, others = cut(elements, 2)
    assert (kept.index.tolist(), kept.value.tolist()) == ([1, 4], [2.0, -3.0])
    assert (others.index.tolist(), others.value.tolist()) == ([6, 9], [2.0, 1.0])
    assert [part.index.numel() for part in cut(elements, 5)] == [4, 0]


@pytest.mark.parametrize("P", [1, 2, 3, 5, 6, 8, 11])
def test_brucks_all_gather_brings_packets_of_any_size_to_all(P: int) -> None:
    sizes = [(3 * rank) % 4 for rank in range(P)]

    def body(comm: Any) -> list[list[int]]:  # Any: a LocalComm
        packet = torch.full((sizes[comm.rank],), comm.rank, dtype=torch.uint8)
        return [each.tolist() for each in bruck_all_gather(packet, sizes, comm)]

    expected = [[rank] * size for rank, size in enumerate(sizes)]
    assert LocalWorld(P).run(body) == [expected] * P


# ---- DEFT


def test_the_shares_of_deft_follow_norms_and_are_k_together() -> None:
    assert shares([8.0, 1.0, 1.0], [1000, 1000, 10], 100) == [80, 10, 10]
    assert shares([8.0, 1.0, 1.0], [20, 1000, 1000], 100) == [20, 40, 40]
    assert shares([1.0, 0.0, 0.0], [100, 5, 5], 3) == [3, 1, 1]  # at least one each
    assert shares([0.0, 0.0], [4, 4], 8) == [4, 4]
    assert shares([5.0, 4.0], [10, 90], 100) == [10, 90]


def test_deft_packs_costly_pieces_first_and_sends_full_ones_whole() -> None:
    assert packed([5, 1, 1, 1], [5, 100, 60, 50], 2) == [2, 0, 1, 1]
    assert packed([4, 1, 1], [100, 150, 60], 2) == [0, 1, 1]  # 100 * log2(4) is the most


def test_deft_cuts_large_tensors_and_leaves_small_ones() -> None:
    layout = (ParameterSpan("a", Span(0, 50)), ParameterSpan("b", Span(50, 60)), ParameterSpan("c", Span(60, 60)))
    assert pieces_of(layout, 2) == [Span(0, 25), Span(25, 50), Span(50, 60)]


@pytest.mark.slow
def test_the_union_of_deft_does_not_grow_with_the_number_of_ranks() -> None:
    n = 4000
    for P in (1, 2, 8, 16):
        report = run(
            [DEFT(0.05) for _ in range(P)], [[grad * torch.linspace(0.1, 3, n) for grad in reals(P, n, 1)[0]]]
        )[0].reports[0]
        assert abs(report.union - 200) <= 20 + 6 * P


def test_every_codec_of_the_tree_has_a_length_that_is_known() -> None:
    """float16 values, whose packets differ in length from the values' own type."""
    P = 3

    def body(comm: Any) -> Tensor:  # Any: a LocalComm
        own = Sparse(torch.tensor([comm.rank, 5], dtype=torch.int32), torch.tensor([3.0, 6.0]), 10)
        return tree_top_k(own, comm, Elements("float16")).mean.value

    values = LocalWorld(P).run(body)
    assert all(torch.equal(value, values[0]) for value in values)
    assert 6.0 in values[0].tolist()
