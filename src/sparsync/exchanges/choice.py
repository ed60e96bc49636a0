"""Chooses what `attach` exchanges, and by which scheme: as given, or by a recipe for the optimizer. Checks that both suit it."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

from torch.optim import LBFGS, SGD, Adam, Muon, Optimizer

from sparsync.base.scheme import Scheme
from sparsync.base.scheme_text import of_variable, scheme_of, taken_apart, text_of_environment
from sparsync.exchanges.rules import MuonRule, exchangeable, optimizers_of, rules_of
from sparsync.exchanges.steps_options import LocalSteps, OuterSGD, Steps
from sparsync.recipes import Bits, Family, Recipe, bits_of, candidates, recipe
from sparsync.runtime.findings import Finding, check_optimizer, check_scheme, innermost
from sparsync.runtime.handle import Gradients

_COARSE = ("sign", "ternary", "int3")  # values of fewer than 4 bits
_OUTER = {"outer_rate": "rate", "outer_momentum": "momentum"}  # settings of OuterSGD, as a text names them

_CURE = (
    "leave the scheme out, attach(model, optimizer=optimizer), which takes what suits the optimizer; or use "
    "TwoShot(density=1.0, values='int4')"
)

Exchange = Gradients | Steps | LocalSteps
Optimizers = Optimizer | Sequence[Optimizer]


@dataclass(frozen=True)
class Choice:
    """The exchange, the scheme that reduces it, and the recipe that names both; None if they were given.

    `candidates` are the recipes among which the first steps choose if `bits` is "auto".
    """

    scheme: Scheme
    exchange: Exchange
    recipe: Recipe | None = None
    candidates: Sequence[Recipe] = ()


def choose(
    scheme: Scheme | None,
    bits: Bits | None,
    exchange: Exchange | None,
    optimizer: Optimizers | None,
    ranks: int = 1,
    sharded: bool = False,
    parameters: int = 0,
) -> Choice:
    """Choose the exchange and its scheme: as given, as SPARSYNC_SCHEME says, or by a recipe for this number of `parameters`.

    `sharded`: each rank has only a shard of the model, so steps cannot be exchanged. A scheme without `exchange` exchanges gradients, or
    steps of Adam, AdamW and Muon if it sends fewer than 4 bits per element: gradients compressed that far give wrong second moments, and
    give Muon wrong directions. Raises TypeError for an argument of another type, and ValueError for arguments that contradict one another.
    """
    if optimizer is not None:
        check_optimizer(optimizer)
    if exchange is not None and not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be sparsync.Gradients(), Steps() or LocalSteps(every=...), got {exchange!r}")
    given = [name for name, value in (("a scheme", scheme), ("exchange=", exchange)) if value is not None]
    if bits is not None and given:
        raise ValueError(f"bits={bits} stands for a scheme and what it exchanges; leave bits or {given[0]} out")
    taken: Recipe | None = None
    among: Sequence[Recipe] = ()
    if scheme is not None:
        check_scheme(scheme)
    else:
        text = "" if bits is not None else text_of_environment()
        with of_variable(text) if text else nullcontext():
            scheme, named, taken, among = _of_text(text, bits, exchange, optimizer, ranks, sharded, parameters)
            if exchange is not None and named is not None:
                raise ValueError(f"it says what is exchanged, and so does {exchange!r}; leave one of them out")
            exchange = exchange or named
    if exchange is None:
        steps = not sharded and optimizer is not None and _wants_steps(scheme, optimizer)
        return Choice(scheme, Steps() if steps else Gradients())
    if isinstance(exchange, Gradients):
        return Choice(scheme, exchange, taken)
    if optimizer is None:
        what = "the steps of an optimizer are exchanged"
        if isinstance(exchange, LocalSteps):
            what = "with local steps each rank steps its own optimizer, which is counted"
        raise ValueError(f"{what}; pass it, or several: attach(model, ..., optimizer=optimizer)")
    if isinstance(exchange, Steps) and sharded:
        raise ValueError(
            "exchanged steps need the whole model on every rank; under FSDP2 exchange gradients, with "
            "TwoShot(density=1.0, values='int4') for AdamW"
        )
    return Choice(scheme, exchange, taken, among)


def _of_text(
    text: str,
    bits: Bits | None,
    exchange: Exchange | None,
    optimizer: Optimizers | None,
    ranks: int,
    sharded: bool,
    parameters: int,
) -> tuple[Scheme, Exchange | None, Recipe | None, Sequence[Recipe]]:
    """Read scheme, exchange, recipe and candidates from "bits=0.8", from "default" (or ""), or from a scheme with its steps."""
    try:
        bits = bits_of(text) if text else bits
    except LookupError:
        return *method_of(text), None, ()
    if isinstance(exchange, Steps | LocalSteps):
        raise ValueError(
            f"{exchange!r} goes with a scheme; pass one, such as sparsync.schemes.Dense(), or leave exchange= out"
        )
    gradients = isinstance(exchange, Gradients)
    family = family_of(optimizer, sharded, gradients)
    among, chosen = candidates(family, ranks, bits, parameters), recipe(family, ranks, bits, parameters)
    scheme, steps = method_of(chosen.text)
    return scheme, None if gradients else steps or Gradients(), chosen, among


def family_of(optimizer: Optimizers | None, sharded: bool = False, gradients: bool = False) -> Family:
    """Choose the family of recipes for one or several optimizers; `gradients`: among those that exchange gradients."""
    if sharded:
        return "shard"
    if optimizer is None:
        return "other"
    if not gradients and not _no_steps(optimizer):
        muon = any(isinstance(each, MuonRule) for each in rules_of(optimizers_of(optimizer)))
        return "muon" if muon else "steps"
    inner = [innermost(each) for each in listed(optimizer)]
    plain = all(isinstance(each, SGD) and inspect.unwrap(type(each).step) is inspect.unwrap(SGD.step) for each in inner)
    return "linear" if plain else "other"


def recipe_findings(
    choice: Choice, optimizer: Optimizers | None, exchange: Exchange | None, parameters: int
) -> Iterator[Finding]:
    """Tell why the recipe exchanges gradients if an optimizer might exchange steps, and what is known of it at this size."""
    if choice.recipe is not None and choice.recipe.beyond and not choice.recipe.shows(parameters):
        yield Finding(
            f"{choice.recipe.name} with {parameters / 1e6:.3g} million parameters: {choice.recipe.beyond}",
            "leave bits= out, or take more bits: they lose less",
        )
    if choice.recipe is None or choice.recipe.family != "other" or exchange is not None:
        return
    sent = f"gradients are exchanged, at {choice.recipe.bits:g} bits per parameter per step"
    if optimizer is None:
        yield Finding(
            f"no optimizer was given, so {sent}; the steps of Adam, AdamW and Muon need fewer, and end closer to dense",
            "attach(model, optimizer=optimizer); or pass exchange=sparsync.Gradients() to exchange gradients",
        )
    elif any(isinstance(innermost(each), (Adam, Muon)) for each in listed(optimizer)) and (why := _no_steps(optimizer)):
        yield Finding(f"{why}, so {sent}", "change that, or pass exchange=sparsync.Gradients() to exchange gradients")


def method_of(text: str) -> tuple[Scheme, Exchange | None]:
    """Read the scheme from a text such as "steps(keep=0.0)/topk", and the steps around it, None if it has none."""
    steps, settings, inner = taken_apart(text)
    return scheme_of(inner), exchange_of(steps, settings, text) if steps else None


def check_text(text: str) -> None:
    """Raise ValueError for a text that SPARSYNC_SCHEME does not allow for any optimizer."""
    try:
        recipe("steps", 4, bits_of(text))  # this family goes down to the fewest bits
    except LookupError:
        method_of(text)


def exchange_of(steps: str, settings: Mapping[str, Any], text: str) -> Steps | LocalSteps:  # Any: numbers and texts
    """Make the options of steps around a scheme. Raises ValueError, which quotes `text`, for an unknown setting or a wrong value."""
    local = steps == "local_steps"
    known = [
        *(each.name for each in fields(LocalSteps if local else Steps) if each.name != "outer"),
        *(_OUTER if local else ()),
    ]
    unknown = next((key for key in settings if key not in known), None)
    if unknown is not None or (local and "every" not in settings):
        problem = f"have no setting {unknown!r}" if unknown is not None else "need every=STEPS"
        raise ValueError(f"{steps} {problem}, got {text!r}; settings are {', '.join(known)}")
    given = {key: value for key, value in settings.items() if key not in _OUTER}
    outer = {_OUTER[key]: value for key, value in settings.items() if key in _OUTER}
    try:
        return LocalSteps(**given, outer=OuterSGD(**outer) if outer else None) if local else Steps(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the steps of {text!r} cannot be made: {type(error).__name__}: {error}") from error


def listed(optimizer: Optimizers | None) -> list[Optimizer]:
    """List the optimizers that were given."""
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def optimizer_findings(optimizer: Optimizers | None, scheme: Scheme) -> Iterator[Finding]:
    """Tell which optimizers, wrapped ones included, do not suit the gradients that this scheme writes."""
    if optimizer is None:
        return
    check_optimizer(optimizer)
    yield from dict.fromkeys(each for one in listed(optimizer) for each in _of_one(innermost(one), scheme))


def _of_one(inner: Optimizer, scheme: Scheme) -> Iterator[Finding]:
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
    elif scheme.has_residual and scheme.leaves_out and not isinstance(inner, SGD):
        yield Finding(
            f"{ours} leaves elements out, and {name} is no SGD: it may use second moments or signs, which are wrong where means are "
            "sparse, and quality falls clearly behind dense (the project's documentation has figures on the page 'Quality and bits')",
            _CURE,
        )


def _no_steps(optimizer: Optimizers) -> str:
    """Tell why the steps of these optimizers cannot be exchanged; "" if they can."""
    try:
        exchangeable(optimizer)
    except (TypeError, ValueError) as error:  # another optimizer, or a setting that steps do not have
        return str(error).partition("; ")[0]  # without the advice, which may be to exchange gradients
    return ""


def _wants_steps(scheme: Scheme, optimizer: Optimizers) -> bool:
    formats = (
        getattr(each, name, "") for each in (scheme, *scheme.inner.values()) for name in ("values", "values_down")
    )
    coarse = scheme.leaves_out or any(each in _COARSE for each in formats)
    return coarse and scheme.has_residual and not scheme.has_momentum and not _no_steps(optimizer)
