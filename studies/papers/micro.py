"""The claims of MiCRO (arXiv 2310.00967) and ExDyna (2402.13781), which have the same threshold, from what `thresholds` measures."""

from collections.abc import Sequence
from pathlib import Path

from sparsync_lab.report.format import significant
from studies.papers import Claim, Section
from studies.papers import thresholds as measured
from studies.papers.thresholds import (
    AUTHORS,
    EXACT,
    FACTORS,
    MOST_SEEDS,
    PUBLISHED,
    RANKS,
    SEEDS,
    SETTLED,
    STEPS,
    Course,
    behind,
    build_up_of_topk,
    kept_after_settling,
    label,
    low_to_high,
    merged,
    no_build_up,
    percent,
    titled,
)

MICRO_PRESET = "micro-lstm-16"  # the authors' cluster
EXDYNA_PRESET = "exdyna-inception-8"  # the authors' machine
STEP_RANKS = (4, 8, 16)


def micro(folder: Path) -> Section:
    """Measure MiCRO's claims."""
    courses = {seed: measured.drawn(folder, MOST_SEEDS, seed) for seed in SEEDS}
    first = {P: measured.drawn(folder, P, SEEDS[0]) for P in RANKS}
    exact = {P: measured.drawn_exact(folder, P) for P in RANKS}
    costs = measured.selection_costs(folder)
    trained = {row.label: row for row in measured.trained(folder)}
    times = measured.step_times(MICRO_PRESET, STEP_RANKS, first)
    held = [each["micro"].error(SETTLED, STEPS) for each in courses.values()]
    of_jobs = [measured.of_job(folder, job)["micro"].error(-measured.JOB_LAST) for job in measured.JOBS]
    ratios = [first[P]["micro"].ratio(SETTLED, STEPS) for P in RANKS]
    grown = [_told(courses[seed][f"micro x{FACTORS[0]:g}"].settled_after()) for seed in SEEDS]
    whole, part = costs["topk"], costs["micro 16"]
    own, topk, dgc = (trained[name] for name in ("micro", label(trained, "topk"), label(trained, "dgc")))
    claims = (
        Claim(
            "The aggregated gradients are free from build-up",
            f"union / target {significant(min(ratios))} to {significant(max(ratios))} for P = {RANKS[0]} to {RANKS[-1]}; "
            f"`topk` {build_up_of_topk(exact, RANKS[0])} to {build_up_of_topk(exact, RANKS[-1])}",
            no_build_up(ratios),
        ),
        Claim(
            "An accurate threshold keeps the traffic the user asked for",
            f"off by {low_to_high(held, percent)} over steps {SETTLED} to {STEPS}, on [three jobs](#exdyna) by "
            f"{', '.join(map(percent, of_jobs))}; after a tenfold growth of the gradients, settled after {', '.join(grown)} steps",
            f"{kept_after_settling([*held, *of_jobs])}: the threshold moves by at most 0.5 % per step",
        ),
        Claim(
            "Selection at nearly no cost",
            f"a rank of 16 reads {part['read']:,} of {whole['read']:,} elements in {significant(part['ms'], 2)} ms of "
            f"processor time; `topk` reads all in {significant(whole['ms'], 2)} ms, `torch.topk` in "
            f"{significant(costs['torch.topk']['ms'], 2)} ms",
            f"{'reproduced' if part['ms'] < whole['ms'] / 4 else 'not reproduced'} for the selection; adding the residual still passes "
            f"over all elements: {significant(costs['accumulate']['ms'], 2)} ms",
        ),
        Claim(
            "An outstanding convergence rate beside other sparsifiers",
            f"{behind(own)} behind dense, `topk` {behind(topk)}, `dgc` {behind(dgc)}, at equal union, with "
            f"{significant(own.bits / topk.bits, 2)} times their bits",
            convergence_verdict(own, (topk, dgc)),
        ),
        Claim(
            "Scales and accelerates training",
            f"predicted for {STEP_RANKS[-1]} GPUs: {_speed_up(times, 'micro')} times dense, "
            f"{_speed_up(times, 'topk', 'micro')} times `topk`",
            "needs 4 nodes of 4 V100"
            + "; most of the predicted gain is that of any sparse scheme"
            * (times["micro"][-1] > 0.8 * times["topk"][-1]),
        ),
    )
    below = "\n\n".join(
        (
            density_table(courses, exact[MOST_SEEDS]),
            build_up_table(first, exact),
            cost_table(costs),
            convergence_table(trained),
            times_table(times),
        )
    )
    return Section(claims, below)


