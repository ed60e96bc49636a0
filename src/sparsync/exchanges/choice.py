"""What `attach` exchanges: gradients, or the steps of the optimizer; and which of the two where nobody says."""

from torch.optim import Adam, Optimizer

from sparsync.base.scheme import Scheme
from sparsync.exchanges.adamw_steps import check_optimizer
from sparsync.exchanges.exchanged_steps import Steps
from sparsync.runtime.findings import innermost
from sparsync.runtime.handle import Gradients

_COARSE = ("sign", "2bit", "int3")  # values of fewer than 4 bits
_TRAINERS_OPTIMIZERS = (
    "AcceleratedOptimizer",
    "LightningOptimizer",
    "_FabricOptimizer",
)  # which pass on to the one inside


Exchange = Gradients | Steps


def choose(exchange: Exchange | None, scheme: Scheme, optimizer: Optimizer | None, steps_possible: bool) -> Exchange:
    """Return `exchange`, or where it is None what suits the scheme and the optimizer.

    Steps for Adam and AdamW with a scheme that sends fewer than 4 bits an element, because Adam divides by second moments, which are wrong
    where gradients are compressed so far; gradients else, and where no optimizer is given or steps are not possible.
    Raises TypeError for anything else, and ValueError for steps where they are not possible.
    """
    if exchange is None:
        return Steps() if optimizer is not None and steps_possible and _wants_steps(scheme, optimizer) else Gradients()
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be sparsync.Gradients() or sparsync.Steps(), got {exchange!r}")
    if isinstance(exchange, Steps) and optimizer is None:
        raise ValueError("the steps of an optimizer are exchanged; pass it: attach(model, scheme, optimizer=optimizer)")
    if isinstance(exchange, Steps) and not steps_possible:
        raise ValueError(
            "steps are exchanged of models that every rank has whole; under FSDP2 exchange gradients, with "
            "TwoShot(density=1.0, values='int4') for AdamW"
        )
    return exchange


def _wants_steps(scheme: Scheme, optimizer: Optimizer) -> bool:
    if type(optimizer).__name__ in _TRAINERS_OPTIMIZERS:
        optimizer = innermost(optimizer)
    coarse = scheme.leaves_out or any(
        getattr(each, "values", "") in _COARSE for each in (scheme, *scheme.inner_schemes)
    )
    if not (isinstance(optimizer, Adam) and coarse and scheme.has_residual) or scheme.has_momentum:
        return False
    try:
        check_optimizer(optimizer)
    except ValueError:  # a setting of Adam's that steps do not have
        return False
    return True
