"""The rules of exchanged steps, from the settings of an optimizer: AdamW for most parameters, Muon for matrices.

Both send the same, see `adamw_steps`. They differ in what they do with the mean step, which is the same on all ranks. AdamW moves the
weights along the momentum of the means. Muon makes all singular values of that momentum about 1 first (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; "Muon is Scalable for LLM Training", arXiv 2502.16982).
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Muon, Optimizer

from sparsync.core import ParameterSpan, Span
from sparsync.kernels.step_reference import Move
from sparsync.runtime.findings import check_optimizer, innermost, unrelated, warn_or_raise

_LONGEST_BETA2 = 0.999  # a smaller beta2 of the optimizer is raised to this
_TOGETHER = 1 << 26  # elements of matrices that are moved, and so copied, at once
_RMS = 0.2  # the RMS of an AdamW step's elements over its rate (arXiv 2502.16982, section 2.2)


@dataclass(frozen=True)
class AdamWRule:
    """The settings of a parameter group of AdamW in one step."""

    rate: float
    decay: float
    beta1: float
    beta2: float
    eps: float

    def sent_rate(self, shape: Sequence[int]) -> float:
        """Return the factor of a parameter's normalised gradient before it is sent."""
        return self.rate

    def remembers(self, asked: float | None) -> float:
        """Choose beta2 of the second moments: as asked, or to suit one rank's gradients, which are noisier than their mean."""
        return max(self.beta2, _LONGEST_BETA2) if asked is None else asked

    def move(self, t: int) -> Move:
        """Compute the coefficients of a parameter's `t`-th step."""
        return self.beta1, 1 - self.rate * self.decay, 1 / (1 - self.beta1**t)


@dataclass(frozen=True)
class MuonRule:
    """The settings of a parameter group of Muon in one step, as torch.optim.Muon has them."""

    rate: float
    decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    iterations: int
    adjust: str | None

    beta2, eps = 0.95, 1e-8  # Muon has no second moments: AdamW's usual values for transformers

    def sent_rate(self, shape: Sequence[int]) -> float:
        """Compute the rate at which an AdamW step is as long as Muon's, so that the residual has the scale of the weights' moves."""
        return self.applied_rate(shape) / (_RMS * math.sqrt(max(shape)))

    def remembers(self, asked: float | None) -> float:
        """Choose beta2 of the second moments, which Muon itself does not have."""
        return self.beta2 if asked is None else asked

    def move(self, t: int) -> Move:
        """Return the coefficients for the momentum and the decay; `move_matrices_` then moves the weights."""
        return self.momentum, 1 - self.rate * self.decay, 0.0

    @property
    def memory(self) -> float:
        """The weight of the last step's momentum in a step's direction: Nesterov's adds the mean once more."""
        return self.momentum**2 if self.nesterov else self.momentum

    def applied_rate(self, shape: Sequence[int]) -> float:
        """Compute the rate of a parameter's orthogonal step."""
        rows, columns = shape
        if self.adjust == "match_rms_adamw":
            return self.rate * _RMS * math.sqrt(max(rows, columns))
        return self.rate * math.sqrt(max(1, rows / columns))


Rule = AdamWRule | MuonRule
Value = TypeVar("Value")


