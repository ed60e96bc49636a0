"""Steps that will be skipped: what was in residuals before, and came in with them, is still there, summed over ranks."""

import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers.exclusive_invariants import whole_numbers
from helpers.quick import one_in
from sparsync.base.scheme import Scheme
from sparsync.base.state import Rollback
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, laid_out
from sparsync.kernels import operations as kernels
from sparsync.runtime.connection import Connection
from sparsync.schemes.dense import Dense
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.micro import MiCRO
from sparsync.schemes.per_parameter import PerParameter
from sparsync.schemes.quantized import Quantized
from sparsync.schemes.skip_reduce import SkipReduce
from sparsync.schemes.topk_allgather import TopK
from sparsync.schemes.two_shot import TwoShot

N = 96
KEYS = ("first", "second", "third")
MAKES: dict[str, Callable[[], Scheme]] = {
    "topk": lambda: TopK(0.1),
    "exact_micro": lambda: ExactMiCRO(0.1),
    "micro": lambda: MiCRO(0.1),
    "exact_micro in 16 bits": lambda: ExactMiCRO(0.1, values="bfloat16"),
    "exact_exdyna": lambda: ExactExDyna(0.1),
    "exact_oktopk": lambda: ExactOkTopk(0.1),
    "skip_reduce": lambda: SkipReduce(skip=0.5, feedback=True),
    "per_parameter": lambda: PerParameter(TopK(0.1), {"second": ExactMiCRO(0.2)}),
}


