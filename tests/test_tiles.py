"""Tiles, the cosine transform of them, values as means of bins; what SparseLoCo and DeMo make of them beyond the invariants."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Bucket, Report, laid_out
from sparsync.testing.world import flat_residual, run, started
from sparsync.wire import fixed_length_nbytes
from sparsync_lab.rivals.demo import DeMo, transformed
from sparsync_lab.rivals.sparse_loco import BinMeans, SparseLoCo
from sparsync_lab.rivals.tiles import selected_in_tiles, tiles_of

LAYOUT = laid_out([("w", (100, 130)), ("none", 0), ("b", (70,)), ("conv", (4, 2, 3, 3)), ("flat", 4096), ("scalar", 1)])
N = LAYOUT[-1].span.stop


def numbers(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_tiles_hold_every_element_once_and_know_its_place() -> None:
    tiles, x = tiles_of(LAYOUT), torch.arange(1.0, N + 1)
    cut = tiles.take(x)
    assert torch.equal(cut.sort().values, x)
    back = torch.zeros(N)
    tiles.put_(back, cut)
    assert torch.equal(back, x)
    assert torch.equal(tiles.places(torch.arange(N)) + 1.0, cut)


def test_the_sides_of_a_tile_are_the_largest_divisors_up_to_64_of_those_of_its_matrix() -> None:
    x = torch.arange(float(N))
    matrix, cut = x[: 100 * 130].view(100, 130), tiles_of(LAYOUT).take(x)
    assert torch.equal(cut[: 2 * 50 * 26], torch.cat([matrix[:50, :26].flatten(), matrix[:50, 26:52].flatten()]))
    sides = [group.side for group in tiles_of(LAYOUT).groups]
    assert sides == [(50, 26), (1, 35), (4, 18), (64, 64), (1, 1)]
    assert [group.side for group in tiles_of(laid_out([("flat", 4096 + 130)])).groups] == [(64, 64), (2, 64), (1, 2)]


# Of the authors' programs: chunks whose sides are the largest divisors up to 64, and min(32, chunk) or min(64, chunk) elements of each.
COUNTS = {
    (128, 192): (2 * 3 * 32, 2 * 3 * 64),
    (100, 130): (2 * 5 * 32, 2 * 5 * 64),  # 50 x 26
    (96, 48): (2 * 32, 2 * 64),  # 48 x 48
    (67, 64): (67 * 32, 67 * 64),  # rows, as 67 is prime
    (4, 4): (16, 16),
    (128,): (2 * 32, 128),
    (70,): (2 * 32, 70),
    (67,): (67, 67),
    (20,): (20, 20),
    (1,): (1, 1),
}


@pytest.mark.parametrize("shape", COUNTS)
def test_ranks_send_as_many_elements_of_each_tensor_as_the_authors_programs(shape: tuple[int, ...]) -> None:
    layout, n = laid_out([("w", shape)]), math.prod(shape)
    for make, wanted in zip((DeMo, SparseLoCo), COUNTS[shape], strict=True):

        def body(comm: LocalComm, make: Any = make) -> Report:
            return make().start().reduce(Bucket("b", numbers(comm.rank, n), 0, layout), comm)

        for report in LocalWorld(2).run(body):
            values = 4 * wanted if make is DeMo else 16 + -(-wanted // 4)
            assert report.selected == wanted
            assert report.cost == all_gather_cost(fixed_length_nbytes(wanted, n) + values, 2)


@pytest.mark.parametrize("per_tile", [1, 100, 4096])
def test_each_tile_gives_its_largest_elements_or_all(per_tile: int) -> None:
    tiles, x = tiles_of(LAYOUT), numbers(0)
    cut = tiles.take(x)
    index = tiles.largest(cut, per_tile)
    assert index.tolist() == sorted(set(index.tolist()))
    found = torch.zeros(N, dtype=torch.bool).index_fill_(0, index, True)
    for group in tiles.groups:
        for tile, taken in zip(group.of(cut).flatten(1), group.of(found).flatten(1), strict=True):
            assert int(taken.sum()) == min(per_tile, group.size)
            assert tile[~taken].abs().max() <= tile[taken].abs().min() if per_tile < group.size else taken.all()
    assert sum(selected_in_tiles(LAYOUT, per_tile)) == index.numel()


def test_a_plane_wave_is_one_component_of_its_tile() -> None:
    place = torch.arange(64, dtype=torch.float64) + 0.5
    wave = torch.outer(torch.cos(math.pi / 64 * place * 5), torch.cos(math.pi / 64 * place * 9))
    components = transformed(wave.flatten(), tiles_of(laid_out([("w", (64, 64))]))).view(64, 64)
    assert components.abs().argmax() == 5 * 64 + 9
    assert components[5, 9] == pytest.approx(32.0)
    assert int((components.abs() > 1e-9).sum()) == 1


def test_values_are_the_means_of_their_bins() -> None:
    codec = BinMeans((6, 3))
    value = torch.tensor([-5.0, -3.0, -4.0, 3.0, 5.0, 4.0, 7.0, 7.0, 7.0])
    packet = codec.encode(value)
    assert packet.numel() == codec.nbytes(9, torch.float32) == 2 * 16 + 3
    assert codec.decode(packet, 9, torch.float32).tolist() == [-4.0] * 3 + [4.0] * 3 + [7.0] * 3


def by_senders(cuts: list[Tensor], per_tile: int) -> Tensor:
    """Return the sum at each position of tiles of what ranks select, over the number of ranks that select it."""
    total, senders = torch.zeros(2, N)
    for cut in cuts:
        index = tiles_of(LAYOUT).largest(cut, per_tile)
        total[index] += cut[index]
        senders[index] += 1
    return total / senders.clamp(min=1)


def test_the_mean_is_over_the_ranks_that_sent() -> None:
    tiles, grads, mean = tiles_of(LAYOUT), [numbers(rank) for rank in range(4)], torch.zeros(N)
    cuts = [tiles.take(grad) for grad in grads]
    tiles.put_(mean, by_senders(cuts, 9))
    schemes = started(SparseLoCo(9, values="float32"), 4)
    torch.testing.assert_close(run(schemes, [grads], parameters=LAYOUT)[0].written[0], mean)
    components = by_senders([transformed(cut, tiles) for cut in cuts], 9)
    tiles.put_(mean, transformed(components, tiles, inverse=True))
    schemes = started(DeMo(9, sign=False), 4)
    torch.testing.assert_close(run(schemes, [grads], parameters=LAYOUT)[0].written[0], mean)


@pytest.mark.parametrize("make", [SparseLoCo, DeMo])
def test_a_rollback_returns_to_each_rank_what_it_sent(make: type) -> None:
    P = 3
    schemes, grads = started(make(), P), [numbers(rank) for rank in range(P)]
    first, second = run(schemes, [grads, grads], parameters=LAYOUT)
    for scheme, before, grad in zip(schemes, first.residuals, grads, strict=True):
        scheme.rollback(Bucket("bucket0", second.written[0], 1, LAYOUT))
        found = flat_residual(scheme, LAYOUT, grad)
        torch.testing.assert_close(found, scheme.decay * before + grad, rtol=1e-4, atol=1e-5)
