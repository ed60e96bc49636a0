"""The command `sparsync`. Each command imports what it needs, so that --help, --version and the lists answer without torch."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync import __version__
from sparsync.lab import cli_options
from sparsync.lab.simulate.command import add_options as add_simulate_options
from sparsync.lab.simulate.command import run as run_simulate

if TYPE_CHECKING:
    from sparsync.lab.compare.settings import Settings


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Exit status: 0 when done, 1 for failures of the machine or a rank and where dense never was finite in a comparison, 2 for wrong
    arguments, 130 for Ctrl-C; that of the first rank that failed for `launch`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that it stops and cleans up as Ctrl-C does
    try:
        options.run(options, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("sparsync: interrupted; nothing is left running", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output, such as head, has closed it
        _discard_output()
    except (ValueError, RuntimeError) as error:
        print(f"sparsync: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def commands() -> list[str]:
    """Return the names of all commands."""
    return [name for action in _parser()._actions for name in action.choices or ()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparsync", description="Gradient synchronisation that sends less: try it on real data over slow links."
    )
    parser.add_argument("--version", action="version", version=f"sparsync {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    compare = commands.add_parser("compare", help="train with several schemes over rate-limited links, and report")
    cli_options.add_compare_options(compare)
    compare.set_defaults(run=_compare)

    launch = commands.add_parser("launch", help="run a script of torch.distributed as it is, over rate-limited links")
    cli_options.add_launch_options(launch)
    launch.set_defaults(run=_launch)

    probe = commands.add_parser(
        "probe", help="measure what exchanges, memory and kernels take on a group of ranks, for predictions"
    )
    cli_options.add_probe_options(probe)
    probe.set_defaults(run=_probe)

    advise = commands.add_parser(
        "advise", help="what each scheme would bring on a probed group, and which to use, dense bf16 included"
    )
    cli_options.add_advise_options(advise)
    advise.set_defaults(run=_advise)

    demo = commands.add_parser(
        "demo", help="two comparisons, with SGD and with AdamW, that two cores finish within minutes"
    )
    demo.add_argument("--out", type=Path, default=Path("demo"), help="folder for results and reports (default: demo)")
    demo.add_argument("--steps", type=int, default=None, help="training steps of each scheme, to try it out with a few")
    demo.set_defaults(run=_demo)

    frontier = commands.add_parser(
        "frontier", help="quality against the bits that a rank sends, each method at its best rate, in this process"
    )
    cli_options.add_frontier_options(frontier)
    frontier.set_defaults(run=_frontier)

    report = commands.add_parser("report", help="make tables, pictures and report.html again from a results folder")
    report.add_argument("folder", type=Path, help="the folder a comparison wrote")
    cli_options.add_within(report)
    report.set_defaults(run=_report)

    bench = commands.add_parser(
        "bench",
        help="measure buckets, collectives, kernels, overlap or codecs beside alternatives and the physical limit",
    )
    bench.add_argument(
        "subject", choices=("buckets", "collectives", "kernels", "overlap", "wire"), help="what to measure"
    )
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="see `sparsync bench SUBJECT --help`")
    bench.set_defaults(run=_bench)

    simulate = commands.add_parser(
        "simulate", help="predict a published set-up, or one of your own, at other numbers of ranks and rates of links"
    )
    add_simulate_options(simulate)
    simulate.set_defaults(run=run_simulate)

    traffic = commands.add_parser(
        "traffic", help="count what schemes send, select and leave in the residual, step by step, in this process"
    )
    cli_options.add_traffic_options(traffic)
    traffic.set_defaults(run=_traffic)

    gradients = commands.add_parser(
        "gradients", help="record every rank's gradients of a training, for `traffic` and `advise`"
    )
    cli_options.add_gradients_options(gradients)
    gradients.set_defaults(run=_gradients)

    campaign = commands.add_parser(
        "campaign", help="disturb trainings with faults, and count where a rank hangs or says nothing of it"
    )
    cli_options.add_campaign_options(campaign)
    campaign.set_defaults(run=_campaign)

    schemes = commands.add_parser("schemes", help="list the schemes, or the settings of one")
    schemes.add_argument(
        "name", nargs="?", help="show its settings: NAME, package.module:Class or path/to/file.py:Class"
    )
    schemes.set_defaults(run=_schemes)

    workloads = commands.add_parser("workloads", help="list the workloads, or begin one of your own")
    workloads.add_argument(
        "--new",
        type=Path,
        default=None,
        metavar="FILE.py",
        help="write a job there that runs as it is, to put yours in",
    )
    workloads.set_defaults(run=_workloads)
    return parser


def _compare(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab.compare.comparison import compare, compare_on_hosts
    from sparsync.lab.netlab import restart_with_rights
    from sparsync.lab.report.page import check_finite

    hosts = _on_hosts(options)
    settings = _settings(options)
    if hosts:
        if not compare_on_hosts(settings, options.out, ["sparsync", *arguments], options.backend):
            return
    else:
        if settings.rate_bits_per_s is not None:
            restart_with_rights("sparsync.lab.cli", arguments)
        compare(settings, options.out, ["sparsync", *arguments])
    _report(argparse.Namespace(folder=options.out, within=options.within), arguments)
    check_finite(options.out)


def _launch(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.base import scheme_text
    from sparsync.lab.launch.command import launch
    from sparsync.lab.launch.settings import Settings, checked_command, rates
    from sparsync.lab.netlab import restart_with_rights

    up, down = rates(options.link, options.up, options.down)
    command = checked_command(options.command)
    scheme = options.scheme
    if scheme is not None:
        scheme_text.scheme(scheme)  # before any rank starts
    elif scheme := os.environ.get(scheme_text.VARIABLE, "").strip() or None:
        scheme_text.scheme_of_environment()  # names the variable where it raises
    settings = Settings(command, options.ranks, up, down, scheme, options.nodes, options.grace)
    if settings.limited:
        restart_with_rights("sparsync.lab.cli", arguments)
    status = launch(settings)
    if status:
        raise SystemExit(status)


def _probe(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab.netlab import parse_link, restart_with_rights
    from sparsync.lab.probe.command import probe_here, probe_on_hosts
    from sparsync.lab.probe.task import Request

    hosts = _on_hosts(options)
    request = Request(
        seconds=options.seconds,
        schemes=options.schemes,
        link=f"emulated links of {options.link}" if options.link != "none" else "loopback",
        workload=options.workload,
        options=_workload_options(options),
        bucket_mb=options.bucket_mb,
        timeout_s=options.timeout,
    )
    if hosts:
        probe_on_hosts(request, options.backend, options.out)
        return
    if parse_link(options.link) is not None:
        restart_with_rights("sparsync.lab.cli", arguments)
    probe_here(request, options.ranks, options.link, options.out)


def _on_hosts(options: argparse.Namespace) -> bool:
    """Return whether torchrun has started the ranks, and fill in what `options` leaves open. Raises ValueError for options against it."""
    from sparsync.lab.workers.hosts import launched, world_size

    if not launched():
        if options.backend is not None:
            raise ValueError(f"--backend is for ranks that torchrun has started, got {options.backend!r}; leave it out")
        options.ranks = 4 if options.ranks is None else options.ranks
        options.link = options.link or "100mbit"
        return False
    if options.ranks not in (None, world_size()):
        raise ValueError(f"torchrun has started {world_size()} ranks, got --ranks {options.ranks}; leave --ranks out")
    if options.link not in (None, "none"):
        raise ValueError(f"torchrun's ranks use the hosts' own links, got --link {options.link}; leave --link out")
    options.ranks, options.link = world_size(), "none"
    return True


def _advise(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab import workloads
    from sparsync.lab.advise import command
    from sparsync.lab.scheme_choice import parse_schemes
    from sparsync.predict import probe_file

    probe = probe_file.read(options.probe)
    times = (options.forward_ms, options.backward_ms)
    if options.parameters is not None and None not in times:
        seconds = (1e-3 * each for each in (*times, options.optimizer_ms or 0.0))
        bucket_mb = 25.0 if options.bucket_mb is None else options.bucket_mb
        backward = command.even_backward(options.parameters, bucket_mb, *seconds)
    elif options.parameters is None and times == (None, None) and probe.backward is not None:
        _refuse(
            {"--optimizer-ms": options.optimizer_ms, "--bucket-mb": options.bucket_mb},
            f"the model in {options.probe} counts as it was measured",
            "give --parameters, --forward-ms and --backward-ms with it",
        )
        backward = probe.backward
    else:
        raise ValueError(
            f"{options.probe} says nothing of a model; probe with --workload, or give --parameters, --forward-ms and --backward-ms"
            if probe.backward is None
            else "a model is --parameters, --forward-ms and --backward-ms together, or none of them for the one in the probe"
        )
    if options.gradients is not None and options.workload is None:
        raise ValueError("--gradients needs --workload: the gradients are replayed with the job's optimizer")
    if options.gradients is None:
        unused = {"--seed": options.seed, "--steps": options.steps}
        _refuse(unused, "it is of the training whose gradients are replayed", "give these by --gradients")
    own = _workload_options(options)
    workload = None if options.workload is None else workloads.get(options.workload, **own)
    if workload is not None:
        workload.prepare()
    if options.schemes is None:
        adamw = workload is not None and command.trained_by_adamw(workload)
        options.schemes = ",".join(
            (cli_options.ADVISED, cli_options.ADVISED_LOCAL, *([cli_options.ADVISED_ADAMW] * adamw))
        )
    choices = parse_schemes(options.schemes, options.density, options.skip)
    seed, steps = options.seed or 0, 300 if options.steps is None else options.steps
    found = command.advise(probe, backward, choices, workload, options.gradients, seed, steps)
    if options.json is not None:
        command.write(found, options.json)
    if options.json != "-":
        print(command.text(found, probe, backward, choices))


def _frontier(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab.frontier.command import frontier
    from sparsync.lab.frontier.figures import OURS
    from sparsync.lab.frontier.study import ORACLE, Study
    from sparsync.lab.scheme_choice import parse_schemes

    study = Study(
        schemes=parse_schemes(options.schemes, options.density, options.skip, ORACLE),
        workload=options.workload,
        options=_workload_options(options),
        ranks=options.ranks,
        steps=options.steps,
        seeds=options.seeds,
        rates=options.rates,
        rates_seed=options.rates_seed,
        follow_rate=options.follow_rate,
    )
    ours = OURS if options.ours is None else tuple(options.ours.split(","))
    frontier(study, options.out, options.jobs, ours, options.page, options.part, ["sparsync", *arguments])


def _demo(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab import demo
    from sparsync.lab.compare.comparison import compare
    from sparsync.lab.netlab import restart_with_rights

    restart_with_rights("sparsync.lab.cli", arguments)
    for chosen in demo.commands(options.out, options.steps):
        half = _parser().parse_args(chosen)
        compare(_settings(half), half.out, ["sparsync", *chosen])
        _report(argparse.Namespace(folder=half.out, within=half.within), chosen)
    demo.summary(options.out)


def _report(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab.report.page import report

    try:
        report(options.folder, within=options.within)
        sys.stdout.flush()
    except BrokenPipeError:  # the files are written, and what comes after them goes on
        _discard_output()


def _bench(options: argparse.Namespace, arguments: list[str]) -> None:
    from importlib import import_module

    import_module(f"sparsync.lab.bench.{options.subject}").main(options.arguments)


def _traffic(options: argparse.Namespace, arguments: list[str]) -> None:
    import torch

    from sparsync.lab.scheme_choice import parse_schemes
    from sparsync.lab.traffic.command import traffic
    from sparsync.lab.traffic.study import recorded_study, synthetic_study

    torch.set_num_threads(1)  # so that sums, and with them the lines, are the same however many cores there are
    schemes = parse_schemes(options.schemes, options.density, options.skip)
    asked = {"ranks": options.ranks, "elements": options.elements, "steps": options.steps}
    if options.gradients is None:
        study = synthetic_study(schemes, **asked, seed=options.seed, jump=options.jump)
    elif options.jump is not None:
        raise ValueError("--jump goes with drawn gradients, not with --gradients; leave one of them out")
    else:
        study = recorded_study(schemes, options.gradients, **asked)
    source = f"gradients of {options.gradients.name}" if options.gradients else f"drawn gradients, seed {options.seed}"
    source += "" if options.jump is None else f", 10 times as large from step {options.jump}"
    title = f"{study.stream.ranks} ranks, {study.elements} elements, density {options.density:g}, {source}"
    traffic(study, title, options.json, options.plot, options.every)


def _gradients(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab import workloads
    from sparsync.lab.progress import progress
    from sparsync.lab.traffic.record import record, save
    from sparsync.lab.writable import check_file

    workload = workloads.get(options.workload, **_workload_options(options))
    check_file(options.out)
    asked = (options.seed, options.ranks, options.steps, options.every, options.precision)
    with progress("training steps", options.steps) as shown:
        recorded = record(workload, *asked, after=shown.at)
    save(recorded, options.out)
    T, P, n = recorded["gradients"].shape
    counted = " x ".join(
        f"{count} {what}{'s' * (count != 1)}" for count, what in ((T, "step"), (P, "rank"), (n, "element"))
    )
    print(f"{options.out}: {counted}, {options.precision}")


def _campaign(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab.campaign.command import campaign
    from sparsync.lab.netlab import restart_with_rights

    restart_with_rights("sparsync.lab.cli", arguments)
    only = [name for name in options.only.split(",") if name]
    command = ["sparsync", *arguments]
    campaign(options.seed, options.trials, options.timeout, only, options.jobs, options.out, options.page, command)


def _schemes(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.base import registry

    if options.name is not None:
        _print_aligned({key: f"default {value!r}" for key, value in registry.settings(options.name).items()})
        return
    from sparsync.base.recipes import recipes

    _print_aligned({name: registry.describe(name) for name in registry.names()})
    print("\nRecipes, which compare and frontier take like schemes:")
    _print_aligned(recipes())
    print(
        "\nNAME.published reproduces the published algorithm. A scheme of your own: package.module:Class or path/to/file.py:Class.\n"
        "Settings are given as NAME:key=value:key=value; `sparsync schemes NAME` shows them."
    )


def _workloads(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.lab import workloads

    if options.new is not None:
        print(f"Written to {options.new}. Try it:\n{workloads.write_new(options.new)}")
        return
    _print_aligned(workloads.summaries())
    print(
        "\nA job of your own: package.module:Class or path/to/file.py:Class, a class with the methods model, batch and loss.\n"
        "`sparsync workloads --new my_job.py` writes one to begin with."
    )


def _print_aligned(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines), default=0)
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")


def _settings(options: argparse.Namespace) -> "Settings":
    from sparsync.lab.compare.settings import Settings
    from sparsync.lab.scheme_choice import parse_schemes

    return Settings(
        schemes=parse_schemes(options.schemes, options.density, options.skip),
        workload=options.workload,
        options=_workload_options(options),
        ranks=options.ranks,
        link=options.link,
        density=options.density,
        target=options.target,
        steps=options.steps,
        eval_every=options.eval_every,
        seeds=options.seeds,
        bucket_mb=options.bucket_mb,
        timeout_s=options.timeout,
    )


def _refuse(unused: Mapping[str, object], why: str, cure: str) -> None:
    """Raise ValueError where one of the options that would change nothing was given."""
    for name, value in unused.items():
        if value is not None:
            raise ValueError(f"{name} {value} changes nothing: {why}; leave it out, or {cure}")


def _workload_options(options: argparse.Namespace) -> dict[str, Any]:  # Any: the workload converts the text
    if options.workload is None:
        unused = {"--option": next(iter(options.option), None), "--data": options.data}
        _refuse(unused, "it is of a workload, and there is none", "name one with --workload")
    chosen: dict[str, Any] = dict(_key_value(item) for item in options.option)
    if options.data is not None:
        chosen["data"] = str(Path(options.data).resolve())
    return chosen


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option takes KEY=VALUE, got {text!r}")
    return key, value


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
