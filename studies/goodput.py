"""Train while ranks are killed and others join, and measure the cost: samples per second, pauses, and the final loss.

    python -m studies goodput [--seconds 180] [--every 60] [--link 100mbit] [--out build/goodput] [--print]
    python -m studies goodput --quality [--seeds 0,1,2] [--steps 800] [--kills 10] [--out build/goodput]
    python -m studies goodput --joiner [--option width=384 --option layers=6] [--out build/goodput]

The first form trains the gpt job over links with a rate and a delay, with each rank and the store in its own network namespace: without
`sparsync_elastic`; with it, undisturbed; with it, a random rank killed every --every seconds and a new one started; and under torchrun,
which after the same kills restarts all ranks from the last checkpoint, saved every --checkpoint-every steps. Goodput is the rate of samples
whose steps are in the final weights, relative to the undisturbed run. --quality compares the perplexity after --kills kills and joins with
an undisturbed run of each seed; links do not matter there, so ranks use loopback. --joiner lets one rank join a model of the given size
over the links. Needs root or a user namespace, and a C compiler, except for --quality.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparsync
import sparsync_elastic as elastic
from sparsync_lab import workloads
from sparsync_lab.netlab import Delay, RunNetwork, network, parse_delay, parse_rate, restart_with_rights
from sparsync_lab.report.format import significant
from sparsync_lab.workers.descendants import descendants
from studies import parts
from studies.elastic.rank import serve
from studies.trials import process
from studies.trials.process import Entry, Seat, Tell, Worker, await_all, stop, take_seat

PAGE = "docs/elastic.md"
TIMEOUT_S, START_S = 10.0, 120.0
SCHEME = "two_shot:density=0.03:values=sign:density_down=0.12"
MODES = {
    "plain": "`attach` without a run",
    "undisturbed": "`elastic.Run`, undisturbed",
    "killed": "`elastic.Run`, a rank killed every {every:g} s, another joins",
    "torchrun": "torchrun, a rank killed every {every:g} s, all start again from a checkpoint",
}
UNDER_TORCHRUN, KILLED = ("plain", "torchrun"), ("killed", "torchrun")
ENDLESS = 10**6  # steps
Spec = Mapping[str, Any]  # Any: JSON; a rank's work


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["rank"]:
        _under_torchrun(json.loads(argv[1]))
        return
    options = parts.options("goodput", __doc__)
    add = options.add_argument
    add("--seconds", type=float, default=180.0, help="of each run (default: 180)")
    add("--every", type=float, default=60.0, help="seconds between two kills (default: 60)")
    add("--ranks", type=int, default=4)
    add("--link", default="100mbit")
    add("--delay", default="25ms")
    add("--only", default=",".join(MODES), help="runs to make; the others are read from --out")
    add("--checkpoint-every", type=int, default=50, help="steps, under torchrun (default: 50)")
    add("--option", action="append", default=[], help="of the job, as width=384")
    add("--quality", action="store_true", help="compare the loss at the end")
    add("--joiner", action="store_true", help="measure how long one takes to join")
    add("--seeds", default="0,1,2")
    add("--steps", type=int, default=800, help="with --quality (default: 800)")
    add("--kills", type=int, default=10, help="with --quality (default: 10)")
    add("--out", type=Path, default=Path("build/goodput"))
    given = options.parse_args(argv)
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.quality:
        part, content = "elastic quality", _quality(given)
    else:
        restart_with_rights("studies", ["goodput", *argv])
        part, content = ("elastic joiner", _joiner(given)) if given.joiner else ("elastic goodput", _goodput(given))
    parts.put(PAGE, part, content, given.print)


class Ranks:
    """The ranks of a run, each at its place in the network, and its store in the last place."""

    def __init__(self, net: RunNetwork, places: int, folder: Path, spec: Spec) -> None:
        self.folder, self.all, self.places = folder, list[Worker](), dict[int, Worker]()
        # The program that delays packets belongs to this process.
        self._net, self._port = replace(net, forwarder=None), net.free_port()
        self._spec = {**spec, "places": places, "address": f"{net.addresses[places]}:{self._port}"}
        store = Worker(self._seat(places), serve, self._port)
        self.all.append(store)
        await_all(lambda: b"serving" in _content(store.seat.path("output")), time.monotonic() + START_S)

    def start(self, place: int) -> Worker:
        target = _agent if self._spec["mode"] in UNDER_TORCHRUN else _member
        self.places[place] = Worker(self._seat(place), target, self._spec)
        self.all.append(self.places[place])
        return self.places[place]

    def _seat(self, place: int) -> Seat:
        return Seat(len(self.all), place, self.folder, self._net)

    def kill(self, place: int) -> None:
        """Kill a rank; under torchrun kill the worker, not its agent."""
        killed = self.places[place]
        if self._spec["mode"] in UNDER_TORCHRUN:
            _kill(descendants(killed.process.pid))
        else:
            killed.stop()

    def stop(self) -> None:
        workers = [pid for each in self.all if each.alive for pid in descendants(each.process.pid)]
        stop(self.all)
        _kill(workers)

    def told(self) -> list[Entry]:
        """Collect the records of all ranks, by time."""
        return sorted((entry for each in self.all for entry in each.entries), key=lambda entry: entry["t"])

    def step(self) -> int:
        """Find the furthest step. Raises RuntimeError if a rank has failed."""
        for place, each in self.places.items():
            if (status := each.process.exitcode) is not None and status > 0:
                raise RuntimeError(f"the rank at place {place} ended with {status}; see the outputs in {self.folder}")
        return max((each["step"] for each in self.told() if "samples" in each), default=0)

    def await_step(self, step: int) -> None:
        while self.step() < step:
            time.sleep(0.2)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@contextmanager
def _started(given: argparse.Namespace, name: str, spec: Spec, linked: bool = True) -> Iterator[Ranks]:
    folder = given.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rate = parse_rate(given.link) if linked else None
    delay = Delay(parse_delay(given.delay)) if linked else Delay()
    with network(given.ranks + 1, rate, delay=delay) as net:
        ranks = Ranks(net, given.ranks, folder, {"first": given.ranks, "options": given.option, "seed": 0, **spec})
        try:
            yield ranks
        finally:
            ranks.stop()


def _goodput(given: argparse.Namespace) -> str:
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        file = given.out / f"{mode}.json"
        if mode in given.only.split(","):
            file.write_text(json.dumps(_trained(given, mode), indent=1))
        if file.exists():
            found[mode] = json.loads(file.read_text())
    batch_size: Any = _job(given.option).batch_size
    heads = ("", "kills", "samples a second", "of the undisturbed run", "of whole steps without a pause", "step, ms")
    rows = [
        (
            MODES[mode].format(every=given.every),
            str(each["kills"]),
            significant(each["samples_per_s"]),
            f"{100 * each['samples_per_s'] / found['undisturbed']['samples_per_s']:.1f} %",
            f"{100 * each['samples_per_s'] * each['step_s'] / batch_size:.1f} %",
            significant(1e3 * each["step_s"]),
            significant(each["mb"]),
            significant(each["pause_s"]),
        )
        for mode, each in found.items()
    ]
    links = f"{given.link} and {given.delay} one way, {given.seconds:g} s each"
    about = f"{given.ranks} ranks on {os.cpu_count()} cores, {links}, steps at 0.8 bits:"
    return f"{about}\n\n{parts.table((*heads, 'MB a rank and 1000 steps', 'longest pause, s'), rows)}"


def _trained(given: argparse.Namespace, mode: str) -> dict[str, float]:
    """Train in one mode, and compute its figures for the given seconds after its first steps."""
    chance = random.Random(0)
    spec = {"mode": mode, "until": ENDLESS, "checkpoint": str(given.out / mode), "every": given.checkpoint_every}
    with _started(given, mode, spec) as ranks:
        for place in range(given.ranks):
            ranks.start(place)
        ranks.await_step(10)
        began, kills, back = time.monotonic(), 0, dict[int, float]()
        while (now := time.monotonic() - began) < given.seconds:
            if mode in KILLED and now > given.every * (kills + 0.5):
                place = chance.randrange(given.ranks)
                ranks.kill(place)
                kills += 1
                if mode == "killed":
                    back[place] = now + 2.0
            for place in [place for place, at in back.items() if now > at]:
                ranks.start(place)
                del back[place]
            time.sleep(0.05)
        seconds = time.monotonic() - began
        steps = [each for each in ranks.told() if began <= each["t"] and "samples" in each]
    last = {each["step"]: each for each in steps}  # those in the final weights
    applied = sorted(each["t"] for each in last.values())
    between = [after - before for before, after in pairwise(applied)]
    return {
        "kills": kills,
        "samples_per_s": sum(each["samples"] for each in last.values()) / seconds,
        "step_s": statistics.median(between),
        "mb": statistics.median(each["nbytes"] for each in steps[len(steps) // 2 :]) * 1000 / 1e6,
        "pause_s": max(between),
    }


def _quality(given: argparse.Namespace) -> str:
    rows = []
    for seed in map(int, given.seeds.split(",")):
        ends: list[dict[str, float]] = []
        for kills in (0, given.kills):
            file = given.out / f"quality-{seed}-{kills}.json"
            if not file.exists():
                file.write_text(json.dumps(_disturbed(given, seed, kills)))
            ends.append(json.loads(file.read_text()))
        whole, disturbed = ends
        behind = 100 * (disturbed["perplexity"] / whole["perplexity"] - 1)
        told = [f"{each['perplexity']:.3f}" for each in ends]
        rows.append((str(seed), *told, f"{behind:+.1f} %", str(disturbed["changes"])))
    heads = ("seed", "undisturbed", f"{given.kills} kills and joins", "behind", "meetings")
    return f"Perplexity after {given.steps} steps, {given.ranks} ranks:\n\n{parts.table(heads, rows)}"


def _disturbed(given: argparse.Namespace, seed: int, kills: int) -> dict[str, float]:
    """Compute the final perplexity of a run in which `kills` ranks were killed and as many joined."""
    chance, spec = random.Random(seed), {"mode": "killed", "until": given.steps, "seed": seed}
    with _started(given, f"quality-{seed}-{kills}", spec, linked=False) as ranks:
        for place in range(given.ranks):
            ranks.start(place)
        for number in range(kills):
            ranks.await_step(int((number + 0.2) * given.steps / kills))
            place = chance.randrange(given.ranks)
            ranks.kill(place)
            joins = ranks.start(place)
            while not joins.said("samples"):
                ranks.step()
                time.sleep(0.1)
        while not (ends := [each for each in ranks.told() if "perplexity" in each]):
            ranks.step()
            time.sleep(0.2)
        meetings = max(each["change"] for each in ranks.told() if "change" in each)
    return {"perplexity": ends[0]["perplexity"], "changes": meetings - 1}


def _joiner(given: argparse.Namespace) -> str:
    found = [_joined(given, background) for background in (True, False)]
    rows = [(name, *(each[name] for each in found)) for name in found[0]]
    table = parts.table(("", "in the background", "while the others wait"), rows)
    return f"{given.link} and {given.delay} one way:\n\n{table}"


def _joined(given: argparse.Namespace, background: bool) -> dict[str, str]:
    """Let a rank join, and compute its figures."""
    spec = {"mode": "killed", "until": ENDLESS, "first": given.ranks - 1, "background": background}
    with _started(given, f"joiner-{background}", spec) as ranks:
        for place in range(given.ranks - 1):
            ranks.start(place)
        ranks.await_step(5)
        asked, joins = time.monotonic(), ranks.start(given.ranks - 1)
        while not joins.said("samples"):
            ranks.step()
            time.sleep(0.1)
        told = ranks.told()
    change, first = joins.said("change"), joins.said("samples")
    assert change is not None and first is not None
    others = [each for each in told if each.get("change") == change["change"] and not each["nbytes"]]
    began = change["t"] - change["s"]
    meanwhile = {each["step"] for each in told if "samples" in each and began < each["t"] < change["t"]}
    return {
        "parameters": f"{change['parameters']:,}",
        "from the start of its process to its first step in the weights, s": significant(first["t"] - asked),
        "sent to it while the others trained, MB": significant(change["ahead_nbytes"] / 1e6),
        "that took, s": significant(change["ahead_s"]),
        "steps that the others took meanwhile": str(len(meanwhile)),
        "sent to it while they waited, MB": significant(change["nbytes"] / 1e6),
        "that took them, s": significant(change["received_s"]),
        "from the last byte to its first step in the weights, s": significant(first["t"] - change["t"]),
        "the others waited, s": significant(max(each["s"] for each in others)),
    }


def _job(options: Sequence[str]) -> Any:  # Any: of the gpt job, which has a batch size
    return workloads.get("gpt", **dict(each.split("=") for each in options))


class Training:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.job = spec, _job(spec["options"])
        self.model = self.job.model(spec["seed"])
        self.optimizer, self.schedule = self.job.optimizer(self.model, min(spec["until"], 10_000))
        self.handle: Any = None  # Any: AdamWSteps

    def step(self, step: int, rank: int, ranks: int, tell: Tell) -> None:
        """Take a step, and report it and this rank's traffic; there may be fewer `ranks` than places."""
        self.optimizer.zero_grad()
        batch = self.job.batch(self.spec["seed"], step, rank % self.spec["places"], self.spec["places"])
        self.job.loss(self.model, batch).backward()
        self.job.clip(self.model)
        self.optimizer.step()
        self.schedule.step()
        nbytes = sum((each.sent or each.cost).nbytes for each in self.handle.take_reports())
        tell(step=step + 1, samples=self.job.batch_size * ranks / self.spec["places"], nbytes=nbytes)


