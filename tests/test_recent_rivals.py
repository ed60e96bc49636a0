"""LoCo and PULSELoCo's compressor on numbers that can be followed."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sparsync import Bucket, LocalWorld
from sparsync.comm.local import LocalComm
from sparsync_lab.rivals.loco import LoCo
from sparsync_lab.rivals.pulse_loco import visible
from sparsync_lab.scheme_choice import parse_schemes, try_out


def test_loco_sends_four_bits_of_a_gradient_corrected_by_the_average_of_its_errors() -> None:
    schemes = [LoCo(values_down="float32", reset_every=3) for _ in range(2)]
    # Rank 0 owns the first two elements. Its share of the others has the scale 1, so that of 1 rounds to 0.
    first = [torch.tensor([0.0, 0.0, 14.0, 1.0]), torch.zeros(4)]

    def reduced(step: int, gradients: list[torch.Tensor]) -> tuple[list[float], list[float]]:
        def body(comm: LocalComm) -> tuple[list[float], torch.Tensor]:
            bucket = Bucket("a", gradients[comm.rank].clone(), step)
            schemes[comm.rank].reduce(bucket, comm)
            return bucket.grad.tolist(), schemes[comm.rank].feedback.residual(bucket, comm.rank)

        (mean, error), (other, _) = LocalWorld(2).run(body)
        assert mean == other
        return mean, error.tolist()

    mean, error = reduced(0, first)
    assert mean == [0.0, 0.0, 7.0, 0.0]
    assert error == pytest.approx([0.0, 0.0, 0.0, 0.2], rel=0.01)  # a fifth of 1, in 8 bits
    mean, error = reduced(1, [torch.zeros(4)] * 2)
    assert mean == pytest.approx([0.0, 0.0, 0.0, 0.1], rel=0.02)  # the mean over ranks of what the error corrects
    assert error == pytest.approx([0.0, 0.0, 0.0, 0.16], rel=0.02)  # nearly nothing was rounded, and the average falls
    _, error = reduced(2, first)
    assert error == [0.0] * 4  # cleared


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beta": 0.0}, r"beta must be in \(0, 1\]"), ({"reset_every": 0}, "reset_every must be at least 1 step, got 0")],
)
def test_loco_refuses_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoCo(**settings)  # pyright: ignore[reportArgumentType]


def test_a_change_is_visible_where_it_changes_the_weight_in_bfloat16() -> None:
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0078125])
    # Below 1 numbers of bfloat16 are 2^-8 apart, and a tie goes to the even one.
    change = torch.tensor([2.0**-9, 2.0**-9 + 2.0**-12, -(2.0**-7), 1e-20, 0.0, 2.0**-15])
    assert visible(weights, change).tolist() == [False, True, True, True, False, True]


def test_pulse_loco_sends_a_change_once_it_would_change_the_weight() -> None:
    [choice] = parse_schemes("local_steps(every=1:keep=0.0)/pulse_loco", 0.01)

    def body(comm: LocalComm) -> tuple[list[list[float]], list[int]]:
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(1.0)
        optimizer = SGD(model.parameters(), lr=1.0)
        local = choice.make_local(model, optimizer, comm=comm)
        seen: list[list[float]] = []
        selected: list[int] = []
        for _ in range(3):
            # Both elements move by steps of which three are visible; on rank 0 the second one is at once.
            model.weight.grad = torch.tensor([[2.0**-10, 2.0**-6 if comm.rank == 0 else 2.0**-10]])
            optimizer.step()
            selected.append(local.step()[0].selected)
            seen.append(model.weight.flatten().tolist())
        return seen, selected

    (seen, selected), (others, _) = LocalWorld(2).run(body)
    assert seen == others
    assert [first for first, _ in seen] == [1.0, 1.0, 1.0 - 3 * 2.0**-10]
    assert selected == [1, 1, 2]
    assert seen[0][1] == 1.0 - 2.0**-7  # half of rank 0's


def test_pulse_loco_stands_behind_local_steps_without_a_delay() -> None:
    [alone] = parse_schemes("pulse_loco", 0.01)
    with pytest.raises(ValueError, match="pulse_loco does not know the weights of trial"):
        try_out(alone, 2)
    for text in ("local_steps(every=4:delay=2)/pulse_loco", "steps/pulse_loco"):
        with pytest.raises(ValueError, match="use local_steps without a delay"):
            parse_schemes(text, 0.01)
