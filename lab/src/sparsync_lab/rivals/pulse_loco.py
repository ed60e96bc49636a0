"""PULSELoCo's compressor: of the change over local steps, the elements that would change a weight in bfloat16 (arXiv 2602.03839).

A rank sends element i of acc = residual + change, in float32, where bfloat16(w - acc) and bfloat16(w) differ at i; w are the common weights
at which the local steps began. The rest waits in the residual until it has grown. How many that are depends on the learning rate over
the weights: about 1 % after single steps of reinforcement learning, and far more where weights are trained from scratch.

It needs the weights, so it stands behind local steps in the lab's commands only: `local_steps(every=...:keep=0.0)/pulse_loco`. The
recipe `pulseloco` has DiLoCo's outer optimizer around it, as the paper.

Differs from the paper: weights are float32 in the forward pass, too, so what is not sent does change it a little; positions travel in
Elias-Fano code, where the paper compresses their differences; selections are gathered, each rank's to all others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Sparse, Update, kernels
from sparsync.collectives.values import exchange_counts
from sparsync.comm.plan import Given, Plan
from sparsync.core import phase
from sparsync.feedback import Residuals
from sparsync.schemes.topk_allgather import gather_selections
from sparsync_lab.rivals.above_threshold import gather_above_planned


@dataclass
class PulseLoCo(ErrorFeedbackScheme):
    """Send the elements of a change that would change a weight in bfloat16, in float32 (arXiv 2602.03839).

    The mean divides their sum by P. NaN or Inf on any rank makes every gradient NaN, and changes nothing else.
    """

    residuals: Residuals = "float32"

    name = "pulse_loco"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: dict[str, nn.Parameter] = {}  # the weights by name

    @classmethod
    def published(cls) -> Self:
        """Return the same: the published rule is the plain setting."""
        return cls()

    def watch(self, model: nn.Module) -> None:
        """Compare with the weights of `model`, which are those after the local steps when a change is reduced."""
        self._weights = dict(model.named_parameters())

    def planned(self, given: Given) -> Plan:
        """Return the plan with the counts of the figures "selected"; without them all elements are sent."""
        return gather_above_planned(given, 1.0, "float32", self.residual_nbytes(given), 4)

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        with phase("select"):
            begun = self._begun(bucket)  # before the sum is made, which takes the memory of the change
            index = visible(begun, acc.values).nonzero().view(-1) if acc.finite else torch.empty(0, dtype=torch.int64)
            own = Sparse(index.to(torch.int32), kernels.gather(acc.values, index), begun.numel())
        counts = exchange_counts(index.numel(), acc.finite, comm, begun.device)
        return gather_selections(own, counts, "float32", bucket, comm)

    def _begun(self, bucket: Bucket) -> Tensor:
        """Return the weights at which the local steps began, [n]: those of now and the change since."""
        if missing := [entry.name for entry in bucket.layout if entry.name not in self._weights]:
            raise ValueError(
                f"pulse_loco does not know the weights of {', '.join(missing)}, which it compares changes with; name it behind local "
                "steps in a command of the lab, as local_steps(every=30:keep=0.0)/pulse_loco"
            )
        own = torch.cat([self._weights[entry.name].detach().flatten() for entry in bucket.layout])
        return own.to(bucket.grad.dtype) + bucket.grad


def visible(weights: Tensor, change: Tensor) -> Tensor:
    """Return where weights - change is another number than weights in bfloat16, bool [n]."""
    return (weights - change).bfloat16() != weights.bfloat16()