def density_table(courses: dict[int, dict[str, Course]], exact: dict[str, Course]) -> str:
    """Show how well each union keeps its target: after settling, and after jumps."""
    rows = list[list[str]]()
    for name in (*PUBLISHED, AUTHORS):
        seeds = [each for each in courses.values() if name in each]
        held = [each[name] for each in seeds]
        row = [
            f"`{name}`",
            str(len(seeds)),
            _steps(held),
            low_to_high((each.error(SETTLED, STEPS) for each in held), percent),
            low_to_high(each.ratio(SETTLED, STEPS) for each in held),
        ]
        rows.append(row + _after_jumps([{f: each[f"{name} x{f:g}"] for f in FACTORS} for each in seeds]))
    for name in EXACT:
        held = [exact[name]]
        row = [f"`{name}`", "1", _steps(held), percent(held[0].error()), significant(held[0].ratio())]
        rows.append(row + _after_jumps([{f: exact[f"{name} x{f:g}"] for f in FACTORS}]))
    jumps = [f"after x{f:g}: steps to settle; farthest union / target" for f in FACTORS]
    heads = ["scheme", "seeds", "steps to settle", f"error, steps {SETTLED} to {STEPS}", "union / target", *jumps]
    under = (
        f"Density on drawn gradients, {MOST_SEEDS} ranks, {measured.ELEMENTS:,} elements, target {percent(measured.DENSITY)}: "
        f"means over seeds (lowest to highest). A union has settled when it is within {percent(measured.CLOSE)} on average over "
        f"{measured.STRETCH} steps. After step {STEPS} ({measured.SHORT} for the exact forms) all gradients grow tenfold, or fall to a "
        "tenth."
    )
    return titled(under, heads, merged(rows))


def build_up_table(published: dict[int, dict[str, Course]], exact: dict[int, dict[str, Course]]) -> str:
    """Show union / target by number of ranks."""
    rows = [["`topk`", *(build_up_of_topk(exact, P) for P in RANKS)]]
    rows += [
        [f"`{name}`", *(significant(published[P][name].ratio(SETTLED, STEPS)) for P in RANKS)] for name in PUBLISHED
    ]
    rows += [[f"`{name}`", *(significant(exact[P][name].ratio()) for P in RANKS)] for name in EXACT]
    under = "Union / target by number of ranks, seed 0. Each rank of `topk` selects the target:"
    return titled(under, ["scheme", *(f"P = {P}" for P in RANKS)], merged(rows))


def cost_table(costs: dict[str, dict[str, float]]) -> str:
    """Show the processor time of a selection, and the share of the elements that it reads."""
    rows = [[f"`{name}`", *(_cost(costs[f"{name} {P}"]) for P in measured.SELECT_RANKS)] for name in ("micro", *EXACT)]
    under = (
        f"Selection of {percent(measured.DENSITY)} of {measured.SELECTED:,} elements on one rank: processor time (ms), medians of "
        f"{measured.REPEATS} interleaved runs, and the share of the elements read. `exdyna` selects as `micro` does:"
    )
    return titled(under, ["scheme", *(f"P = {P}" for P in measured.SELECT_RANKS)], rows)


def convergence_table(trained: dict[str, measured.MethodRow]) -> str:
    """Show the trainings at equal union."""
    rows = [
        [
            f"`{row.label}`",
            f"{row.rate:g}",
            percent(row.union),
            significant(row.bits),
            significant(row.end.mean, 4),
            "-"
            if row.label == "dense"
            else f"{row.behind.mean:+.1f} ({row.behind.low:+.1f} to {row.behind.high:+.1f})",
        ]
        for row in trained.values()
    ]
    heads = ["method", "rate", "mean union", "bits per parameter per step", "perplexity", "% behind dense"]
    under = (
        "Convergence: `shakespeare-small`, SGD with momentum, 4 ranks, 300 steps, each at its best rate for seed 0 "
        f"({'some' if any(row.edge for row in trained.values()) else 'none'} at an edge); means over {len(SEEDS)} seeds (lowest to "
        "highest). At half of MiCRO's bits, `topk` of 1 % in int8 ends nearer to dense "
        "([table](frontier.md#a-word-level-language-model-sgd-with-momentum))."
    )
    return titled(under, heads, rows)