class ParameterGroups:
    """The rules of the trained parameters, by name, read from their optimizers' groups in each step.

    Raises ValueError if optimizers and `trained` do not have the same parameters, and as `rules_of`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], trained: Mapping[str, nn.Parameter]) -> None:
        self.optimizers, self._trained = optimizers, trained
        self.rules = rules_of(optimizers)  # by number of the group
        self.number, self._members = _group_numbers(optimizers, trained), _members(optimizers)
        self._runs: dict[object, tuple[object, list[tuple[ParameterSpan, Span]]]] = {}

    def read(self) -> None:
        """Read the settings of the optimizers. Raises ValueError for a setting that steps do not support."""
        _check_finite(self.optimizers)
        self.rules = rules_of(self.optimizers)
        if (members := _members(self.optimizers)) != self._members:
            self.number, self._members = _group_numbers(self.optimizers, self._trained), members

    def counted(
        self,
        key: object,
        taking: Sequence[ParameterSpan],
        counts: dict[str, int],
        value_of: Callable[[Rule, ParameterSpan, int], Value],
    ) -> list[tuple[Span, Value]]:
        """Add one to the count of each parameter of `taking`; return the spans of equal values, with the values.

        `value_of` gets the rule of a parameter, its place, and its count. `key` names the counted steps and the bucket. Later calls with
        the same `taking` look at only one parameter per run, because equal counts stay equal. Call `recount` after you set counts.
        """
        state = taking, self.number, [isinstance(rule, MuonRule) for rule in self.rules]
        counts.update({entry.name: counts[entry.name] + 1 for entry in taking})
        known = self._runs.get(key)
        if known is None or known[0] != state:
            known = self._runs[key] = state, self._laid(taking, counts)
        made: dict[object, Value] = {}  # many runs have the same
        spans: list[tuple[Span, Value]] = []
        for first, span in known[1]:
            same = self._same(first, counts)
            if same not in made:
                made[same] = value_of(self.rules[self.number[first.name]], first, counts[first.name])
            value = made[same]
            if spans and spans[-1][0].stop == span.start and (spans[-1][1] is value or spans[-1][1] == value):
                spans[-1] = Span(spans[-1][0].start, span.stop), value
            else:
                spans.append((span, value))
        return spans

    def recount(self) -> None:
        """Look at the counts of all parameters again."""
        self._runs.clear()

    def _laid(self, taking: Iterable[ParameterSpan], counts: Mapping[str, int]) -> list[tuple[ParameterSpan, Span]]:
        """Join adjacent parameters with the same rule, count and, under Muon, shape; return the first one and the span of each run."""
        runs: list[tuple[ParameterSpan, Span]] = []
        for entry in taking:
            if (
                runs
                and runs[-1][1].stop == entry.span.start
                and self._same(runs[-1][0], counts) == self._same(entry, counts)
            ):
                first, span = runs[-1]
                runs[-1] = first, Span(span.start, entry.span.stop)
            else:
                runs.append((entry, entry.span))
        return runs

    def _same(self, entry: ParameterSpan, counts: Mapping[str, int]) -> object:
        number = self.number[entry.name]
        return number, counts[entry.name], entry.shape if isinstance(self.rules[number], MuonRule) else ()


def move_matrices_(given: Iterable[tuple[Tensor, Tensor, MuonRule]], skip: Tensor | None = None) -> None:
    """Move matrices by orthogonal steps; `given` has each one, its direction [n] and its rule.

    Nothing changes if `skip`, one number, is not zero. Matrices with the same rule and the same shorter side are moved together.
    """
    groups = dict[tuple[MuonRule, int], list[tuple[Tensor, Tensor]]]()
    for target, each, rule in given:
        matrix = each.view(target.shape)
        groups.setdefault((rule, min(matrix.shape)), []).append((target, matrix))
    for (rule, _), pairs in groups.items():
        pairs.sort(key=lambda pair: (max(pair[1].shape), pair[1].shape))  # equal shapes in a row
        ends = accumulate(matrix.numel() for _, matrix in pairs)
        for _, some in groupby(zip(pairs, ends, strict=True), key=lambda each: each[1] // _TOGETHER):
            moved, matrices = zip(*(pair for pair, _ in some), strict=True)
            with torch.autocast(matrices[0].device.type, enabled=False):  # the loop may call `step` under autocast
                steps = orthogonalised(list(matrices), rule.coefficients, rule.iterations, skip)
            torch._foreach_mul_(steps, [rule.applied_rate(each.shape) for each in moved])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_sub_(moved, steps)  # pyright: ignore[reportPrivateImportUsage]


def orthogonalised(
    matrices: list[Tensor], coefficients: tuple[float, float, float], iterations: int, skip: Tensor | None = None
) -> list[Tensor]:
    """Approximate U V^T for each matrix [rows, columns] = U S V^T, by Newton-Schulz iterations; zero stays zero.

    The shorter sides must be equal, and matrices of one shape or its transpose adjacent. Returns zeros if `skip`, one number, is not zero.
    Computes in bfloat16, as torch.optim.Muon does. Ranks get the same bits if they have the same processor and number of threads.
    """
    a, b, c = coefficients
    lying = [each if each.shape[0] <= each.shape[1] else each.T for each in matrices]
    runs = [list(run) for _, run in groupby(lying, key=lambda each: each.shape)]
    sizes = [len(run) for run in runs]
    norms = torch.stack(torch._foreach_norm(matrices)).clamp_(min=1e-30)  # pyright: ignore[reportPrivateImportUsage]
    if skip is not None:
        norms.masked_fill_(skip != 0, torch.inf)
    stacks = list[Tensor]()
    for run, norm in zip(runs, norms.split(sizes), strict=True):
        x = torch.stack(run)
        scaled = torch.empty_like(x, dtype=torch.bfloat16)
        stacks.append(torch.div(x, norm.view(-1, 1, 1), out=scaled))  # all singular values are at most 1
    gram = stacks[0].new_empty(len(lying), lying[0].shape[0], lying[0].shape[0])
    for _ in range(iterations):
        for x, part in zip(stacks, gram.split(sizes), strict=True):
            torch.bmm(x, x.mT, out=part)
        weight = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # of all shapes at once
        stacks = [torch.baddbmm(x, part, x, beta=a) for x, part in zip(stacks, weight.split(sizes), strict=True)]
    steps, left = list[Tensor](), iter(matrices)
    for x in stacks:
        shapes, flat = [each.shape for each in islice(left, len(x))], x.to(matrices[0].dtype)
        upright = flat if all(each == x.shape[1:] for each in shapes) else flat.mT.contiguous()
        steps += [(flat if each == x.shape[1:] else upright)[number] for number, each in enumerate(shapes)]
    return steps


def optimizers_of(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """List the optimizers whose steps are taken, without wrappers such as Accelerate's, or ones that hold several.

    Raises TypeError for anything but an optimizer.
    """
    if not isinstance(given, Optimizer):
        check_optimizer(given)
        return [each for one in given for each in optimizers_of(one)]
    inner = innermost(given)
    members = [each for value in vars(inner).values() for each in _listed(value) if isinstance(each, Optimizer)]
    return [each for one in members for each in optimizers_of(one)] if len(members) > 1 else [inner]


def exchangeable(given: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """List the optimizers whose steps are taken. Raises TypeError or ValueError if their steps cannot be exchanged."""
    optimizers = optimizers_of(given)
    rules_of(optimizers)
    return optimizers


def rules_of(optimizers: Iterable[Optimizer]) -> list[Rule]:
    """Read the rule of each parameter group. Raises TypeError or ValueError for an optimizer whose steps cannot be exchanged."""
    return [_rule_of(each, group) for each in optimizers for group in each.param_groups]


def _rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:  # Any: settings
    kind = next((each for each in (Muon, AdamW, Adam) if isinstance(optimizer, each)), None)
    if kind is None:
        raise TypeError(
            f"only steps of torch.optim.AdamW, Adam and Muon can be exchanged, got {type(optimizer).__name__}; for others attach with "
            "exchange=sparsync.Gradients() or exchange=sparsync.LocalSteps(every=...)"
        )
    # Torch wraps `step` in each class.
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(kind.step):
        raise TypeError(
            f"{type(optimizer).__name__} has a `step` that is not {kind.__name__}'s, and only the latter would be exchanged; exchange what "
            "it changes, with exchange=sparsync.LocalSteps(every=...), or gradients, with exchange=sparsync.Gradients()"
        )
    if isinstance(optimizer, Muon):
        return _muon_rule(optimizer, group)
    if group.get("amsgrad") or group.get("maximize"):
        raise ValueError("exchanged steps support neither amsgrad nor maximize; make the optimizer without them")
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        raise ValueError(
            "exchanged steps decay weights as AdamW does, and this Adam decays gradients; use torch.optim.AdamW"
        )
    if not group["eps"] > 0:
        raise ValueError(f"eps must be above 0, or elements without gradient become 0 / 0, got {group['eps']}")
    beta1, beta2 = group["betas"]
    return AdamWRule(*_rate_and_decay(group), float(beta1), float(beta2), float(group["eps"]))


def _muon_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> MuonRule:  # Any: settings
    for parameter in group["params"]:
        if parameter.dim() != 2:
            raise ValueError(
                f"Muon updates matrices only, and this {type(optimizer).__name__} has a parameter of shape {list(parameter.shape)}; "
                "give it to AdamW"
            )
        if hasattr(parameter, "to_local"):
            raise ValueError(
                "Muon needs whole matrices, and fully_shard has split them; use DistributedDataParallel, or AdamW for all parameters"
            )
    given = float(group["momentum"]), bool(group["nesterov"]), tuple(group["ns_coefficients"]), int(group["ns_steps"])
    return MuonRule(*_rate_and_decay(group), *given, group["adjust_lr_fn"])


def _rate_and_decay(group: Mapping[str, Any]) -> tuple[float, float]:  # Any: settings
    return float(group["lr"]), float(group["weight_decay"])


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, (list, tuple)) else [value]


def _group_numbers(optimizers: Sequence[Optimizer], trained: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Number the parameter group of each trained parameter, by name. Raises ValueError if optimizers and model do not match."""
    groups = [group for each in optimizers for group in each.param_groups]
    numbered = [(each, i) for i, group in enumerate(groups) for each in group["params"]]
    by_id = {id(each): i for each, i in numbered}
    warn_or_raise(unrelated(optimizers, {id(each) for each in trained.values()}, refused=ValueError))
    otherwise = "or attach with exchange=sparsync.Gradients()"
    if missing := [name for name, each in trained.items() if id(each) not in by_id]:
        raise ValueError(
            f"the optimizer lacks {', '.join(missing)}; pass it all trained parameters, freeze these, {otherwise}"
        )
    known = {id(each): name for name, each in trained.items()}
    if len(by_id) < len(numbered):
        seen: set[int] = set()
        twice = next(each for each, _ in numbered if id(each) in seen or seen.add(id(each)))
        raise ValueError(
            f"{known.get(id(twice), 'a parameter')} is in two parameter groups; put it into one group only"
        )
    if shapes := [tuple(each.shape) for each, _ in numbered if id(each) not in known and each.requires_grad]:
        raise ValueError(
            f"the optimizer has parameters that the model lacks, of shapes {shapes}; pass the whole model, or "
            f"all models that it trains, as in attach([model, other], ...), {otherwise}"
        )
    return {name: by_id[id(each)] for name, each in trained.items()}


def _members(optimizers: Iterable[Optimizer]) -> list[list[int]]:
    """List the ids of the parameters in each parameter group."""
    return [[id(parameter) for parameter in group["params"]] for each in optimizers for group in each.param_groups]


def _check_finite(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for a rate, decay or eps that is not finite."""
    for number, group in enumerate(group for each in optimizers for group in each.param_groups):
        for key in ("lr", "weight_decay", "eps"):
            if not math.isfinite(float(group.get(key, 0.0))):
                raise ValueError(
                    f"{key} of parameter group {number} is {float(group[key])}; it must be finite, look at its schedule"
                )
