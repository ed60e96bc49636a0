"""TwoShot: the rule against a plain restatement, two exchanges, bytes known beforehand, what stays with whom, its reduce-scatter."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from helpers.quick import one_in
from helpers.reducing import reduced
from sparsync import Bucket
from sparsync.base.state import State
from sparsync.comm import LocalWorld
from sparsync.core import Comm, Divisor, count_for, generator, spans
from sparsync.schemes import TwoShot
from sparsync.schemes.quantized import Bits, Quantized
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import ValueCodec


def gradients(P: int, n: int, step: int = 0) -> list[Tensor]:
    """Layers of different scale, with heavy tails."""
    scale = torch.linspace(0, 3, n).exp()
    return [scale * torch.randn(n, generator=generator(rank, "two-shot", step)) ** 3 for rank in range(P)]


def restated(residuals: list[Tensor], given: list[Tensor], scheme: TwoShot) -> tuple[Tensor, list[Tensor]]:
    """The rule with dense vectors: the mean and the new residuals."""
    divide_by = scheme.divide_by
    up = scheme.density, ValueCodec(scheme.values)
    down = scheme.density_down or scheme.density, ValueCodec(scheme.values_down or scheme.values)
    P, n = len(given), given[0].numel()
    divisor = torch.full((n,), P if divide_by == "ranks" else 1)
    acc, mean = [e + x for e, x in zip(residuals, given, strict=True)], torch.zeros(n)
    for owner in range(P):
        position = BlockCyclic(n, P).positions(owner, torch.arange(BlockCyclic(n, P).lengths()[owner]))

        def rounded(value: Tensor, values: ValueCodec) -> Tensor:
            return values.decode(values.encode(value), value.numel(), value.dtype)

        def largest(x: Tensor, density: float, where: Tensor = position) -> Tensor:
            k = count_for(density, where.numel())
            return where[x[where].abs().argsort(descending=True, stable=True)[:k].sort().values]

        for rank in range(P):
            if rank != owner:
                chosen = largest(acc[rank], up[0])
                sent = rounded(acc[rank][chosen], up[1])
                acc[rank][chosen] -= sent
                acc[owner][chosen] += sent
                divisor[chosen] += divide_by == "contributors"
        chosen = largest(acc[owner], down[0])
        mean[chosen] = rounded(acc[owner][chosen] / divisor[chosen], down[1])
        acc[owner][chosen] -= divisor[chosen] * mean[chosen]
    return mean, acc


@pytest.mark.parametrize("values", one_in(2, ["float32", "int8", "sign", "int4"]))
@pytest.mark.parametrize(("P", "n", "density"), [(1, 50, 0.1), (2, 999, 0.05), (4, 5000, 0.05), (5, 777, 0.3)])
@pytest.mark.parametrize("divide_by", get_args(Divisor))
def test_is_the_rule(P: int, n: int, density: float, values: str, divide_by: Divisor) -> None:
    check_rule([TwoShot(density, values, divide_by=divide_by).start() for _ in range(P)], n)  # pyright: ignore[reportArgumentType]


def check_rule(schemes: list[State], n: int) -> None:
    residuals = [torch.zeros(n) for _ in schemes]
    for step in range(3):
        given = gradients(len(schemes), n, step)
        mean, _, found = reduced(schemes, given, step)
        wanted, residuals = restated(residuals, given, schemes[0].scheme)
        assert torch.equal(mean, wanted)
        assert all(torch.equal(x, y) for x, y in zip(found, residuals, strict=True))


DOWN: tuple[dict[str, Any], ...] = (  # Any: the fields of TwoShot
    {"density": 0.03, "values": "sign", "density_down": 0.13},
    {"density": 1.0, "values": "sign", "density_down": 0.3, "values_down": "int3"},
    {"density": 0.1, "values": "int4", "density_down": 1.0, "values_down": "float32"},
    {"density": 0.2, "values": "ternary", "values_down": "int3", "divide_by": "contributors"},
)


@pytest.mark.parametrize("config", DOWN)
@pytest.mark.parametrize("P", [1, 4])
def test_the_way_down_has_its_density_and_values(P: int, config: dict[str, Any]) -> None:
    check_rule([TwoShot(**config).start() for _ in range(P)], 999)


def test_all_elements_in_other_values_on_the_way_down_are_a_quantized_all_reduce() -> None:
    given = gradients(4, 999)
    mean, reports, residuals = reduced([TwoShot(1.0, "sign", values_down="float32").start() for _ in range(4)], given)
    up = ValueCodec("sign")

    def sent(x: Tensor) -> Tensor:
        return 4 * up.decode(up.encode(x / 4), x.numel(), x.dtype)

    for owner, chunk in enumerate(spans(999, 4)):
        parts = [chunk.of(x) if rank == owner else sent(chunk.of(x)) for rank, x in enumerate(given)]
        assert torch.equal(chunk.of(mean), (torch.stack(parts).double().sum(0) / 4).float())
        for rank, x in enumerate(given):
            kept = chunk.of(residuals[rank])
            assert rank == owner or torch.equal(kept, chunk.of(x) - sent(chunk.of(x)))
    to_owners = 2 * up.nbytes(250, torch.float32) + up.nbytes(249, torch.float32)
    assert reports[0].cost.nbytes == to_owners + 3 * 4 * 250


@pytest.mark.parametrize("values", ["int8", "sign"])
def test_where_all_is_sent_the_owners_share_of_what_rounding_dropped_of_a_sum_is_a_pth(values: Bits) -> None:
    P, n = 4, 999

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        schemes = Quantized(values).start(), TwoShot(1.0, values).start()
        given = Bucket("w", gradients(P, n)[comm.rank], 0)
        for scheme in schemes:
            scheme.reduce(Bucket("w", given.grad.clone(), 0), comm)
        one, other = (scheme.unsent(given, comm) for scheme in schemes)
        assert one is not None and other is not None
        return one, other, schemes[0].state_dict()["residual"]["w"]

    for rank, (one, other, residual) in enumerate(LocalWorld(P).run(body)):
        assert torch.equal(one, other)
        for owner, chunk in enumerate(spans(n, P)):
            assert torch.equal(chunk.of(one), chunk.of(residual) / (P if owner == rank else 1))


@pytest.mark.parametrize("send_all", [False, True])
def test_a_rollback_returns_what_residuals_have_lost_whatever_the_divisor(send_all: bool) -> None:
    P, n = 4, 999
    given = [torch.randint(-8, 8, (n,), generator=generator(rank, "rollback", 0)).double() for rank in range(P)]
    schemes = [TwoShot(0.1, divide_by="contributors").start() for _ in range(P)]

    def body(comm: Comm) -> None:
        bucket, scheme = Bucket("w", given[comm.rank].clone(), 0), schemes[comm.rank]
        scheme.send_all(bucket, comm) if send_all else scheme.reduce(bucket, comm)
        scheme.rollback(bucket)

    LocalWorld(P).run(body)
    kept = torch.stack([scheme.state_dict()["residual"]["w"] for scheme in schemes]).sum(0)
    assert torch.equal(kept, torch.stack(given).sum(0))


@pytest.mark.parametrize("config", [{"divide_by": "contributors"}, {"density_down": 0.13}, {"values_down": "int3"}])
def test_has_no_reduce_scatter_with_settings_of_the_way_down(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="on a shard axis leave out density_down"):
        TwoShot(**config).reduce_scatter_form()
