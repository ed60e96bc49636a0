"""LoCo and PULSELoCo's compressor on numbers that can be followed."""

import pytest
import torch

from sparsync import Bucket
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync_lab.rivals.loco import LoCo


def test_loco_sends_four_bits_of_a_gradient_corrected_by_the_average_of_its_errors() -> None:
    schemes = [LoCo(values_down="float32", reset_every=3).start() for _ in range(2)]
    # Rank 0 owns the first two elements. Its share of the others has the scale 1, so that of 1 rounds to 0.
    first = [torch.tensor([0.0, 0.0, 14.0, 1.0]), torch.zeros(4)]

    def reduced(step: int, gradients: list[torch.Tensor]) -> tuple[list[float], list[float]]:
        def body(comm: LocalComm) -> tuple[list[float], torch.Tensor]:
            bucket = Bucket("a", gradients[comm.rank].clone(), step)
            schemes[comm.rank].reduce(bucket, comm)
            return bucket.grad.tolist(), schemes[comm.rank].residual(bucket)

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
