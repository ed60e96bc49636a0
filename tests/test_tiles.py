"""Tiles, the cosine transform of them, values as means of bins; what SparseLoCo and DeMo make of them beyond the invariants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsync.base.error_feedback import ErrorFeedbackScheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Bucket, Report, laid_out
from sparsync.schemes.demo import DeMo, transformed
from sparsync.schemes.sparse_loco import SparseLoCo
from sparsync.selection.tiles import tiles_of
from sparsync.wire import indices
from sparsync.wire.bin_means import BinMeans

LAYOUT = laid_out([("w", (100, 130)), ("none", 0), ("b", (70,)), ("conv", (4, 2, 3, 3)), ("flat", 4096), ("scalar", 1)])
N = LAYOUT[-1].span.stop


def numbers(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def reduced(schemes: list[ErrorFeedbackScheme], grads: list[Tensor], step: int = 0) -> list[tuple[Tensor, Report]]:
    def body(comm: LocalComm) -> tuple[Tensor, Report]:
        bucket = Bucket("bucket0", grads[comm.rank].clone(), step, LAYOUT)
        return bucket.grad, schemes[comm.rank].reduce(bucket, comm)

    return LocalWorld(len(schemes)).run(body)


def residual(scheme: ErrorFeedbackScheme) -> Tensor:
    return torch.cat(list(scheme.state_dict()["residual"].values()))


def test_tiles_hold_every_element_once_and_know_its_place() -> None:
    tiles, x = tiles_of(LAYOUT), torch.arange(1.0, N + 1)
    cut = tiles.take(x)
    assert cut.shape == (6 + 2 + 1 + 1 + 1, 64, 64)
    assert torch.equal(cut.flatten()[cut.flatten() > 0].sort().values, x)
    back = torch.zeros(N)
    tiles.put_(back, cut)
    assert torch.equal(back, x)
    place, inside = tiles.places(torch.arange(cut.numel()))
    assert torch.equal(inside, cut.flatten() > 0)
    assert torch.equal(place[inside].float() + 1, cut.flatten()[inside])


def test_a_tile_of_a_matrix_is_64_of_its_rows_and_columns() -> None:
    x = numbers(0)
    assert torch.equal(tiles_of(LAYOUT).take(x)[1], x[: 100 * 130].view(100, 130)[:64, 64:128])


@pytest.mark.parametrize("density", [1e-9, 1 / 64, 0.1, 1.0])
def test_each_tile_gives_its_share_of_largest_elements(density: float) -> None:
    tiles, x = tiles_of(LAYOUT), numbers(0)
    cut = tiles.take(x)
    index = tiles.largest(cut, density)
    assert index.tolist() == sorted(set(index.tolist()))
    counts = torch.bincount(index // 4096, minlength=tiles.count)
    wanted = [max(1, math.ceil(density * size - 1e-9)) for size in (tiles.rows * tiles.columns).tolist()]
    assert counts.tolist() == wanted == tiles.counts(density).tolist()
    assert sum(tiles.parameter_counts(density)) == sum(wanted)
    for tile, count in zip(cut.view(-1, 4096), wanted, strict=True):
        assert tile.abs().topk(count).values.min() >= tile.abs().sort(descending=True).values[count - 1]


def test_the_transform_is_orthonormal_and_zero_beyond_the_edges() -> None:
    tiles, x = tiles_of(LAYOUT), numbers(0).double()
    cut = tiles.take(x)
    components = transformed(cut, tiles)
    torch.testing.assert_close(transformed(components, tiles, inverse=True), cut)
    torch.testing.assert_close(components.square().sum(), x.square().sum())
    beyond = torch.ones_like(cut, dtype=torch.bool)
    _, inside = tiles.places(torch.arange(cut.numel()))
    assert not components[beyond & ~inside.view_as(cut)].any()


def test_a_plane_wave_is_one_component_of_its_tile() -> None:
    place = torch.arange(64, dtype=torch.float64) + 0.5
    wave = torch.outer(torch.cos(math.pi / 64 * place * 5), torch.cos(math.pi / 64 * place * 9))
    components = transformed(wave[None], tiles_of(laid_out([("w", (64, 64))])))[0]
    assert components.abs().argmax() == 5 * 64 + 9
    assert components[5, 9] == pytest.approx(32.0)
    assert int((components.abs() > 1e-9).sum()) == 1


def test_values_are_the_means_of_their_bins() -> None:
    codec = BinMeans((6, 3))
    value = torch.tensor([-5.0, -3.0, -4.0, 3.0, 5.0, 4.0, 7.0, 7.0, 7.0])
    packet = codec.encode(value)
    assert packet.numel() == codec.nbytes(9, torch.float32) == 2 * 16 + 3
    assert codec.decode(packet, 9, torch.float32).tolist() == [-4.0] * 3 + [4.0] * 3 + [7.0] * 3


def test_nan_makes_its_group_nan_and_no_other() -> None:
    codec = BinMeans((2, 2))
    decoded = codec.decode(codec.encode(torch.tensor([1.0, torch.inf, 2.0, 3.0])), 4, torch.float32)
    assert decoded.isnan().tolist() == [True, True, False, False]


def test_a_packet_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="sender and receiver must agree on the layout"):
        BinMeans((4,)).decode(torch.zeros(3, dtype=torch.uint8), 4, torch.float32)


def test_sparse_loco_sends_positions_two_bits_a_value_and_four_means_a_parameter() -> None:
    P, tiles = 3, tiles_of(LAYOUT)
    schemes: list[ErrorFeedbackScheme] = [SparseLoCo() for _ in range(P)]
    _, report = reduced(schemes, [numbers(rank) for rank in range(P)])[0]
    counts = tiles.parameter_counts(1 / 64)
    k = sum(counts)
    assert report.selected == k
    packet = indices.fixed_length_nbytes(k, tiles.count * 4096) + 16 * len(counts) + -(-k // 4)
    assert report.cost == all_gather_cost(packet, P)


def by_senders(grads: list[Tensor], density: float) -> Tensor:
    """Return the sum at each position of tiles of what ranks select, over the number of ranks that select it."""
    tiles = tiles_of(LAYOUT)
    total, senders = torch.zeros(2, tiles.count * 4096)
    for cut in grads:
        index = tiles.largest(cut, density)
        total[index] += cut.flatten()[index]
        senders[index] += 1
    return (total / senders.clamp(min=1)).view(-1, 64, 64)


def test_the_mean_is_over_the_ranks_that_sent() -> None:
    tiles, grads, mean = tiles_of(LAYOUT), [numbers(rank) for rank in range(4)], torch.zeros(N)
    cuts = [tiles.take(grad) for grad in grads]
    tiles.put_(mean, by_senders(cuts, 0.1))
    schemes: list[ErrorFeedbackScheme] = [SparseLoCo(0.1, values="float32") for _ in grads]
    torch.testing.assert_close(reduced(schemes, grads)[0][0], mean)
    components = by_senders([transformed(cut, tiles) for cut in cuts], 0.1)
    tiles.put_(mean, transformed(components, tiles, inverse=True))
    schemes = [DeMo(0.1, sign=False) for _ in grads]
    torch.testing.assert_close(reduced(schemes, grads)[0][0], mean)


def test_demo_writes_signs() -> None:
    schemes: list[ErrorFeedbackScheme] = [DeMo(density=0.1) for _ in range(2)]
    written, _ = reduced(schemes, [numbers(rank) for rank in range(2)])[0]
    assert set(written.unique().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("make", [SparseLoCo, DeMo])
def test_a_rollback_returns_to_each_rank_what_it_sent(make: type) -> None:
    P = 3
    schemes = [make() for _ in range(P)]
    grads = [numbers(rank) for rank in range(P)]
    reduced(schemes, grads)
    before = [residual(each) for each in schemes]
    written = reduced(schemes, grads, 1)[0][0]
    for rank, scheme in enumerate(schemes):
        scheme.rollback(Bucket("bucket0", written, 1, LAYOUT))
        torch.testing.assert_close(residual(scheme), scheme.decay * before[rank] + grads[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (SparseLoCo, {"density": 0.0}, r"density must be in \(0, 1\]"),
        (SparseLoCo, {"decay": 2.0}, r"decay must be in \[0, 1\]"),
        (SparseLoCo, {"values": "int2"}, "values must be one of bins, float32"),
        (SparseLoCo, {"divide_by": "all"}, "divide_by must be one of contributors, ranks, got 'all'"),
        (DeMo, {"values": "bins"}, "values must be one of float32"),
        (DeMo, {"divide_by": "all"}, "divide_by must be one of contributors, ranks, got 'all'"),
    ],
)
def test_wrong_settings_are_refused(make: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)
