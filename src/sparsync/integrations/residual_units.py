"""The units of residuals: gradients carry a learning rate and a loss scale, and what is left of older ones follows when these change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


@dataclass
class ResidualUnits:
    """The learning rates and the loss scale that the residuals of one scheme are in."""

    rates: dict[str, float] = field(default_factory=dict)  # by parameter name
    scale: float | None = None  # None: there is no residual yet

    @classmethod
    def of(cls, scheme: Any) -> "ResidualUnits":  # Any: a Scheme or its reduce-scatter form
        """Return those of `scheme`. They stay on the scheme, so that a second handle continues where the first one stopped."""
        return vars(scheme).setdefault("_residual_units", cls())


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

    def rescale(self) -> None:
        """Multiply the residuals by `factors`; to be called once a step, before its first bucket."""
        if factors := self.factors():
            self._scheme.rescale_residual(factors)

    def factors(self) -> dict[str, float]:
        """Return the factor of each parameter whose units have changed since the last call, and take the new units for the old ones.

        The factor is old rate / new rate, so that rate * residual stays the same, times new scale / old scale. While a rate is zero
        the residual stays as it is: nothing is applied until the rate changes again.
        """
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # a host sync on CUDA
        before, self.units.scale = self.units.scale or scale, scale
        changed = dict.fromkeys(self.names.values(), scale / before) if before != scale else {}
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            rate = float(group["lr"])
            for name in (self.names[id(each)] for each in group["params"] if id(each) in self.names and rate != 0.0):
                old = self.units.rates.get(name, rate)
                if old != rate:
                    changed[name] = changed.get(name, 1.0) * old / rate
                self.units.rates[name] = rate
        return changed