def _member(seat: Seat, spec: Spec) -> None:
    """Run a rank of an elastic run."""

    def work(tell: Tell) -> None:
        training = Training(spec)
        given = {"timeout_s": TIMEOUT_S, "wait_s": 120.0, "background": spec.get("background", True)}
        run = elastic.Run(spec["address"], ranks=spec["first"], **given)
        training.handle = sparsync.attach(
            training.model, sparsync.schemes.from_text(SCHEME), optimizer=training.optimizer
        )
        run.add(training.model, training.handle, training.optimizer, training.schedule)
        count = sum(each.numel() for each in training.model.parameters())

        def changed(of: elastic.Run) -> None:
            change = of.changes[-1]
            sent = {"nbytes": change.received_nbytes, "received_s": change.received_s}
            sent |= {"ahead_nbytes": change.ahead_nbytes, "ahead_s": change.ahead_s}
            tell(change=change.epoch, ranks=change.ranks, s=change.seconds, parameters=count, **sent)

        run.on_change = changed
        for step in run.steps(spec["until"]):
            with run.attempt():
                training.step(step, run.rank, run.size, tell)
        with training.handle.averaged():
            total, samples = training.job.evaluate(training.model, 0, 1)
        tell(perplexity=training.job.quality(total, samples))
        run.close()

    process.run(seat, work, finalizes=True)


