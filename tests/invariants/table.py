"""The table of schemes: each invariant of sparsync.testing runs on every row, so one line here tests a new scheme."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from sparsync.base.scheme import Scheme
from sparsync.schemes import AutoProtect, Dense, PerParameter, SkipReduce, TopK
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.exdyna import ExDyna
from sparsync.schemes.in_turn import InTurn
from sparsync.schemes.micro import MiCRO
from sparsync.schemes.oktopk import OkTopk
from sparsync.schemes.quantized import Quantized
from sparsync.schemes.two_shot import TwoShot
from sparsync.testing import SchemeUnderTest
from sparsync_lab.rivals.demo import DeMo
from sparsync_lab.rivals.dgc import DGC
from sparsync_lab.rivals.gtopk import GTopK
from sparsync_lab.rivals.loco import LoCo
from sparsync_lab.rivals.onebit_adam import OneBitAdam
from sparsync_lab.rivals.powersgd import PowerSGD
from sparsync_lab.rivals.sparse_loco import SparseLoCo
from sparsync_lab.rivals.topk_dsa import TopKDSA

# The first row of a family runs in all worlds, other rows in one of these two.
WORLDS = (4, 5)  # an even number and power of two, and a prime
# Rows that hold in only one of them: gTopk's tree is balanced for powers of two, and PowerSGD's residual with int8 factors overflows on 4
# ranks if gradients are near the largest number.
ONLY_IN = {"gtopk": 4, "powersgd-int8": 5}
SMALLEST_WORLDS = (1, 2)  # only in the slow tests
LARGE_WORLDS = (3, 8, 13, 16)  # only in the slow tests


@dataclass(frozen=True)
class Row:
    """One setting of a scheme. `make` is called once per rank."""

    id: str
    make: Callable[[], Scheme]
    complete: Callable[[], Scheme] | None  # as in SchemeUnderTest
    has_residual: bool = False
    node_size: int = 1  # worlds of more than one rank must be a multiple of it
    by_ranks: str | None = None  # the same row divided by P, if this one divides by the contributors
    wire_bits: int = 24  # integers below 2 ** wire_bits are sent without rounding
    observes: int = 0  # steps before the scheme begins to leave anything out
    exact_in: torch.dtype = torch.float32  # as SchemeUnderTest.exact
    tolerance: float = 0.0  # as in SchemeUnderTest
    conserves: bool = True  # as in SchemeUnderTest
    sums_in_gradient_type: bool = False  # as in SchemeUnderTest
    without: Mapping[str, str] = field(default_factory=dict)  # as in SchemeUnderTest
    slow: bool = False  # only in the slow tests

    @property
    def family(self) -> tuple[type[Scheme], bool]:
        return type(self.make()), self.node_size > 1

    def worlds(self, sizes: tuple[int, ...] = WORLDS) -> tuple[int, ...]:
        """Select the numbers of ranks in which the row runs and that are whole nodes; one rank needs no nodes."""
        if self.id not in FIRST_OF_FAMILIES:
            drawn = WORLDS[zlib.crc32(self.id.encode()) % len(WORLDS)]
            own = next((P for row, P in ONLY_IN.items() if self.id.startswith(row)), drawn)
            sizes = tuple({own if own % self.node_size == 0 else WORLDS[0]} & {*sizes})
        return tuple(P for P in sizes if P == 1 or P % self.node_size == 0)

    @cached_property
    def subject(self) -> SchemeUnderTest:
        """The scheme under test, shared by all tests of this row, so that each world runs once."""
        return self.subject_in(self.worlds())

    def subject_in(self, worlds: tuple[int, ...]) -> SchemeUnderTest:
        return SchemeUnderTest(
            self.make,
            self.complete,
            worlds,
            exact=self.exact_in,
            warmup=self.observes,
            skips_ranks=self.id.startswith(("skip", "ring", "random")),
            tolerance=self.tolerance,
            conserves=self.conserves,
            sums_in_gradient_type=self.sums_in_gradient_type,
            without=self.without,
        )


def _dense(id: str, make: Callable[[], Scheme], wire_bits: int = 24) -> Row:
    return Row(id, make, make, wire_bits=wire_bits)


def _sparse(id: str, make: Callable[..., Scheme], density: float, exact: bool = True, slow: bool = False) -> Row:
    """Make a sparse row; `exact`: the scheme sends the requested share, not what the last step's threshold selects."""
    complete = (lambda: make(density=1.0)) if exact else None
    return _keeping(id, lambda: make(density=density), complete, slow=slow)


