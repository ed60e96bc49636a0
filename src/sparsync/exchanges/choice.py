"""What `attach` exchanges: gradients, or the steps of the optimizer; and which of the two where nobody says."""

from collections.abc import Sequence

from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.exchanges.exchanged_steps import Steps
from sparsync.exchanges.rules import optimizers_of, rules_of
from sparsync.runtime.handle import Gradients

_COARSE = ("sign", "2bit", "int3")  # values of fewer than 4 bits
_TRAINERS_OPTIMIZERS = (
    "AcceleratedOptimizer",
    "LightningOptimizer",
    "_FabricOptimizer",
)  # which pass on to the one inside


Exchange = Gradients | Steps


def choose(
    exchange: Exchange | None, scheme: Scheme, optimizer: Optimizer | Sequence[Optimizer] | None, steps_possible: bool
) -> Exchange:
    """Return `exchange`, or where it is None what suits the scheme and the optimizer.

    Steps for Adam, AdamW and Muon with a scheme that sends fewer than 4 bits an element, because gradients that are compressed so far
    give wrong second moments, and wrong directions to Muon; gradients else, and where no optimizer is given or steps are not possible.
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


def _wants_steps(scheme: Scheme, optimizer: Optimizer | Sequence[Optimizer]) -> bool:
    coarse = scheme.leaves_out or any(
        getattr(each, "values", "") in _COARSE for each in (scheme, *scheme.inner_schemes)
    )
    if not (coarse and scheme.has_residual) or scheme.has_momentum:
        return False
    found = optimizers_of(optimizer)
    inside = isinstance(optimizer, Optimizer) and len(found) == 1 and found[0] is not optimizer
    if inside and type(optimizer).__name__ not in _TRAINERS_OPTIMIZERS:
        return False  # it may do more than pass on to the one inside
    try:
        rules_of(found)
    except (TypeError, ValueError):  # another optimizer, or a setting that steps do not have
        return False
    return True
