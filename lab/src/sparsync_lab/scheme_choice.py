"""Parse schemes as commands name them: "topk", "exact_oktopk:density=0.001", "package.module:Class:key=value", "path/to/file.py:Class".

After "local_steps(every=4:keep=0.5)/" the ranks train separately, and the scheme reduces the changes of their weights every few steps, as
with `sparsync.LocalSteps`. After "steps(keep=0.5)/" it reduces the optimizer's steps, as with `sparsync.Steps`. The names in `recipes`
stand for such combinations of published systems, and "default" and "bits=0.8" for the choice of `sparsync.attach` with the job's optimizer.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from sparsync import Bucket, LocalSteps, Report, Scheme, Steps, schemes
from sparsync.base.scheme_text import made, parsed, taken_apart
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.exchanges.choice import exchange_of, family_of, method_of
from sparsync.recipes import Family, bits_of, candidates, recipe
from sparsync.testing.momentum import undeclared
from sparsync_lab.recipes import SYSTEMS
from sparsync_lab.rivals.laprop import LongAdamW, beta2_described

# Names that only the lab supports: elsewhere both would be `dense`.
LAB_SCHEMES = {"adamw": "sparsync_lab.rivals.laprop:LongAdamW", "laprop": "sparsync_lab.rivals.laprop:LaProp"}
MOST_FRAGMENTS = 4096  # of local steps
TRIAL_ELEMENTS = 64  # of the bucket that every scheme reduces once before any process starts


@dataclass(frozen=True)
class SchemeChoice:
    """One scheme: its label in tables, its name as `sparsync.schemes.get` takes it, and its settings.

    `local`: the settings of the `steps` around it, as of LocalSteps (`outer_rate` and `outer_momentum` belong to the outer SGD) or Steps;
    None if the scheme reduces gradients.
    """

    label: str
    name: str
    config: dict[str, Any] = field(default_factory=dict)  # Any: the fields of the scheme's own config
    local: dict[str, Any] | None = None  # Any: numbers and texts
    steps: str = "local_steps"
    auto: str = ""  # "bits=auto" or "bits=auto:0.2" if the first steps choose the recipe

    def make(self) -> Scheme:
        """Make a new scheme; every rank and every run needs its own."""
        return made(self.name, self.config)

    def make_local(
        self, model: nn.Module, optimizer: Optimizer, **where: Any
    ) -> Any:  # Any: as these classes take and are
        """Wrap a new scheme in local steps or AdamW steps of `model`; `where`: communicator or group, timeout."""
        assert self.local is not None
        made = _class(self.steps)(model, optimizer, self.make(), **{**vars(self.exchange()), **where})
        if self.auto:
            among = candidates(family_of(optimizer), made.place[1], bits_of(self.auto))
            made.recipe = among[0]
            made.choose_bits(among, method_of)
        return made

    def exchange(self) -> LocalSteps | Steps | None:
        """Make the `exchange` argument of `sparsync.attach`; None, the default, without steps around the scheme."""
        return None if self.local is None else exchange_of(self.steps, self.local, self.label)

    def leaves_rest(self, steps: int) -> bool:
        """Tell whether weights remain unexchanged after `steps` local steps."""
        if self.local is None or self.steps != "local_steps":
            return False
        return bool(steps % self.local["every"] or self.local.get("delay") or self.local.get("fragments", 1) > 1)

    def never_due(self, steps: int) -> bool:
        """Tell whether `steps` local steps end before their first exchange is due."""
        if self.local is None or self.steps != "local_steps":
            return False
        return steps < self.local["every"] // self.local.get("fragments", 1)

    def described(self) -> dict[str, Any]:  # Any: JSON
        """Describe everything that determines the method: all settings of the scheme and its steps, with defaults.

        A default that depends on the scheme is resolved here; one that depends on the job is given as a rule. The interval of weight
        checks is left out.
        """
        scheme = self.make()
        full = {"scheme": repr(scheme)}
        if self.local is None:
            return full
        known = fields(LocalSteps if self.steps == "local_steps" else Steps)
        plain = {each.name: each.default for each in known if isinstance(each.default, int | float | str)}
        decisive = plain | self.local | ({} if self.steps == "local_steps" else self._resolved(scheme))
        decisive = {
            name: float(value) if isinstance(plain.get(name), float) else value for name, value in decisive.items()
        }
        if self.auto:
            full["bits"] = self.auto
        return full | {self.steps: {name: value for name, value in decisive.items() if name != "check_weights_every"}}

    def _resolved(self, scheme: Scheme) -> dict[str, float | str]:
        """Resolve the settings of Steps that are None by default."""
        assert self.local is not None
        options = Steps(**{name: self.local[name] for name in ("keep", "decay", "beta2") if name in self.local})
        keep, with_muon = float(options.keep_for(scheme)), float(options.keep_for(scheme, muon=True))
        return {
            "keep": keep if keep == with_muon else f"{keep}, with Muon {with_muon}",
            "decay": float(options.decay_for(scheme)),
            "beta2": beta2_described(options.beta2),
        }


def parse_schemes(
    text: str, density: float, family: Family = "steps", ranks: Sequence[int] = (4,)
) -> tuple[SchemeChoice, ...]:
    """Parse schemes such as "dense,topk,skip_reduce:skip=2:form=direct,local_steps(every=4)/topk".

    `density` applies to schemes that take one and do not set it. Lists are joined by "+": "protect=*.bias+norm.*". `family` and
    `ranks` are the job's, for "default" and "bits=0.8". Raises ValueError for an unknown scheme or setting, with the nearest name.
    """
    items = (item.strip() for item in text.split(","))
    return tuple(_parse_method(item, density, family, ranks) for item in items if item)


def check_labels(choices: Sequence[SchemeChoice]) -> None:
    """Raise ValueError if two schemes have the same label."""
    labels = [choice.label for choice in choices]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--schemes names one twice: {', '.join(labels)}; give each scheme once, or other settings")


def try_out(choice: SchemeChoice, ranks: int) -> None:
    """Reduce one small bucket on `ranks` ranks in this process, to detect settings that cannot work.

    A third party's scheme must also declare whether it keeps a momentum, because the job's momentum would be applied on top.
    """

    def reduce(comm: LocalComm) -> None:
        if choice.local is not None:
            steps = _trial_steps(choice, comm)
            _ = steps.flush() if choice.steps == "local_steps" else steps.step()
            return
        report = choice.make().start().reduce(Bucket("trial", torch.zeros(TRIAL_ELEMENTS), 0), comm)
        if not isinstance(report, Report):
            raise TypeError(f"reduce must return a sparsync.Report, such as self.report(bucket), got {report!r}")

    try:
        LocalWorld(ranks).run(reduce)
        scheme = choice.make()
        # Only for third parties: this repository's schemes have tests for it.
        foreign = any(
            type(each).__module__.split(".")[0] not in ("sparsync", "sparsync_lab")
            for each in (scheme, *scheme.inner.values())
        )
        if foreign and (missing := undeclared(choice.make)):
            raise ValueError(missing)
    except Exception as error:
        raise ValueError(
            f"scheme {choice.label!r} cannot run on {ranks} ranks: {type(error).__name__}: {error}"
        ) from error


def check_optimizer(choices: Sequence[SchemeChoice], make: Callable[[], tuple[nn.Module, Optimizer]]) -> None:
    """Raise ValueError if steps around a scheme, or laprop or adamw, cannot train with what `make` returns."""
    for choice in choices:
        if choice.local is not None or choice.name in LAB_SCHEMES.values():
            model, optimizer = make()
            _check_steps(choice, model, optimizer)


def _check_steps(choice: SchemeChoice, model: nn.Module, optimizer: Optimizer) -> None:
    try:
        if isinstance(scheme := choice.make(), LongAdamW) and choice.local is None:
            scheme.replace(optimizer)
        else:
            LocalWorld(1).run(lambda comm: choice.make_local(model, optimizer, comm=comm))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{choice.label!r} cannot train this job: {error}") from error


def _trial_steps(choice: SchemeChoice, comm: LocalComm) -> Any:  # Any: as `make_local`
    """Wrap a scheme in steps for a model with one parameter per fragment."""
    assert choice.local is not None
    fragments = choice.local.get("fragments")
    layers = min(MOST_FRAGMENTS, max(8, fragments)) if isinstance(fragments, int) else 8
    model = nn.Sequential(*[nn.Linear(8, 8, bias=layers == 8) for _ in range(layers)])
    kind = SGD if choice.steps == "local_steps" else AdamW
    return choice.make_local(model, kind(model.parameters(), lr=0.0), comm=comm)


def asks_for_recipe(text: str) -> bool:
    """Tell whether one of these schemes is "default" or "bits=...", which depends on the job's optimizer."""
    return any(item.strip() == "default" or item.strip().startswith("bits=") for item in text.split(","))