def convergence_verdict(method: measured.MethodRow, others: Sequence[measured.MethodRow]) -> str:
    """Judge by whether all seeds of a method end nearer to dense than all seeds of each other method."""
    ahead = [row.label for row in others if method.behind.high < row.behind.low]
    behind = [row.label for row in others if method.behind.low > row.behind.high]
    level = [row.label for row in others if row.label not in (*ahead, *behind)]
    if len(ahead) == len(others):
        return "reproduced, in every seed"
    told = {"ahead of": ahead, "level with": level, "behind": behind}
    return f"here it is {', '.join(f'{word} {_names(labels)}' for word, labels in told.items() if labels)}"


def times_table(times: dict[str, list[float]]) -> str:
    """Show the predicted steps."""
    rows = [[f"`{name}`", *(significant(each, 4) for each in found)] for name, found in times.items()]
    under = (
        "Predicted step (ms) on the authors' cluster (an LSTM of 28.9 M parameters on WikiText-2, 4 V100 a node, density "
        "0.1 %), from the bytes sent, the measured imbalance, one pass over memory per selection, and assumed links "
        f"(10 Gbit/s between nodes) and computing (45 ms): `sparsync simulate --preset {MICRO_PRESET}`."
    )
    return titled(under, ["scheme", *(f"P = {P}" for P in STEP_RANKS)], merged(rows))


def exdyna(folder: Path) -> Section:
    """Measure ExDyna's claims."""
    courses = {seed: measured.drawn(folder, MOST_SEEDS, seed) for seed in SEEDS}
    first = {P: measured.drawn(folder, P, SEEDS[0]) for P in RANKS}
    exact = {P: measured.drawn_exact(folder, P) for P in RANKS}
    jobs = {job: measured.of_job(folder, job) for job in measured.JOBS}
    trained = {row.label: row for row in measured.trained(folder)}
    uneven = {name: [each[name].imbalance(SETTLED, STEPS) for each in courses.values()] for name in PUBLISHED}
    most = {name: first[RANKS[-1]][name].imbalance(SETTLED, STEPS) for name in PUBLISHED}
    held = [each["exdyna"].error(SETTLED, STEPS) for each in courses.values()]
    ratios = [first[P]["exdyna"].ratio(SETTLED, STEPS) for P in RANKS]
    of_jobs = [each["exdyna"].error(-measured.JOB_LAST) for each in jobs.values()]
    starts = [significant(each["exdyna"].ratio(0, 1), 2) for each in jobs.values()]
    settling = [each["exdyna"].settled_after() for each in (*courses.values(), *jobs.values())]
    slowest = "all the" if None in settling else max(each for each in settling if each is not None)
    own, topk, dgc = (trained[label(trained, name)] for name in ("exdyna", "topk", "dgc"))
    times = {name: each for name, (each,) in measured.step_times(EXDYNA_PRESET, (MOST_SEEDS,), first).items()}
    claims = (
        Claim(
            "Build-up never occurs",
            f"union / target {significant(min(ratios))} to {significant(max(ratios))} for P = {RANKS[0]} to {RANKS[-1]}; "
            f"`topk` {build_up_of_topk(exact, RANKS[0])} to {build_up_of_topk(exact, RANKS[-1])}",
            no_build_up(ratios),
        ),
        Claim(
            "Adjusting partitions balances the selection",
            f"largest share over mean {low_to_high(uneven['exdyna'])} after settling, `micro` {low_to_high(uneven['micro'])}; "
            f"P = {RANKS[-1]}: {' and '.join(significant(most[name]) for name in PUBLISHED[::-1])}",
            "reproduced in part: a block only moves between an overloaded and an underloaded neighbour, and a partition "
            "keeps a quarter of the mean size"
            if max(uneven["exdyna"]) < min(uneven["micro"])
            else "not reproduced",
        ),
        Claim(
            "The threshold satisfies the sparsity that the user requires, regardless of models and datasets",
            f"off by {low_to_high(held, percent)} on drawn gradients, by {', '.join(map(percent, of_jobs))} on three jobs, "
            f"whose first unions are {', '.join(starts)} times the target",
            f"{kept_after_settling([*held, *of_jobs])}, which takes up to {slowest} steps",
        ),
        Claim(
            "Better training speed; the cost of sparsification stays near optimal as ranks increase",
            f"predicted on 8 GPUs: {significant(times['dense'] / times['exdyna'])} times dense; steps of "
            + ", ".join(f"{significant(times[name], 4)} ms (`{name}`)" for name in ("dense", "topk", "exdyna"))
            + f" (`sparsync simulate --preset {EXDYNA_PRESET}`)",
            "needs 8 V100 in one node"
            + "; sparsification gains little over NVLink" * (times["dense"] < 1.1 * times["exdyna"])
            + ", and ExDyna nothing over `topk`" * (times["exdyna"] > times["topk"]),
        ),
        Claim(
            "High accuracy",
            f"{behind(own)} behind dense, `topk` {behind(topk)}, `dgc` {behind(dgc)} ([above](#micro))",
            convergence_verdict(own, (topk, dgc)),
        ),
    )
    return Section(claims, "\n\n".join((balance_table(courses, first, exact), jobs_table(jobs))))


