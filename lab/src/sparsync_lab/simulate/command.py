"""`sparsync simulate`: print the prediction of a set-up as a table, or list the set-ups."""

from sparsync_lab.report.format import bytes_text, ratio_text, seconds_text, significant
from sparsync_lab.terminal import Table, aligned, show

TIME_ONLY = (
    "This is only the time of a step: what a scheme does to quality is not in it, nor the further steps that it may need. "
    "`sparsync frontier` and `sparsync compare` measure that."
)


def list_presets() -> None:
    """Print the package's set-ups. Does not import torch."""
    from sparsync_lab.simulate import setup as setups

    print(aligned({name: setups.read(name).title for name in setups.names()}))


def simulate(name: str, ranks: int | None, gbit_per_s: float | None) -> None:
    """Predict the set-up called `name`, and print it. Raises ValueError for an invalid set-up."""
    from sparsync_lab.simulate import setup as setups
    from sparsync_lab.simulate.model import predict

    chosen = setups.read(name)
    found, job = [predict(chosen, entry, ranks, gbit_per_s) for entry in chosen.scheme], chosen.job
    heads = ("scheme", "step", "exposed", "all of it", "sent", f"{job.unit}\na second", "speed-up")
    steps = tuple(
        (
            each.label,
            *(seconds_text(value) for value in (each.step_s, each.exposed_s, each.communication_s)),
            bytes_text(each.nbytes),
            _rounded(each.throughput),
            ratio_text(found[0].step_s / each.step_s),
        )
        for each in found
    )
    links = f"{found[0].ranks} ranks, {found[0].gbit_per_s:g} Gbit/s"
    about = f"{links}, {job.elements:,} parameters, {seconds_text(job.compute_s)} of computation"
    assumed = [(f"Assumed, not published: {', '.join(chosen.assumed)}.", "dim")] if chosen.assumed else []
    show([Table(about, heads, steps)], [(f"{chosen.title}\n", "bold")], [(TIME_ONLY, "dim"), *assumed])


def _rounded(value: float) -> str:
    """Format the value with three significant digits and thousands separators: 7,910,000."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else significant(value)