def _written_out(text: str, family: Family, ranks: Sequence[int]) -> str:
    """Spell out the recipe of "default" or "bits=0.8"; return any other text unchanged."""
    try:
        bits = bits_of(text)
    except LookupError:
        return text
    found = {recipe(family, each, bits).text for each in ranks}
    if len(found) > 1:
        raise ValueError(
            f"{text!r} is {' and '.join(sorted(found))} with {' and '.join(map(str, ranks))} ranks; name one"
        )
    return found.pop()


def _parse_method(label: str, density: float, family: Family, ranks: Sequence[int]) -> SchemeChoice:
    text = _written_out(label, family, ranks)
    written, local, scheme = taken_apart(text, SYSTEMS)
    if not written:
        return _parse_scheme(label, scheme, None, "local_steps", density)
    steps = "local_steps" if written == "local_steps" else "adamw_steps"  # the name used in results and folders
    exchange_of(written, local, text)
    choice = _parse_scheme(label, scheme, local, steps, density)
    with suppress(LookupError):
        choice = replace(choice, auto=label if candidates(family, max(ranks), bits_of(label)) else "")
    try:
        LocalWorld(1).run(lambda comm: _trial_steps(choice, comm))
    except Exception as error:
        raise ValueError(f"the steps of {text!r} cannot be made: {type(error).__name__}: {error}") from error
    return choice


def _class(steps: str) -> Any:  # Any: the class
    home = import_module(f"sparsync.exchanges.{steps}")
    return home.LocalTraining if steps == "local_steps" else home.AdamWSteps


def _parse_scheme(
    label: str,
    text: str,
    local: dict[str, Any] | None,  # Any: as in SchemeChoice
    steps: str,
    density: float,
) -> SchemeChoice:
    name, config = parsed(text)
    name = LAB_SCHEMES.get(name, name)
    known = schemes.settings(name)
    if "density" in known:
        config.setdefault("density", density)
    choice = SchemeChoice(label, name, config, local, steps)
    choice.make()
    return choice
