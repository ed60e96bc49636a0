"""The command `sparsync`. Commands import what they need, so that --help, --version and the lists work without torch."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync import __version__
from sparsync_lab import terminal
from sparsync_lab.cli_options import add_options
from sparsync_lab.cli_run import run_command
from sparsync_lab.writable import check_file

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sparsync_lab.compare.settings import CompareSettings
    from sparsync_lab.netlab import Delay
    from sparsync_lab.scheme_choice import SchemeChoice
    from sparsync_lab.workers.group import Here
    from sparsync_lab.workers.hosts import Hosts


_SCHEMES = """\
A scheme of your own: package.module:Class or path/to/file.py:Class.
Settings are given as NAME:key=value:key=value; `sparsync schemes NAME` shows them."""
_WORKLOADS = """\
A job of your own: package.module:Class or path/to/file.py:Class, a class with the methods model, batch and loss.
`sparsync workloads --new my_job.py` writes one to begin with."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Exit status: 0 on success; 1 if the machine or a rank failed, dense was never finite, a method exchanged nothing or `doctor` found
    something to do; 2 for wrong arguments; 130 for Ctrl-C. `launch` passes on the status of the first rank that failed.
    """
    run_command(_parser(), argv)


def _parser() -> argparse.ArgumentParser:
    about = "Compress gradient traffic, and measure the result on real data over slow links."
    parser = argparse.ArgumentParser(prog="sparsync", **_texts(about, "sparsync demo\nsparsync COMMAND --help"))
    parser.add_argument("--version", action="version", version=f"sparsync {__version__}")
    added = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (run, what, shown) in commands().items():
        made = added.add_parser(name, help=what, **_texts(f"{what[0].upper()}{what[1:]}.", shown))
        add_options(made, name)
        made.set_defaults(run=run)
    return parser


def _texts(about: str, example: str) -> dict[str, Any]:  # Any: as argparse takes them
    """Make description and epilog; the lines of the example are not wrapped."""
    epilog = "\n  ".join(["example:", *example.splitlines()])
    raw = argparse.RawDescriptionHelpFormatter
    return {"description": textwrap.fill(about, 79), "epilog": epilog, "formatter_class": raw}


def commands() -> dict[str, tuple[Callable[[argparse.Namespace, list[str]], None], str, str]]:
    """Map each command's name to its function, one-line summary and examples.

    The function gets the options and the arguments they were parsed from.
    """
    return {
        "compare": (
            _compare,
            "train a job with several schemes over rate-limited links, one after the other, and report which is best",
            "sparsync compare --ranks 4 --link 100mbit --out results \\\n"
            "  --schemes dense,bf16,topk:density=0.01:values=int8",
        ),
        "launch": (
            _launch,
            "run an unchanged script of torch.distributed over links of a chosen rate",
            "sparsync launch --ranks 4 --link 100mbit -- python train.py --epochs 1\n"
            "sparsync launch --fault kill:2@30s --fault join@45s -- examples/elastic.py",
        ),
        "demo": (
            _demo,
            "compare schemes on two language models, trained by SGD and by AdamW, within minutes on two cores",
            "sparsync demo --steps 5 --out demo",
        ),
        "report": (
            _report,
            "make tables and the picture again from the folder that a comparison wrote",
            "sparsync report results",
        ),
        "probe": (
            _probe,
            "measure what exchanges, memory and kernels take on a group of ranks, and write it to a file for `sparsync advise`",
            "sparsync probe --up 20mbit --down 100mbit --workload gpt --out probe.toml",
        ),
        "advise": (
            _advise,
            "predict a step of each scheme on a probed group, and say which to use, including dense bf16",
            "sparsync advise --probe probe.toml --workload gpt",
        ),
        "simulate": (
            _simulate,
            "predict a published setup, or your own, for other numbers of ranks and link rates",
            "sparsync simulate --list\nsparsync simulate --preset oktopk-bert-256 --ranks 64",
        ),
        "frontier": (
            _frontier,
            "train each method at its best learning rate, all ranks in this process, and show the quality for the bits it sends",
            "sparsync frontier --workload gpt-tiny --steps 300 \\\n"
            "  --schemes dense,bf16,topk,two_shot:density=0.05:values=int4",
        ),
        "doctor": (
            _doctor,
            "say what this machine can do, what is missing, and what would not work with a script",
            "sparsync doctor\nsparsync doctor --scheme exact_oktopk -- train.py --epochs 1",
        ),
        "traffic": (
            _traffic,
            "count what schemes send, select and leave in the residual, step by step, in this process",
            "sparsync traffic --schemes exact_micro,topk --ranks 8 --density 0.01\nsparsync traffic --workload gpt-tiny --steps 50",
        ),
        "schemes": (_schemes, "list the schemes, or the settings of one", "sparsync schemes\nsparsync schemes topk"),
        "workloads": (_workloads, "list the training jobs, or start your own", "sparsync workloads --new my_job.py"),
    }


def _compare(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.compare.comparison import compare
    from sparsync_lab.report.page import check

    hosts = _on_hosts(options)
    settings = _settings(options)
    where = _where(options, hosts, settings.rates_bits_per_s, settings.between, arguments)
    if compare(settings, options.out, ["sparsync", *arguments], where):
        _report(options, arguments)
        check(options.out)


def _where(
    options: argparse.Namespace,
    hosts: bool,
    speeds: tuple[float | None, float | None],
    delay: "Delay",
    arguments: list[str],
) -> "AbstractContextManager[Here | Hosts]":
    """Join a launcher's ranks or start local ones; restarts this program if it lacks the rights for network namespaces."""
    from sparsync_lab.netlab import restart_with_rights
    from sparsync_lab.workers.group import here
    from sparsync_lab.workers.hosts import joined

    if hosts:
        return joined(options.timeout)
    if speeds != (None, None):
        restart_with_rights("sparsync_lab.cli", arguments)
    return here(options.ranks, *speeds, delay, options.timeout)


