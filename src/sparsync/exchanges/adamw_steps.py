"""AdamW with compressed communication: each rank divides its gradient by its second moments, and momentum comes after the exchange.

Compressing gradients costs AdamW quality, because the second moments of sparse means are wrong, and dividing after the exchange
enlarges what was dropped. Here ranks send steps instead, learning rate included:

    v      = beta2 v + (1 - beta2) g^2                     second moments of a rank's gradient g
    x      = rate g / (sqrt(ratio v / (1 - beta2^t)) + eps)
    mean   = scheme.reduce(x)                              what is not sent stays in the residual
    m      = beta1 m + (1 - beta1) mean                    momentum, the same on all ranks
    A      = (1 - rate * weight_decay) A - m / (1 - beta1^t)
    W      = A - keep * unsent                             own weights, at which the next gradient is taken

ratio: of the squares of the mean gradient to those of the local one in earlier steps, see BlockRatios. A local gradient has P times the
variance of the mean one, so without the ratio steps would be too short. With one rank it is 1.

Differs from AdamW, even with one rank or when everything is sent: each gradient is divided by the second moments and multiplied by the
rate of its own step, while AdamW applies those of the last step to the momentum: it is LaProp (arXiv 2002.04839). And beta2 is at least
0.99. With beta1 = 0 and the same beta2 there is no difference. Where elements are left out, the residual forgets a little in each step.
Frozen second moments with a compressed momentum are 1-bit Adam's (arXiv 2102.02888); the estimated ratio and own weights are ours.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Comm
from sparsync.exchanges.exchanged_steps import ExchangedSteps
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import Replica


class AdamWSteps(ExchangedSteps):
    """Take the steps of `optimizer`, an AdamW, for `model` on all ranks, and exchange them with `scheme`.

    `sparsync.attach` makes it, for wrapped models too, and returns it as the handle; make it yourself to pass `comm`. The `step` of the
    optimizer exchanges until `close()`, which leaves the common weights in the model. Parameters and buffers of rank 0 are copied to all
    ranks here; later each rank has its own buffers. Common weights are float32, or float64 for float64 parameters; own weights of 16-bit
    parameters are rounded to 16 bits.
    Collective over the ranks of `group`: make it on all of them, with the same settings.
    Memory, in vectors of all trained parameters: common weights, momentum, second moments, and the state of the scheme; during a step one
    bucket's gradient, and of the others the mean step where it is sparse.

    Args:
        model: bare, neither wrapped by DistributedDataParallel nor by FSDP.
        optimizer: a torch.optim.AdamW of all trained parameters, an Adam without weight decay, or several with a torch.optim.Muon. Settings
            are read from it, and compared between ranks, in each step, so schedules work. Its state has the moments.
        scheme: how what is exchanged is reduced.
        options: those of Steps: `keep`, `block`, `measure_every`, `beta2`, `decay` and more.
        group: the ranks; None is the default group.
        comm: a communicator to be used in place of `group`, such as that of a `LocalWorld`.
        timeout_s: seconds; a rank that waits longer for the others gives up.
        scaler: the GradScaler that scales the loss, if there is one. It learns of NaN and Inf on other ranks.
        replica: what this rank holds of a model that is wrapped or sharded; `sparsync.attach` passes it. None: all of `model`.

    Raises:
        TypeError: for a wrapped model, an optimizer of another kind and anything but a Scheme.
        ValueError: for settings out of range, where model and optimizer have other trained parameters, and for a model that another
            integration trains until that one is closed.
        RuntimeError: when a rank is missing, or has other settings or other parameters.
    """

    origin = "sparsync.AdamWSteps"
    integration = "adamw_steps"
    vectors = ("momentum", "square")  # m, the same on all ranks; v, each rank's own
    counts = ("applied", "seen")  # steps that moved a parameter; gradients of it in the second moments

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheme: Scheme,
        *,
        group: dist.ProcessGroup | None = None,
        comm: Comm | None = None,
        timeout_s: float = 300.0,
        scaler: GradScaler | None = None,
        replica: Replica | None = None,
        **options: Any,  # Any: the fields of Steps
    ) -> None:
        replica = Replica(model) if replica is None else replica
        super().__init__(replica, optimizer, scheme, Steps(**options), group, comm, timeout_s, scaler)