def balance_table(
    courses: dict[int, dict[str, Course]], first: dict[int, dict[str, Course]], exact: dict[int, dict[str, Course]]
) -> str:
    """Show the balance of the selection, and how many blocks move."""
    rows = list[list[str]]()
    for P in RANKS:
        seeds = list(courses.values()) if P == MOST_SEEDS else [first[P]]
        shares = [[each[name].imbalance(SETTLED, STEPS) for each in seeds] for name in PUBLISHED]
        rows.append(
            [
                str(P),
                str(len(seeds)),
                *map(low_to_high, shares),
                ", ".join(str(each["exdyna"].moved_blocks(0, SETTLED)) for each in seeds),
                ", ".join(str(each["exdyna"].moved_blocks(SETTLED, STEPS)) for each in seeds),
                *(significant(exact[P][name].imbalance()) for name in EXACT),
            ]
        )
    shown, exact_ones = ([f"`{name}`" for name in names] for names in (PUBLISHED, EXACT))
    heads = ["P", "seeds", *shown, f"moved blocks before step {SETTLED}", "after", *exact_ones]
    under = (
        f"Balance on MiCRO's drawn gradients: the largest share of a rank over the mean, over steps {SETTLED} to {STEPS}; of the "
        f"exact forms, over their first {measured.SHORT} steps."
    )
    return titled(under, heads, rows)


def jobs_table(jobs: dict[str, dict[str, Course]]) -> str:
    """Show density and balance on the gradients of jobs."""
    last = -measured.JOB_LAST
    rows = [
        [
            f"`{job}`",
            ", ".join(percent(found[name].error(last)) for name in PUBLISHED),
            ", ".join(significant(found[name].ratio(last)) for name in PUBLISHED),
            ", ".join(significant(found[name].imbalance(last)) for name in PUBLISHED),
            _steps([found[name] for name in PUBLISHED]),
        ]
        for job, found in jobs.items()
    ]
    under = (
        f"{' and '.join(f'`{name}`' for name in PUBLISHED)} on gradients of jobs that train densely: {measured.JOB_RANKS} ranks, "
        f"{percent(measured.DENSITY)}, the last {measured.JOB_LAST} of {measured.JOB_STEPS} steps, one seed."
    )
    heads = ["job", "density error", "union / target", "largest share / mean", "steps to settle"]
    return titled(under, heads, rows)


def _after_jumps(jumped: Sequence[dict[float, Course]]) -> list[str]:
    """Format the steps to settle and the farthest union / target after each jump."""
    cells = list[str]()
    for factor in FACTORS:
        found = [each[factor] for each in jumped]
        farthest = max((each.worst() for each in found), key=lambda ratio: max(ratio, 1 / ratio))
        cells.append(f"{_steps(found)}; {significant(farthest)}")
    return cells


def _steps(courses: Sequence[Course]) -> str:
    return ", ".join(_told(each.settled_after()) for each in courses)


def _told(steps: int | None) -> str:
    return "never" if steps is None else str(steps)


def _cost(cost: dict[str, float]) -> str:
    return f"{significant(cost['ms'], 2)}; {percent(cost['read'] / measured.SELECTED)}"


def _speed_up(times: dict[str, list[float]], name: str, over: str = "") -> str:
    """Compute how much faster `name` is than dense on most ranks; or `over` than `name`."""
    base, other = (name, over) if over else ("dense", name)
    return significant(times[base][-1] / times[other][-1])


def _names(labels: Sequence[str]) -> str:
    return " and ".join(f"`{label.split(':')[0]}`" for label in labels)
