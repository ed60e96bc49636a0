"""What `attach` exchanges: gradients, the steps of the optimizer, or weight changes; which where nobody says, and what suits it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, Muon, NAdam, Optimizer, RAdam, RMSprop

from sparsync.base.scheme import Scheme
from sparsync.exchanges.exchanged_steps import Steps
from sparsync.exchanges.local_options import LocalSteps
from sparsync.exchanges.rules import exchangeable, optimizers_of
from sparsync.runtime.findings import Finding, check_optimizer, innermost
from sparsync.runtime.handle import Gradients

_COARSE = ("sign", "ternary", "2bit", "int3")  # values of fewer than 4 bits
# Which pass on to the one inside. Fabric and Lightning make a class of them for each kind of optimizer.
_TRAINERS_OPTIMIZERS = frozenset({"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"})
# Those that divide each element by the size of its past gradients, or a matrix by its singular values.
_DIVIDING = (Adam, Muon, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, Adafactor)
# Other packages' are recognised by the names of their classes.
_LIKE_ADAM, _OF_SIGNS = (
    re.compile("ada(m|n|belief)|lamb(?!da)|shampoo|soap|sophia|novograd", re.IGNORECASE),
    re.compile("Lion|^lion|(?i:rprop|signsgd|signum)"),
)

Exchange = Gradients | Steps | LocalSteps
Optimizers = Optimizer | Sequence[Optimizer]


def choose(exchange: Exchange | None, scheme: Scheme, optimizer: Optimizers | None, steps_possible: bool) -> Exchange:
    """Return `exchange`, or where it is None what suits the scheme and the optimizer.

    Steps for Adam, AdamW and Muon with a scheme that sends fewer than 4 bits an element, because gradients that are compressed so far
    give wrong second moments, and wrong directions to Muon; gradients else, and where no optimizer is given or steps are not possible.
    Raises TypeError for anything else and for what is no optimizer, and ValueError for steps where they are not possible.
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
            "exchanged steps need the whole model on every rank; under FSDP2 exchange gradients, with "
            "TwoShot(density=1.0, values='int4') for AdamW"
        )
    return exchange


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """Return the optimizers that were given, in a list."""
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def optimizer_findings(optimizer: Optimizers | None, scheme: Scheme, steps_possible: bool = True) -> Iterator[Finding]:
    """Find out whether this optimizer, or the one within it, suits the gradients that this scheme writes."""
    if optimizer is None:
        return
    if not isinstance(optimizer, Optimizer):
        check_optimizer(optimizer)
        found = dict.fromkeys(each for one in optimizer for each in optimizer_findings(one, scheme, steps_possible))
        if len(optimizer) == 1:
            yield from found
        for each in found if len(optimizer) > 1 else ():
            # Those that step in turn, each after its own backward pass, as in a GAN, have no common step.
            cure = each.cure.replace("Steps(), or", "Steps() if all of them step together, or")
            yield replace(each, cure=cure)
        return
    inner = innermost(optimizer)
    name, ours = type(inner).__name__, type(scheme).__name__
    if scheme.has_momentum:
        momenta = [group.get("momentum", 0.0) for group in inner.param_groups]
        if not isinstance(inner, SGD) or any(momenta):
            given = f"SGD(momentum={max(momenta):g})" if isinstance(inner, SGD) else name
            yield Finding(
                f"{ours} has the momentum itself, and {given} adds its own", "use torch.optim.SGD without momentum"
            )
    elif scheme.has_residual and isinstance(inner, LBFGS):
        yield Finding(
            f"{name} compares the gradients of several evaluations in a step, and {ours} sends part of each with later ones",
            "use torch.optim.SGD, or Dense() as the scheme",
        )
    elif scheme.has_residual and scheme.leaves_out and _OF_SIGNS.search(name):
        yield Finding(
            f"{ours} leaves elements out, and {name} follows signs, which say little where means are sparse: quality may fall behind dense",
            "use TwoShot(density=1.0, values='int4')",
        )
    elif scheme.has_residual and scheme.leaves_out and (isinstance(inner, _DIVIDING) or _LIKE_ADAM.search(name)):
        cure = "use TwoShot(density=1.0, values='int4')"
        if steps_possible and isinstance(inner, (Adam, Muon)):
            refused = _no_steps(optimizer)
            instead = f"{cure}; the optimizer's steps cannot be exchanged instead, because {refused}"
            cure = instead if refused else f"attach with exchange=sparsync.Steps(), or {cure}"
        does = "follows directions" if isinstance(inner, Muon) else "divides by second moments"
        yield Finding(
            f"{ours} leaves elements out, and {name} {does}, which are wrong where means are sparse: quality falls "
            "clearly behind dense (the project's documentation has figures on the page 'Quality and bits')",
            cure,
        )


def _no_steps(optimizer: Optimizers) -> str:
    """Return why steps of this optimizer cannot be exchanged; "" where they can."""
    try:
        exchangeable(optimizer)
    except (TypeError, ValueError) as error:  # another optimizer, or a setting that steps do not have
        return str(error).partition("; ")[0]  # its cure may be to exchange gradients
    return ""


def _wants_steps(scheme: Scheme, optimizer: Optimizers) -> bool:
    formats = (
        getattr(each, name, "") for each in (scheme, *scheme.inner_schemes) for name in ("values", "values_down")
    )
    coarse = scheme.leaves_out or any(each in _COARSE for each in formats)
    if not (coarse and scheme.has_residual) or scheme.has_momentum:
        return False
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    return not any(_may_do_more(each) for each in given) and not _no_steps(optimizer)


def _may_do_more(optimizer: Optimizer) -> bool:
    """Return whether this holds another optimizer, and is none of a trainer's, which pass on to the one inside."""
    found = optimizers_of(optimizer)
    inside = len(found) == 1 and found[0] is not optimizer
    return inside and not _TRAINERS_OPTIMIZERS & {kind.__name__ for kind in type(optimizer).__mro__}