def _agent(seat: Seat, spec: Spec) -> None:
    """Replace this process by torchrun's agent with one rank."""
    take_seat(seat)
    spec = {**spec, "log": str(seat.path("log"))}
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-conf=is_host=0", f"--rdzv-endpoint={spec['address']}"]
    launcher = ["-m", "torch.distributed.run", f"--nnodes={spec['places']}", "--nproc-per-node=1", "--max-restarts=100"]
    where = f"--local-addr={seat.links.addresses[seat.place]}"
    program = ["-m", "studies", "goodput", "rank", json.dumps(spec)]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *launcher, *rendezvous, where, *program])


def _under_torchrun(spec: Spec) -> None:
    """Train as a rank of torchrun, from the last checkpoint if there is one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, ranks, saves = dist.get_rank(), dist.get_world_size(), spec["mode"] == "torchrun"
    training = Training(spec)
    options = sparsync.Options(timeout_s=TIMEOUT_S)
    scheme = sparsync.schemes.from_text(SCHEME)
    training.handle = sparsync.attach(training.model, scheme, optimizer=training.optimizer, options=options)
    folder, first = Path(spec["checkpoint"]) / "checkpoint", 0
    others = {"schedule": training.schedule, "optimizer": training.optimizer}
    if saves and sparsync.checkpoint.holds_states(folder):
        first = sparsync.checkpoint.load(training.handle, folder) + 1
        for name, each in others.items():
            each.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    with Path(spec["log"]).open("a", buffering=1) as log:

        def tell(**what: Any) -> None:  # Any: JSON
            print(json.dumps({"t": time.monotonic(), **what}), file=log)

        for step in range(first, spec["until"]):
            training.step(step, rank, ranks, tell)
            if saves and (step + 1) % spec["every"] == 0:
                sparsync.checkpoint.save(training.handle, folder)
                for name, each in others.items() if rank == 0 else ():
                    torch.save(each.state_dict(), folder / f"{name}.pt")
