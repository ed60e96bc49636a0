"""The claims of ExDyna (arXiv 2402.13781): balanced partitions, a density held on any model, speed, accuracy. Its threshold is MiCRO's."""

from pathlib import Path

from sparsync_lab.report.format import significant
from studies.papers import Claim, Section
from studies.papers import thresholds as measured
from studies.papers.micro import convergence_verdict
from studies.papers.thresholds import (
    EXACT,
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
    no_build_up,
    percent,
    titled,
)

PRESET = "exdyna-inception-8"  # the authors' machine


def section(folder: Path) -> Section:
    """Measure what the section shows."""
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
    exdyna, topk, dgc = (trained[label(trained, name)] for name in ("exdyna", "topk", "dgc"))
    times = {name: each for name, (each,) in measured.step_times(PRESET, (MOST_SEEDS,), first).items()}
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
            "reproduced in part: loads come nearer, but a block only moves between an overloaded and an underloaded "
            "neighbour, and a partition keeps a quarter of the mean size. `exact_exdyna` selects equally many"
            if max(uneven["exdyna"]) < min(uneven["micro"])
            else "not reproduced",
        ),
        Claim(
            "The threshold satisfies the sparsity that the user requires, regardless of models and datasets",
            f"off by {low_to_high(held, percent)} on drawn gradients, by {', '.join(map(percent, of_jobs))} on three jobs, "
            f"whose first unions are {', '.join(starts)} times the target",
            f"{kept_after_settling([*held, *of_jobs])}: settling takes up to {slowest} steps",
        ),
        Claim(
            "Better training speed; the cost of sparsification stays near optimal as ranks increase",
            f"predicted on 8 GPUs: {significant(times['dense'] / times['exdyna'])} times dense",
            "time on hardware needs 8 V100 in one node"
            + "; predicted, sparsification gains little over NVLink" * (times["dense"] < 1.1 * times["exdyna"]),
        ),
        Claim(
            "High accuracy",
            f"{behind(exdyna)} behind dense, `topk` {behind(topk)}, `dgc` {behind(dgc)} ([above](#micro))",
            convergence_verdict(exdyna, (topk, dgc)),
        ),
    )
    return Section(claims, "\n\n".join((balance_table(courses, first, exact), jobs_table(jobs), times_table(times))))


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
        f"Balance on drawn gradients of {measured.ELEMENTS:,} elements, {percent(measured.DENSITY)}: the largest share of a "
        f"rank over the mean, over steps {SETTLED} to {STEPS}; of the exact forms, over their first {measured.SHORT} steps."
    )
    return titled(under, heads, rows)


def jobs_table(jobs: dict[str, dict[str, Course]]) -> str:
    """Show density and balance on the gradients of jobs."""
    rows = [
        [
            f"`{job}`",
            f"`{name}`",
            percent(found[name].error(-measured.JOB_LAST)),
            significant(found[name].ratio(-measured.JOB_LAST)),
            significant(found[name].imbalance(-measured.JOB_LAST)),
            str(found[name].settled_after()),
        ]
        for job, found in jobs.items()
        for name in PUBLISHED
    ]
    under = (
        f"Gradients of jobs that train with the dense mean: {measured.JOB_RANKS} ranks, {percent(measured.DENSITY)}, the "
        f"last {measured.JOB_LAST} of {measured.JOB_STEPS} steps, one seed."
    )
    heads = ["job", "scheme", "density error", "union / target", "largest share / mean", "steps to settle"]
    return titled(under, heads, rows)


def times_table(times: dict[str, float]) -> str:
    """Show the predicted steps."""
    heads = ["scheme", *(f"`{name}`" for name in times)]
    under = (
        "Predicted step (ms) on the authors' machine (Inception-v4 on CIFAR-100, 8 V100 with NVLink, density 0.1 %), as above: "
        f"`sparsync simulate --preset {PRESET}`. Computing is assumed."
    )
    return titled(under, heads, [["8 GPUs", *(significant(each, 4) for each in times.values())]])