def _keeping(
    id: str, make: Callable[[], Scheme], complete: Callable[[], Scheme] | None = None, **more: Any
) -> Row:  # Any: the fields of Row
    """Make a row of a scheme with a residual."""
    return Row(id, make, complete, has_residual=True, **more)


def _without(row: Row, **reasons: str) -> Row:
    return replace(row, without={**row.without, **reasons})


def _skip(  # Any: what `make` takes
    id: str,
    make: Callable[..., SkipReduce | AutoProtect],
    by_ranks: str | None = None,
    slow: bool = False,
    **config: Any,
) -> Row:
    scheme = make(**config)
    skipping = scheme.scheme if isinstance(scheme, AutoProtect) else scheme
    without = {}
    if skipping.mode == "naive":
        without["examination"] = "always leaves out the same ranks of the same elements"
    if skipping.feedback or skipping.divide_by == "ranks":
        without["scale"] = "divides by all ranks, also what some are left out of"
    return Row(
        id,
        lambda: make(**config),
        lambda: make(**{**config, "skip": 0}),
        has_residual=skipping.feedback,
        node_size=skipping.node_size,
        by_ranks=by_ranks,
        observes=scheme.observe_steps if isinstance(scheme, AutoProtect) else 0,
        without=without,
        slow=slow,
    )


def _mixed(density: float) -> PerParameter:
    """Make a mix of three schemes in one bucket; at full density each of them is dense."""
    return PerParameter(TopK(density), {"*.bias": Dense(), "head.*": ExactOkTopk(density)})


PROTECTED: dict[str, dict[str, Any]] = {  # Any: the fields of SkipReduce
    "all": {},
    "names": {"protect": ("embed.weight", "head.bias")},
    "patterns": {"protect": ("*.bias", "emb*")},
    "auto": {"observe_steps": 2, "share": 0.3},  # of AutoProtect
}
DIVISORS: dict[str, dict[str, Any]] = {  # Any: the fields of SkipReduce
    "contributors": {"divide_by": "contributors"},
    "ranks": {"divide_by": "ranks"},
    "feedback": {"divide_by": "ranks", "feedback": True},
}


