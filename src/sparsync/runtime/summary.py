"""A summary of what a handle has reduced: what was sent and selected, where the time went, and how much of it was hidden."""

from collections.abc import Mapping
from dataclasses import dataclass

from sparsync.runtime.connection import Totals

_HEAD = ("scheme", "bucket", "elements", "steps", "bytes/step", "bits/element", "selected", "union", "rounds", "ms")
_PHASES = ("accumulate", "select", "encode", "exchange", "decode", "apply", "other")


@dataclass(frozen=True)
class Hidden:
    """How long buckets were reduced, and how long the backward pass waited for it, in seconds."""

    reducing_s: float
    exposed_s: float

    @property
    def share(self) -> float | None:
        """The share of the reduction that the backward pass hid; None while nothing was reduced."""
        return 1 - min(1.0, self.exposed_s / self.reducing_s) if self.reducing_s else None


@dataclass(frozen=True)
class Summary:
    """What one rank has reduced since its handle was made; `str` is a table of plain text.

    `rows` are by scheme, bucket and number of elements, because DDP's buckets change after the first steps. `parameters` is the number of
    trained elements of the model, 0 where it is not known. `hidden` is None where gradients are reduced after the backward pass.
    """

    rank: int
    ranks: int
    steps: int
    parameters: int
    rows: Mapping[tuple[str, str, int], Totals]
    hidden: Hidden | None

    @property
    def total(self) -> Totals:
        """The sums over all rows."""
        total = Totals()
        for each in self.rows.values():
            total += each
        return total

    @property
    def nbytes_per_step(self) -> float:
        """The bytes that this rank sends in a step."""
        return self.total.nbytes / self.steps if self.steps else 0.0

    @property
    def bits_per_parameter(self) -> float:
        """The bits that this rank sends in a step for each element."""
        total = self.total
        return 8 * total.nbytes / total.elements if total.elements else 0.0

    def __str__(self) -> str:
        size = f", {self.parameters:,} trained parameters" if self.parameters else ""
        lines = [f"rank {self.rank} of {self.ranks}: {self.steps} steps{size}"]
        if not self.steps:
            return lines[0]
        rows: list[tuple[str, ...]] = [_HEAD]
        whole, total = [], self.total
        for (scheme, key, elements), each in self.rows.items():
            rows.append((scheme, key, f"{elements:,}", *_columns(each, each.reduced)))
            if each.whole:
                sent = f"was sent whole in {each.whole} of {each.reduced} steps"
                whole.append(f"{key} of {scheme} {sent}: {elements:,} elements are fewer than dense_below")
        rows.append(("all", "", f"{total.elements // self.steps:,}", *_columns(total, self.steps)))
        lines += [*_table(rows), *whole, "time by phase" + ("" if total.seconds else "; times were not measured")]
        for name in _PHASES if total.seconds else ():
            seconds = total.phases.get(name, 0.0)
            lines.append(f"  {name:<10} {1000 * seconds / self.steps:10.3f} ms/step {seconds / total.seconds:7.1%}")
        if self.hidden is None:
            lines.append("reduced after the backward pass, which hides none of it")
        elif self.hidden.share is not None:
            lines.append(
                f"the backward pass hid {self.hidden.share:.1%}: {1000 * self.hidden.reducing_s / self.steps:.3f} ms/step of reducing, "
                f"{1000 * self.hidden.exposed_s / self.steps:.3f} ms/step of waiting for it"
            )
        return "\n".join(lines)


def _columns(each: Totals, steps: int) -> tuple[str, ...]:
    """Return the columns of a row, per step."""
    elements = max(each.elements, 1)
    return (
        f"{steps}",
        f"{each.nbytes / steps:,.0f}",
        f"{8 * each.nbytes / elements:.3f}",
        f"{each.selected / elements:.5f}",
        f"{each.union / elements:.5f}",
        f"{each.rounds / steps:.1f}",
        f"{1000 * each.seconds / steps:.3f}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    form = "  ".join(f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths))
    return [form.format(*row) for row in rows]