def train(
    comm: LocalComm,
    make: Callable[[], Scheme],
    steps: int,
    overflow: Callable[[int], tuple[int, str] | None],
    keys: Sequence[str] = KEYS,
    later: bool = False,
    dtype: torch.dtype = torch.float32,
    between: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was applied of each bucket over all steps, and the residual; `overflow` names a rank and a bucket, or nobody.

    `later`: the host learns of it when the gradients are gone; `between`: before the third bucket.
    """
    scheme, skipped = make().start(), Rollback(later)
    applied = {key: torch.zeros(N) for key in KEYS}
    for step in range(steps):
        grads = {}
        for number, key in enumerate(keys):
            grad = whole_numbers(N, comm.size, 10 * step + number)[comm.rank]
            if overflow(step) == (comm.rank, key):
                # SkipReduce may leave a rank out of some chunks.
                where = slice(0, N) if isinstance(scheme.scheme, SkipReduce) else N // 2
                grad[where] = torch.inf if step % 2 else torch.nan
            bucket = Bucket(key, grad.to(dtype), step)
            report = scheme.reduce(bucket, comm)
            skipped.reduced(scheme, bucket, report)
            grads[key] = bucket.grad
            if between and key == "second":
                assert skipped.settle() == (step == 2)
        if all(bool(grad.isfinite().all()) for grad in grads.values()):  # as a loss scaler decides
            for key, grad in grads.items():
                applied[key] += grad
        for grad in grads.values() if later else ():
            grad.fill_(7.0)
        if later and step == 2:
            assert skipped.settle() != between
    assert not skipped.settle()
    kept = scheme.state_dict()["residual"]
    return applied, {key: kept.get(key, torch.zeros(N)) for key in KEYS}


@pytest.mark.parametrize("name", one_in(2, MAKES))
@pytest.mark.parametrize(
    ("P", "where"),
    [
        (1, "first"),
        (2, "second"),
        (2, "third"),
        *(pytest.param(P, where, marks=pytest.mark.slow) for P in (1, 4) for where in ("second", "third")),
    ],
)
def test_a_skipped_step_loses_nothing(name: str, P: int, where: str) -> None:
    """Sums are exact: P times what was applied and all residuals are what came in, without the overflowing bucket."""
    ranks = LocalWorld(P).run(
        partial(train, make=MAKES[name], steps=5, overflow=lambda step: (P - 1, where) if step == 2 else None)
    )
    for number, key in enumerate(KEYS):
        came = torch.zeros(N)
        for step in range(5):
            if (step, key) != (2, where):
                came += torch.stack(whole_numbers(N, P, 10 * step + number)).sum(0)
        for applied, _ in ranks:
            assert torch.equal(applied[key], ranks[0][0][key])
        kept = torch.stack([residual[key] for _, residual in ranks]).sum(0)
        assert torch.equal(P * ranks[0][0][key] + kept, came)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: TwoShot(1.0, "sign", values_down="int3"), lambda: Quantized("int4")])
def test_a_step_that_only_a_device_knows_to_be_skipped_leaves_what_one_that_the_host_skips_does(
    make: Callable[[], Scheme], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(**how: bool) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        overflows: Callable[[int], tuple[int, str] | None] = lambda step: (1, "second") if step == 2 else None  # noqa: E731
        return LocalWorld(3).run(partial(train, make=make, steps=5, overflow=overflows, dtype=dtype, **how))

    by_host, fits = trained(), kernels.packets_fit
    monkeypatch.setattr(kernels, "packets_fit", lambda *given: torch.tensor(fits(*given)))
    for between in (False, True):
        for pair in zip(by_host, trained(later=True, between=between), strict=True):
            for found, expected in zip(*pair, strict=True):
                assert all(torch.equal(found[key], expected[key]) for key in KEYS)


def test_the_host_warns_of_a_step_that_a_device_found_not_finite_when_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits, told = kernels.packets_fit, list[str]()
    monkeypatch.setattr(kernels, "packets_fit", lambda *given: torch.tensor(fits(*given)))
    scheme, comm = Quantized("int4").start(), LocalWorld(1).run(lambda comm: comm)[0]
    connection = Connection(scheme, comm, on_rolled_back=lambda: told.append("rolled back"))

    def step(number: int, first: float) -> tuple[Tensor, Tensor]:
        bucket = Bucket("b", torch.tensor([first, 7.0, 3.0]), number)
        with connection.step():
            report = connection.reduce(bucket, scheme)
        assert pickle.loads(pickle.dumps(report)).details == {"overflow": not math.isfinite(first)}
        return bucket.grad, scheme.state_dict()["residual"]["b"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad, before = step(0, 1.2)
        assert grad.isfinite().all()
        grad, after = step(1, math.inf)
        assert grad.isnan().all()
        assert torch.equal(before, after)
    assert told == []
    with pytest.warns(match="holds NaN or Inf, on all ranks"):
        grad, _ = step(2, 1.2)
    assert told == ["rolled back"]
    assert grad.isfinite().all()
    connection.scaled = True  # a loss scaler skips such steps as a matter of course
    step(3, math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(4, 1.2)
    assert told == ["rolled back"] * 2


def test_part_of_a_bucket_that_overflows_takes_the_other_parts_along() -> None:
    def body(comm: LocalComm) -> Tensor:
        scheme = PerParameter(TopK(0.5), {"*.bias": Dense()}).start()
        grad = torch.ones(4) * (comm.rank + 1)
        layout = laid_out([("a.weight", 3), ("a.bias", 1)])
        grad[3] = torch.inf
        report = scheme.reduce(Bucket("b", grad, 0, layout), comm)
        assert report.details["overflow"]
        return scheme.state_dict()["residual"]["a.weight"]

    assert torch.equal(torch.stack(LocalWorld(2).run(body)).sum(0), torch.full((3,), 3.0))


def test_a_step_that_comes_again_after_an_older_state_is_another_one() -> None:
    """Skipped the first time, finite the second: what is applied is not kept back as well."""
    skipped, scheme = Rollback(), TopK(0.5).start()
    grads = torch.tensor([4.0, 2.0, 1.0, 1.0])
    state = scheme.state_dict()

    def body(comm: LocalComm) -> Tensor:
        for overflowing in (True, False):
            scheme.load_state_dict(state)
            bucket = Bucket("b", grads.clone(), 7)
            if overflowing:
                bucket.grad[0] = torch.inf
            skipped.reduced(scheme, bucket, scheme.reduce(bucket, comm))
            skipped.end_step()
        return bucket.grad + scheme.state_dict()["residual"]["b"]

    assert torch.equal(LocalWorld(1).run(body)[0], grads)


@pytest.mark.parametrize(
    "make", [lambda: ExactOkTopk(0.5), lambda: ExactOkTopk(0.5, values="bfloat16"), lambda: TopK(0.5)]
)
def test_a_mean_that_float16_cannot_hold_leaves_residuals_as_they_were(make: Callable[[], Scheme]) -> None:
    """The sums fit float32; as float16 they are infinite, on all ranks."""

    def body(comm: LocalComm) -> tuple[bool, Tensor, Tensor]:
        scheme = make().start()
        scheme.load_state_dict({"residual": {"w": torch.full((8,), 6e4)}})
        bucket = Bucket("w", torch.full((8,), 6e4, dtype=torch.float16), 0)
        report = scheme.reduce(bucket, comm)
        return bool(report.details["overflow"]), bucket.grad, scheme.state_dict()["residual"]["w"]

    for overflow, grad, kept in LocalWorld(2).run(body):
        assert overflow
        assert not bool(grad.isfinite().all())
        assert torch.equal(kept, torch.full((8,), 6e4))


def test_one_rank_alone_that_overflows_keeps_what_it_had() -> None:
    def body(comm: LocalComm) -> Tensor:
        scheme = SkipReduce(skip=0.5, feedback=True).start()
        scheme.load_state_dict({**scheme.state_dict(), "residual": {"w": torch.ones(4)}})
        scheme.reduce(Bucket("w", torch.tensor([torch.inf, 1.0, 1.0, 1.0]), 0), comm)
        return scheme.state_dict()["residual"]["w"]

    assert torch.equal(LocalWorld(1).run(body)[0], torch.ones(4))