def _launch(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync.base import scheme_text
    from sparsync_lab.launch.faults import parse_fault
    from sparsync_lab.launch.settings import LaunchSettings, checked_command
    from sparsync_lab.launch.supervisor import launch
    from sparsync_lab.netlab import delay_of, rates, restart_with_rights

    up, down = rates(options.link, options.up, options.down)
    delay = delay_of(options.delay, options.jitter)
    command = checked_command(options.command)
    scheme = options.scheme or scheme_text.text_of_environment() or None
    if scheme is not None:
        from sparsync.exchanges.choice import check_text  # with torch, which takes seconds

        with nullcontext() if options.scheme else scheme_text.of_variable(scheme):
            check_text(scheme)  # before any rank starts
    faults = tuple(map(parse_fault, options.fault))
    settings = LaunchSettings(command, options.ranks, up, down, scheme, options.grace, delay, faults)
    if settings.limited:
        restart_with_rights("sparsync_lab.cli", arguments)
    status = launch(settings)
    if status:
        raise SystemExit(status)


def _probe(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.netlab import delay_of, rates
    from sparsync_lab.netlab.delay import check_delay
    from sparsync_lab.probe.command import probe
    from sparsync_lab.probe.task import Request
    from sparsync_lab.report.format import links_text

    hosts = _on_hosts(options)
    speeds = rates(options.link, options.up, options.down)
    delay = check_delay(delay_of(options.delay, options.jitter), speeds != (None, None))
    request = Request(
        seconds=options.seconds,
        schemes=options.schemes,
        link=f"emulated {links}" if (links := links_text(*speeds, delay)) else "loopback",
        workload=options.workload,
        options=_workload_options(options),
        bucket_mb=options.bucket_mb,
        timeout_s=options.timeout,
    )
    probe(request, options.ranks, options.out, _where(options, hosts, speeds, delay, arguments))


def _doctor(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.doctor.command import doctor

    script = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    if script and Path(script[0]).name.startswith("python"):
        script = script[1:]
    if script and not Path(script[0]).is_file():
        raise ValueError(f"there is no script {script[0]}; give its path, as in sparsync doctor -- train.py")
    if options.scheme is not None:
        from sparsync.exchanges.choice import check_text

        if not script:
            raise ValueError(f"--scheme {options.scheme} is for a script; give one, or leave it out")
        check_text(options.scheme)
    if status := doctor(script, options.scheme or ""):
        raise SystemExit(status)


def _on_hosts(options: argparse.Namespace) -> bool:
    """Tell whether torchrun started the ranks, and fill in unset `options`. Raises ValueError for options that do not fit."""
    from sparsync_lab.netlab import MAX_RANKS
    from sparsync_lab.workers.hosts import launched, world_size

    if not launched():
        options.ranks = 4 if options.ranks is None else options.ranks
        if options.ranks > MAX_RANKS:
            raise ValueError(f"--ranks must be at most {MAX_RANKS} on one machine, got {options.ranks}")
        options.link = options.link or "100mbit"
        return False
    if options.ranks not in (None, world_size()):
        raise ValueError(f"torchrun has started {world_size()} ranks, got --ranks {options.ranks}; leave --ranks out")
    for name in ("link", "up", "down", "delay", "jitter"):
        if (given := getattr(options, name)) not in (None, "none"):
            raise ValueError(f"torchrun's ranks use the hosts' own links, got --{name} {given}; leave --{name} out")
    options.ranks, options.link = world_size(), "none"
    return True


def _advise(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab import advise, workloads
    from sparsync_lab.predict import probe_file
    from sparsync_lab.workloads.base import family_of_job

    probe = probe_file.read(options.probe)
    if probe.backward is None:
        raise ValueError(
            f"{options.probe} says nothing of a model; probe with --workload, or write your model's timeline into it"
        )
    own, family = _workload_options(options), "steps"
    if options.workload is not None:
        workload = workloads.get(options.workload, **own)
        family = family_of_job(workload)
        advise.check_model(workload, probe.backward)
    if options.schemes is None:
        elements = sum(each.elements for each in probe.backward.bucket)
        options.schemes = advise.advised_schemes(family, probe.group.ranks, elements)
    choices = _choices(options, (probe.group.ranks,))
    found = advise.advise(probe, probe.backward, choices, family)
    print(advise.text(found, probe, probe.backward))


def _frontier(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.frontier.command import frontier
    from sparsync_lab.frontier.study import FrontierStudy

    study = FrontierStudy(
        schemes=_choices(options, options.ranks),
        **_training(options),
        rates=options.rates,
        rates_seed=options.rates_seed,
        device=options.device,
    )
    beside = {text: replace(study, workload=name, options=own) for text, name, own in options.beside}
    frontier(study, options.out, options.jobs, ["sparsync", *arguments], beside, options.page, options.part)


def _demo(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab import demo
    from sparsync_lab.compare.comparison import compare

    check_file(options.out / demo.HALVES[0].folder / "results.jsonl")
    for number, (half, words) in enumerate(zip(demo.HALVES, demo.commands(options.out, options.steps), strict=True), 1):
        chosen = _parser().parse_args(words)
        print(f"\n{number} of {len(demo.HALVES)}: {half.title}; results go to {chosen.out}.\n", flush=True)
        settings = _settings(chosen)
        where = _where(chosen, False, settings.rates_bits_per_s, settings.between, arguments)
        compare(settings, chosen.out, ["sparsync", *words], where)
        _report(chosen, words)


def _report(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.report.page import report

    report(getattr(options, "folder", None) or options.out)


def _traffic(options: argparse.Namespace, arguments: list[str]) -> None:
    import torch

    from sparsync_lab import workloads
    from sparsync_lab.scheme_choice import parse_schemes
    from sparsync_lab.traffic.command import Study, traffic
    from sparsync_lab.traffic.stream import OfJob, Synthetic

    torch.set_num_threads(1)  # sums, and hence the output, must not depend on the number of cores
    schemes, chosen = parse_schemes(options.schemes, options.density), _workload_options(options)
    if options.workload is None:
        stream = Synthetic(options.ranks, options.elements or 100_000, options.seed)
        source = f"drawn gradients, seed {options.seed}"
    elif options.elements is not None:
        raise ValueError(
            f"--elements applies only to drawn gradients, got it with --workload {options.workload}; leave it out"
        )
    else:
        stream = OfJob(workloads.get(options.workload, **chosen), options.ranks, options.seed, options.steps)
        source = f"gradients of {options.workload}, seed {options.seed}"
    study = Study(schemes, stream, options.steps)
    traffic(study, f"{options.ranks} ranks, {study.elements} elements, density {options.density:g}, {source}")


def _simulate(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab.simulate.command import list_presets, simulate

    if options.list:
        list_presets()
    elif options.preset is None:
        raise ValueError("name a set-up with --preset; --list shows all of them")
    else:
        simulate(options.preset, options.ranks, options.gbit)


def _schemes(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync import schemes

    if options.name is not None:
        settings = {f"  {key}": f"default {value!r}" for key, value in schemes.settings(options.name).items()}
        about = f"{options.name}: {schemes.describe(options.name)}" if options.name in schemes.names() else options.name
        print(f"{terminal.wrapped(about)}\n{terminal.aligned(settings)}")
        return
    from sparsync.recipes import TABLE
    from sparsync_lab.recipes import SYSTEMS

    print(terminal.aligned({name: schemes.describe(name) for name in schemes.names()}))
    print("\nRecipes, which attach takes by bits=, and commands as default and bits=0.8:")
    for each in TABLE:
        print(terminal.wrapped(str(each)))
    print("\nPublished systems, which compare and frontier take like schemes:")
    print(terminal.aligned({name: f"{about}: {text}" for name, (text, about) in SYSTEMS.items()}))
    print()
    print(terminal.wrapped(_SCHEMES))


def _workloads(options: argparse.Namespace, arguments: list[str]) -> None:
    from sparsync_lab import workloads

    if options.new is not None:
        print(f"Written to {options.new}. Try it:\n{workloads.write_new(options.new)}")
        return
    print(terminal.aligned(workloads.summaries()))
    print()
    print(terminal.wrapped(_WORKLOADS))


def _settings(options: argparse.Namespace) -> "CompareSettings":
    from sparsync_lab.compare.settings import CompareSettings

    same = ("link", "up", "down", "delay", "jitter", "density", "target", "eval_every", "bucket_mb")
    given = {name: getattr(options, name) for name in same}
    return CompareSettings(
        schemes=_choices(options, (options.ranks,)), **_training(options), **given, timeout_s=options.timeout
    )


def _choices(options: argparse.Namespace, ranks: tuple[int, ...]) -> "tuple[SchemeChoice, ...]":
    """Parse --schemes; recipes are those for the job's optimizer, or for AdamW without a job."""
    from sparsync_lab import workloads
    from sparsync_lab.scheme_choice import asks_for_recipe, parse_schemes
    from sparsync_lab.workloads.base import family_of_job

    family = "steps"
    if asks_for_recipe(options.schemes) and options.workload is not None:
        family = family_of_job(workloads.get(options.workload, **_workload_options(options)))
    return parse_schemes(options.schemes, options.density, family, ranks)


def _training(options: argparse.Namespace) -> dict[str, Any]:  # Any: the types of the fields
    """Collect the settings that `compare` and `frontier` share."""
    shared = {name: getattr(options, name) for name in ("workload", "ranks", "steps", "seeds")}
    return {**shared, "options": _workload_options(options)}


def _workload_options(options: argparse.Namespace) -> dict[str, Any]:  # Any: the workload converts the text
    if options.workload is None and (options.option or options.data is not None):
        raise ValueError("--option and --data need a workload; name one with --workload")
    chosen: dict[str, Any] = dict(_key_value(item) for item in options.option)
    if options.data is not None:
        chosen["data"] = str(Path(options.data).resolve())
    return chosen


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option takes KEY=VALUE, got {text!r}")
    return key, value


if __name__ == "__main__":
    main()
