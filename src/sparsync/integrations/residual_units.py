"""The units of residuals: gradients carry a learning rate and a loss scale, and what is left of older ones follows when these change.

Residuals follow the rate until it is a tenth of the highest rate so far. Down to there rate * residual stays the same, so that every
gradient is applied at its own rate, whenever it is sent. Below, residuals stay as they are, and what is sent late is applied at the lower
rate: where a schedule ends at zero they would grow without bound, and what clipping then cuts off, or the last step leaves, would be lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

FOLLOWED = 10.0  # highest rate / lowest rate that residuals follow: the most that one is scaled up by, in all


@dataclass
class ResidualUnits:
    """The learning rates and the loss scale that the residuals of one scheme are in."""

    rates: dict[str, float] = field(default_factory=dict)  # by parameter name; the one followed, not below the tenth
    highest: dict[str, float] = field(default_factory=dict)  # the highest rate so far, by parameter name
    scale: float | None = None  # None: there is no residual yet

    @classmethod
    def of(cls, scheme: Any) -> "ResidualUnits":  # Any: a Scheme or its reduce-scatter form
        """Return those of `scheme`. They stay on the scheme, so that a second handle continues where the first one stopped."""
        return vars(scheme).setdefault("_residual_units", cls())

    def follow(self, name: str, rate: float) -> float:
        """Return the factor by which the residual of a parameter comes to be in units of this rate, which it has from now on.

        The factor is old rate / new rate, where each counts as no less than 1 / FOLLOWED of the highest so far. While a rate is zero
        the residual stays as it is: nothing is applied until the rate changes again.
        """
        if rate == 0.0:
            return 1.0
        self.highest[name] = max(rate, self.highest.get(name, rate))
        new = max(rate, self.highest[name] / FOLLOWED)
        old = self.rates.get(name, new)
        self.rates[name] = new
        return old / new


class ResidualRescaler:
    """Rescales the residuals of `scheme` when the learning rate of `optimizer` or the scale of `scaler` has changed.

    `names` gives each parameter's name by its id. Without an optimizer the learning rate counts as constant, without a scaler the scale
    is 1. Raises TypeError for a scaler that is no torch.amp.GradScaler.
    """

    def __init__(
        self,
        scheme: Any,  # as ResidualUnits.of
        names: Mapping[int, str],
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; pass the scaler itself"
            )
        self.units = ResidualUnits.of(scheme)
        self.names, self.scaler = names, scaler
        self._scheme, self._optimizer = scheme, optimizer

    def use(self, scheme: Any) -> None:  # Any: as ResidualUnits.of
        """Rescale the residuals of another scheme from now on, which are in the units of the one before."""
        self._scheme = scheme
        vars(scheme)["_residual_units"] = self.units

    def rescale(self) -> None:
        """Multiply the residuals by `factors`; to be called once a step, before its first bucket."""
        if factors := self.factors():
            self._scheme.rescale_residual(factors)

    def factors(self) -> dict[str, float]:
        """Return the factor of each parameter whose units have changed since the last call, and take the new units for the old ones.

        The factor is that of `ResidualUnits.follow` times new scale / old scale.
        """
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # a host sync on CUDA
        before, self.units.scale = self.units.scale or scale, scale
        changed = dict.fromkeys(self.names.values(), scale / before) if before != scale else {}
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            rate = float(group["lr"])
            for name in (self.names[id(each)] for each in group["params"] if id(each) in self.names):
                factor = self.units.follow(name, rate)
                if factor != 1.0:
                    changed[name] = changed.get(name, 1.0) * factor
        return changed
