"""The scheme under test, with its author's promises."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.testing.world import COUNT, Step, integers, reals, run, started

# Some published schemes break these, and are otherwise sound. Integrations rely on the others. Without "nonfinite" a scheme hides NaN and
# Inf from loss scalers, and without "values" it moves parameters whose gradient is zero.
MAY_BE_LEFT_OUT = ("examination", "scale", "balance", "values", "nonfinite")
_DENSITIES = ("density", "density_down")


@dataclass
class SchemeUnderTest:
    """One scheme with one setting, and its promises.

    The invariants share one run per world.
    """

    make: Callable[[], Scheme]
    # The same scheme with nothing left out, which must be the dense mean; None: there is no such setting.
    complete: Callable[[], Scheme] | None = None
    worlds: tuple[int, ...] = (1, 2, 4)  # the numbers of ranks to run with, which the scheme must support
    exact: torch.dtype = torch.float32  # a gradient type with which its sums of small integers are exact
    tolerance: float = 0.0  # of conservation, relative to the largest gradient; above 0 only if no type is exact
    warmup: int = 0  # steps before the scheme starts to leave anything out
    skips_ranks: bool = False  # it leaves out whole ranks, whose NaN and Inf need not show in the result
    # The result is the mean of what left the residuals; False for schemes that change it, such as by a momentum.
    conserves: bool = True
    # The share of the elements that a step sends; None: the smallest `density` or `density_down` of the scheme and schemes inside, or 1.
    density: float | None = None
    # Invariants of MAY_BE_LEFT_OUT that the scheme breaks by design, with the reasons, which `check_scheme` returns.
    without: Mapping[str, str] = field(default_factory=dict)
    # Some elements have no residual, and are summed in the gradient's type, so that rounding errors are lost.
    sums_in_gradient_type: bool = False
    _traces: dict[int, list[Step]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.worlds or min(self.worlds) < 1:
            raise ValueError(f"worlds must be at least one number of ranks, each at least 1, got {self.worlds}")
        for invariant, reason in self.without.items():
            if invariant not in MAY_BE_LEFT_OUT or not reason:
                raise ValueError(
                    f"without takes a reason for each invariant that is left out, of {', '.join(MAY_BE_LEFT_OUT)}, got "
                    f"{invariant!r}: {reason!r}; the others hold for every scheme, or have a separate promise, such as conserves"
                )

    @property
    def has_residual(self) -> bool:
        return self.make().has_residual

    @property
    def unaccounted(self) -> str | None:
        """Why residuals and results need not add up to the gradients; None if they must."""
        if not self.has_residual:
            return "there is no residual"
        return None if self.conserves else "what is written is no mean of what left the residuals: conserves=False"

    @property
    def share(self) -> float:
        """The share of the elements that a step sends."""
        if self.density is not None:
            return self.density
        scheme = self.make()
        densities = (getattr(part, name, None) for part in (scheme, *scheme.inner.values()) for name in _DENSITIES)
        return min((float(density) for density in densities if density is not None), default=1.0)

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient; the rest is dropped."""
        return float(getattr(self.make(), "decay", 1.0))

    @property
    def exact_steps(self) -> int:
        """The number of first steps of a trace with exact sums."""
        return self.warmup + 2

    def world(self, P: int) -> int:
        """Choose the smallest world with at least P ranks, or the largest world."""
        return min((world for world in self.worlds if world >= P), default=max(self.worlds))

    def start(self, P: int) -> list[State]:
        """Create states for P ranks of one scheme."""
        return started(self.make(), P)

    def trace(self, P: int) -> list[Step]:
        """Run some exact steps in a world of P ranks, then one with reals. Cached."""
        if P not in self._traces:
            exact = integers(P, COUNT, self.exact_steps, dtype=self.exact)
            self._traces[P] = run(self.start(P), [*exact, [real.to(self.exact) for real in reals(P, COUNT, 1)[0]]])
        return self._traces[P]