def _skip_rows() -> list[Row]:
    """Make every combination of settings; all are slow but twelve, which cover each pair of settings."""
    modes, forms, node_sizes = ("random", "naive"), ("ring", "direct"), (1, 2)

    def row(mode: int, form: int, divisor: int, nodes: int, protect: int) -> Row:
        divide_by, protection = list(DIVISORS)[divisor], list(PROTECTED)[protect]
        # The three two-valued settings follow from the other two, each by a different rule.
        chosen = ((divisor + protect) % 2, (divisor + protect // 2) % 2, (divisor + protect + protect // 2) % 2)
        start = f"skip-{modes[mode]}-{forms[form]}"
        end = f"{('flat', 'nodes')[nodes]}-{protection}"
        return _skip(
            f"{start}-{divide_by}-{end}",
            AutoProtect.skip_reduce if protection == "auto" else SkipReduce,
            f"{start}-ranks-{end}" if divide_by == "contributors" else None,
            (mode, form, nodes) != chosen,
            mode=modes[mode],
            form=forms[form],
            node_size=node_sizes[nodes],
            **DIVISORS[divide_by],
            **PROTECTED[protection],
        )

    return [row(*each) for each in product(range(2), range(2), range(len(DIVISORS)), range(2), range(len(PROTECTED)))]


def _rounded(make: Callable[..., Scheme], name: str, values: str, **config: Any) -> Row:  # Any: the fields of a scheme
    exact_in = torch.float32 if "float" in values else torch.float64
    return _keeping(f"{name}-{values}", partial(make, values=values, **config), exact_in=exact_in)


def _rounded_rows() -> list[Row]:
    """Make rows for every format with a scheme that sends values to all and one that sends to owners; otherwise one of each kind."""
    makes: list[tuple[str, Callable[..., Scheme], tuple[str, ...]]] = [
        ("topk", TopK, ("bfloat16", "int4")),
        ("exact_micro", ExactMiCRO, ("bfloat16", "int8", "int4")),
        ("exact_exdyna", ExactExDyna, ("bfloat16", "int8")),
        ("exact_oktopk", ExactOkTopk, ("bfloat16", "float16", "int8", "int4")),
    ]
    rows = [_rounded(make, name, values, density=0.1) for name, make, formats in makes for values in formats]
    quick = ("topk-bfloat16", "exact_oktopk-int4")
    return [replace(row, slow=row.id not in quick) for row in rows]


def _low_rank(id: str, **config: Any) -> Row:  # Any: the fields of PowerSGD
    """Make a row of PowerSGD. Orthogonal factors are no integers, so sums are float32-accurate; a huge least_saving sends all whole."""
    whole = partial(PowerSGD, least_saving=1e9) if config.get("factors", "float32") == "float32" else None
    without = {"scale": "writes the part of a gradient that is of low rank"}
    return _keeping(id, partial(PowerSGD, **config), whole, tolerance=1e-5, without=without)


def _low_rank_rows() -> list[Row]:
    return [
        _low_rank("powersgd-1", rank=1, least_saving=1.0),
        _low_rank("powersgd-2", rank=2, least_saving=0.1),
        *[_low_rank(f"powersgd-{factors}", rank=2, least_saving=0.1, factors=factors) for factors in ("int8", "int4")],
    ]


def _two_shot_rows() -> list[Row]:
    formats = ("bfloat16", "float16", "int8", "int3", "sign")
    contributors = partial(TwoShot, density=0.1, values="float32", divide_by="contributors")
    return [
        *[_sparse(f"two-shot-{density}", partial(TwoShot, values="float32"), density) for density in (0.001, 0.1, 0.5)],
        _keeping("two-shot-contributors", contributors, partial(contributors, density=1.0), conserves=False),
        _keeping("two-shot-contributors-int4", partial(contributors, values="int4"), conserves=False),
        _keeping("two-shot-decay", partial(TwoShot, 0.1, "float32", decay=0.5)),
        *[_rounded(TwoShot, "two-shot-all", values, density=1.0) for values in ("bfloat16", "int4", "sign")],
        *[_rounded(TwoShot, "two-shot", values, density=0.1) for values in formats],
        *_two_shot_down_rows(),
    ]


def _two_shot_down_rows() -> list[Row]:
    """Make rows whose density or values differ between the way to owners and to all; all elements one way, or neither."""
    return [
        _two_shot_down("more", "float32", density=0.1, density_down=0.5),
        _two_shot_down("all", "float32", density=0.1, density_down=1.0),
        _two_shot_down("part", "float32", density=1.0, density_down=0.1),
        _two_shot_down("more", "sign", density=0.1, density_down=0.4),
        _two_shot_down("finer", "sign", density=1.0, values_down="int3"),
        _two_shot_down("finer", "ternary", density=1.0, values_down="int3"),
        _two_shot_down("coarser", "float32", density=1.0, values_down="bfloat16"),
        _two_shot_down("part-finer", "sign", density=1.0, density_down=0.3, values_down="int4"),
        _two_shot_down("all-finer", "int4", density=0.2, density_down=1.0, values_down="bfloat16"),
        replace(
            _two_shot_down("contributors", "sign", density=0.1, density_down=0.4, divide_by="contributors"),
            conserves=False,
        ),
        _two_shot_down("all-contributors", "int4", density=1.0, density_down=0.2, divide_by="contributors"),
    ]


def _two_shot_down(how: str, values: str, **config: Any) -> Row:  # Any: the fields of TwoShot
    row = _rounded(TwoShot, f"two-shot-down-{how}", values, **config)
    exact = {values, config.get("values_down", values)} == {"float32"}
    row = replace(row, complete=partial(TwoShot, 1.0, "float32") if exact else None)
    if "divide_by" in config:
        return row
    if config["density"] < 1:
        return _without(row, scale="divides by all ranks, also sums of the owner's elements alone")
    if values == "sign" and "density_down" in config:
        return _without(row, scale="sends the largest elements to owners as small as the mean magnitude")
    return row


def _in_turn_rows() -> list[Row]:
    whole = partial(InTurn, values="float32", values_down="float32")
    rounded = partial(_rounded, InTurn, "in-turn")
    return [
        *[_keeping(f"in-turn-{every}", partial(whole, every=every), partial(whole, every=1)) for every in (1, 3, 16)],
        _keeping("in-turn-decay", partial(whole, decay=0.5)),
        *[rounded(values) for values in ("bfloat16", "int4", "sign")],
        _rounded(partial(InTurn, every=2, values_down="sign"), "in-turn-both", "sign"),
    ]


def _quantized_rows() -> list[Row]:
    formats = ("int8", "int4", "int3", "sign")
    return [
        *[_rounded(Quantized, "quantized", values) for values in formats],
        _rounded(partial(Quantized, decay=0.5), "quantized-decay", "int8"),
        _keeping("loco", partial(LoCo, reset_every=3), conserves=False, exact_in=torch.float64),
    ]


def _tile_rows() -> list[Row]:
    """Make rows of SparseLoCo and DeMo: divided by P they conserve their input except for decay; by the senders, as published, not."""
    loco = partial(SparseLoCo, per_tile=9, divide_by="ranks")
    demo = partial(DeMo, per_tile=9, divide_by="ranks", sign=False)
    double = torch.float64
    exact = partial(loco, values="float32", decay=0.5)
    return [
        _keeping("sparse-loco", partial(SparseLoCo, per_tile=9), conserves=False),
        _keeping("sparse-loco-bins", partial(loco, decay=0.5), exact_in=double, tolerance=1e-6),
        _keeping("sparse-loco-float32", exact, partial(exact, per_tile=4096)),
        _keeping("sparse-loco-int8", partial(loco, values="int8", decay=1.0), exact_in=double),
        _without(_keeping("demo", partial(DeMo, per_tile=9), conserves=False), scale="writes signs"),
        _keeping("demo-ranks", partial(demo, decay=0.5), tolerance=1e-5),
        _keeping("demo-int8", partial(demo, decay=1.0, values="int8"), tolerance=1e-5),
    ]


def _momentum_rows() -> list[Row]:
    """Make rows with momentum, which changes the input first: DGC without it conserves, 1-bit Adam writes steps instead of gradients."""
    plain = partial(DGC, momentum=0.0, warmup_steps=0)
    return [
        _sparse("dgc-plain", plain, 0.1),
        _keeping("dgc", partial(DGC, density=0.1, warmup_steps=2), conserves=False),
        _without(
            _keeping("dgc-clip-int8", partial(DGC, 0.1, "int8", clip=1.0), conserves=False),
            scale="clips the gradient's norm",
        ),
        _without(
            _keeping("onebit-adam", partial(OneBitAdam, 2), conserves=False, observes=2), scale="writes steps of Adam"
        ),
    ]


def _rival_rows() -> list[Row]:
    """Make rows of published schemes for comparison."""
    equal = {"balance": "the regions that ranks own have equal lengths, wherever the large elements are"}
    return [
        *[_sparse(f"gtopk-{density}", GTopK, density, slow=density == 0.5) for density in (0.001, 0.1, 0.5)],
        *[_sparse(f"topk-dsa-{density}", TopKDSA, density) for density in (0.001, 0.5)],
        _without(_sparse("topk-dsa-0.1", TopKDSA, 0.1), **equal),
        _without(_sparse("topk-dsa-third", partial(TopKDSA, dense_from=1 / 3), 0.1), **equal),
        *[_rounded(GTopK, "gtopk", values, density=0.1) for values in ("bfloat16", "int8")],
        *[_without(_rounded(TopKDSA, "topk-dsa", values, density=0.1), **equal) for values in ("bfloat16", "int8")],
        _rounded(partial(TopKDSA, dense_from=0.0), "topk-dsa-dense", "int4", density=0.1),
    ]


# Rows of rivals and formats that are not slow.
QUICK = (
    *("two-shot-0.1", "two-shot-down-finer-ternary", "two-shot-down-more-sign", "in-turn-sign", "quantized-decay-int8"),
    *("sparse-loco-bins", "demo-ranks", "dgc-plain", "onebit-adam", "powersgd-2", "gtopk-0.1"),
)


def _slow_but(rows: list[Row]) -> list[Row]:
    """Mark all rows as slow except the quick ones."""
    return [replace(row, slow=row.id not in QUICK) for row in rows]


SKIP_ROWS = _skip_rows()
ROWS = [
    _dense("dense", Dense),
    _dense("dense-ring", lambda: Dense(form="ring")),
    _dense("bf16", Dense.bf16, wire_bits=8),
    _dense("bf16-ring", lambda: Dense.bf16(form="ring"), wire_bits=8),
    _dense("float16", lambda: Dense(wire="float16"), wire_bits=11),
    _dense("float32", lambda: Dense(wire="float32")),
    *[
        _sparse(f"topk-{density}", TopK, density, slow=density in (0.01, 0.5))
        for density in (0.1, 0.001, 0.01, 0.5, 1.0)
    ],
    *[_sparse(f"exact_micro-{density}", ExactMiCRO, density, slow=density != 0.1) for density in (0.001, 0.1, 0.5)],
    *[_sparse(f"exact_exdyna-{density}", ExactExDyna, density, slow=density != 0.1) for density in (0.001, 0.1, 0.5)],
    *[_sparse(f"exact_oktopk-{density}", ExactOkTopk, density, slow=density != 0.1) for density in (0.001, 0.1, 0.5)],
    *_slow_but(_two_shot_rows()),
    *_slow_but(_in_turn_rows()),
    _sparse("micro", MiCRO, 0.1, exact=False),
    _sparse("exdyna", ExDyna, 0.1, exact=False),
    _sparse("oktopk", OkTopk, 0.1),  # its threshold lasts 32 steps
    replace(_sparse("per-parameter", _mixed, 0.1), sums_in_gradient_type=True),  # in its dense part
    *_rounded_rows(),
    *_slow_but([*_quantized_rows(), *_tile_rows(), *_momentum_rows(), *_low_rank_rows(), *_rival_rows()]),
    _skip("skip-default", SkipReduce, by_ranks="skip-by-ranks"),
    _skip("skip-default-feedback", SkipReduce, feedback=True),
    _skip("skip-quarter", SkipReduce, by_ranks="skip-quarter-by-ranks", skip=0.25),
    _skip("skip-quarter-by-ranks", SkipReduce, skip=0.25, divide_by="ranks"),
    _skip("skip-most", SkipReduce, by_ranks="skip-most-ranks", skip=0.99, form="direct"),
    _skip("skip-most-ranks", SkipReduce, skip=0.99, form="direct", divide_by="ranks"),
    _skip("skip-by-ranks", SkipReduce, divide_by="ranks"),
    _skip("skip-by-ranks-selective", SkipReduce, protect=("*.bias",), divide_by="ranks"),
    _skip("ring-pruning", SkipReduce.ring_pruning),
    *[row for row in SKIP_ROWS if not row.slow],
]

BY_ID = {row.id: row for row in (*ROWS, *SKIP_ROWS)}  # including rows that only others refer to
# Each family's first row that is not slow, or its first.
FIRST_OF_FAMILIES = {
    row.family: row.id for slow in (True, False) for row in reversed(ROWS) if row.slow == slow
}.values()


def rows(keep: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Run a test for each row that `keep` accepts."""
    return pytest.mark.parametrize("row", [_parameter(row) for row in ROWS if keep(row)])


def cases(keep: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Run a test for each row that `keep` accepts, in each of its worlds; large ones are slow."""
    every = [(row, P) for row in ROWS if keep(row) for P in row.worlds((*SMALLEST_WORLDS, *WORLDS, *LARGE_WORLDS))]
    return pytest.mark.parametrize(("row", "P"), [_parameter(row, P) for row, P in every])


def _parameter(row: Row, *P: int) -> ParameterSet:
    slow = row.slow or not {*P} <= {*WORLDS}
    return pytest.param(row, *P, id="-P".join(map(str, [row.id, *P])), marks=pytest.mark.slow if slow else ())
