"""The scheme under test, with the promises of its author."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from sparsync.base.scheme import Scheme
from sparsync.base.state import State
from sparsync.testing.world import COUNT, Step, integers, reals, run, started

# Published rules that are otherwise sound break these. Integrations rely on the others. A rule without "nonfinite" hides NaN and Inf from
# loss scalers, and a rule without "values" moves parameters whose gradient is zero.
MAY_BE_LEFT_OUT = ("examination", "scale", "balance", "values", "nonfinite")
_DENSITIES = ("density", "density_down")


@dataclass
class SchemeUnderTest:
    """One scheme with one setting, and what must hold for it.

    What it does in each world is run once and shared by the invariants.
    """

    make: Callable[[], Scheme]
    # The same scheme with nothing left out, which must be the dense mean; None: there is no such setting.
    complete: Callable[[], Scheme] | None = None
    worlds: tuple[int, ...] = (1, 2, 4)  # the numbers of ranks it is run with; those it is made for
    exact: torch.dtype = torch.float32  # gradients of this type make its sums of small integers exact
    tolerance: float = 0.0  # of conservation, relative to the largest gradient; above 0 only where no type is exact
    warmup: int = 0  # steps before the scheme starts to leave anything out
    skips_ranks: bool = False  # it leaves out whole ranks, whose NaN and Inf need not show in the result
    # What is written is the mean of what left the residuals; False for rules that change it on its way, such as momentum.
    conserves: bool = True
    # The share of the elements that is sent in a step; None: the smallest `density` or `density_down` of the scheme and of those that it
    # holds, or 1.
    density: float | None = None
    # Invariants that the scheme breaks by its rule, of those in MAY_BE_LEFT_OUT, each with the reason, which `check_scheme` returns.
    without: Mapping[str, str] = field(default_factory=dict)
    # Some elements have no residual, and are summed in the gradient's type, whose rounding is lost.
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
        """Why residuals and what is written need not add up to what came in; None: they do."""
        if not self.has_residual:
            return "there is no residual"
        return None if self.conserves else "what is written is no mean of what left the residuals: conserves=False"

    @property
    def share(self) -> float:
        """The share of the elements that is sent in a step."""
        if self.density is not None:
            return self.density
        scheme = self.make()
        found = (getattr(each, name, None) for each in (scheme, *scheme.inner.values()) for name in _DENSITIES)
        return min((float(density) for density in found if density is not None), default=1.0)

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient; the rest is dropped."""
        return float(getattr(self.make(), "decay", 1.0))

    @property
    def exact_steps(self) -> int:
        """The number of steps at the beginning of a trace whose sums are exact."""
        return self.warmup + 2

    def world(self, P: int) -> int:
        """Return the smallest of its worlds that has at least P ranks, or the largest there is."""
        return min((world for world in self.worlds if world >= P), default=max(self.worlds))

    def start(self, P: int) -> list[State]:
        """Return new states for P ranks of one scheme, which remembers nothing itself."""
        return started(self.make(), P)

    def trace(self, P: int) -> list[Step]:
        """Return some exact steps in a world of P ranks, then one with reals: run once, and the same list each time."""
        if P not in self._traces:
            exact = integers(P, COUNT, self.exact_steps, dtype=self.exact)
            self._traces[P] = run(self.start(P), [*exact, [real.to(self.exact) for real in reals(P, COUNT, 1)[0]]])
        return self._traces[P]
