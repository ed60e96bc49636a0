"""What `attach` exchanges: gradients, the steps of the optimizer, or weight changes; and which of these where nobody says."""

from collections.abc import Sequence

from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.exchanges.exchanged_steps import Steps
from sparsync.exchanges.local_options import LocalSteps
from sparsync.exchanges.rules import optimizers_of, rules_of
from sparsync.runtime.findings import check_optimizer
from sparsync.runtime.handle import Gradients

_COARSE = ("sign", "2bit", "int3")  # values of fewer than 4 bits
# Which pass on to the one inside. Fabric and Lightning make a class of them for each kind of optimizer.
_TRAINERS_OPTIMIZERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})


Exchange = Gradients | Steps | LocalSteps
Optimizers = Optimizer | Sequence[Optimizer]


def choose(exchange: Exchange | None, scheme: Scheme, optimizer: Optimizers | None, steps_possible: bool) -> Exchange:
    """Return `exchange`, or where it is None what suits the scheme and the optimizer.

    Steps for Adam, AdamW and Muon with a scheme that sends fewer than 4 bits an element, because gradients that are compressed so far
    give wrong second moments, and wrong directions to Muon; gradients else, and where no optimizer is given or steps are not possible.
    Raises TypeError for anything else and for what is no optimizer, and ValueError for steps where they are not possible, and for several
    optimizers where one is taken.
    """
    if optimizer is not None:
        check_optimizer(optimizer)
    if isinstance(exchange, LocalSteps):
        if optimizer is None:
            raise ValueError(
                "with local steps each rank steps its own optimizer, which is counted; pass it, or several: "
                "attach(model, scheme, exchange=sparsync.LocalSteps(...), optimizer=optimizer)"
            )
        return exchange
    if exchange is None:
        return Steps() if optimizer is not None and steps_possible and _wants_steps(scheme, optimizer) else Gradients()
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be sparsync.Gradients(), Steps() or LocalSteps(every=...), got {exchange!r}")
    if isinstance(exchange, Steps) and optimizer is None:
        raise ValueError("the steps of an optimizer are exchanged; pass it: attach(model, scheme, optimizer=optimizer)")
    if isinstance(exchange, Steps) and not steps_possible:
        raise ValueError(
            "steps are exchanged of models that every rank has whole; under FSDP2 exchange gradients, with "
            "TwoShot(density=1.0, values='int4') for AdamW"
        )
    return exchange


def the_one(optimizer: Optimizers | None) -> Optimizer | None:
    """Return the only optimizer. Raises ValueError for several."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if len(optimizer) != 1:
        raise ValueError(
            f"gradients are exchanged for one optimizer, got {len(optimizer)}; leave them out, or exchange the steps of AdamW and Muon "
            "with exchange=sparsync.Steps(), or weight changes with exchange=sparsync.LocalSteps(every=...)"
        )
    return optimizer[0]


def _wants_steps(scheme: Scheme, optimizer: Optimizers) -> bool:
    formats = (
        getattr(each, name, "") for each in (scheme, *scheme.inner_schemes) for name in ("values", "values_down")
    )
    coarse = scheme.leaves_out or any(each in _COARSE for each in formats)
    if not (coarse and scheme.has_residual) or scheme.has_momentum:
        return False
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    if any(_may_do_more(each) for each in given):
        return False
    try:
        rules_of(optimizers_of(optimizer))
    except (TypeError, ValueError):  # another optimizer, or a setting that steps do not have
        return False
    return True


def _may_do_more(optimizer: Optimizer) -> bool:
    """Return whether this holds another optimizer, and is none of a trainer's, which pass on to the one inside."""
    found = optimizers_of(optimizer)
    inside = len(found) == 1 and found[0] is not optimizer
    return inside and not _TRAINERS_OPTIMIZERS & {kind.__name__ for kind in type(optimizer).__mro__}
