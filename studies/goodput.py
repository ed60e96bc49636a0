"""Trains while ranks are killed and others join, and says what that costs: samples a second, pauses, and the loss at the end.

    .venv/bin/python -m studies goodput [--seconds 180] [--every 60] [--link 100mbit] [--torchft PYTHON] [--out build/goodput] [--print]
    .venv/bin/python -m studies goodput --quality [--seeds 0,1,2] [--steps 800] [--kills 10] [--out build/goodput]
    .venv/bin/python -m studies goodput --joiner [--option width=384 --option layers=6] [--out build/goodput]

The first form trains the gpt job over links with a rate and a delay, one rank in each network namespace, and the store in one of its own:
without `sparsync_elastic`; with it, undisturbed; with it, a random rank killed every --every seconds and a new one started; and under
torchrun, which after the same kills starts all ranks again from the last checkpoint, one every --checkpoint-every steps. Where --torchft
names the Python of an environment with torchft and this project, also with torchft, undisturbed and with these kills. Goodput is the
samples of the steps that are in the weights at the end, a second, over those of the undisturbed run. --quality compares the perplexity
after --kills kills and joins with an undisturbed run of each seed; there links do not matter, and ranks talk over loopback. --joiner lets
one rank join a model of the given size over the links. Needs root or a user namespace, and a C compiler, except for --quality.
"""

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from studies import parts

PAGE = "docs/elastic.md"
TIMEOUT_S = 10.0
SCHEME = "two_shot:density=0.03:values=sign:density_down=0.12"
MODES = {
    "plain": "`attach` without a run",
    "undisturbed": "`elastic.Run`, undisturbed",
    "killed": "`elastic.Run`, a rank killed every {every:g} s, another joins",
    "torchrun": "torchrun, a rank killed every {every:g} s, all start again from a checkpoint",
    "torchft": "torchft, whole gradients, undisturbed",
    "torchft-killed": "torchft, a rank killed every {every:g} s, another joins",
}
KILLED = ("killed", "torchrun", "torchft-killed")
UNDISTURBED = {
    "torchft": "torchft",
    "torchft-killed": "torchft",
}  # what a run is compared with; of the others "undisturbed"


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] == "rank":
        _rank(json.loads(argv[1]))
        return
    options = parts.options("goodput", __doc__)
    options.add_argument("--seconds", type=float, default=180.0, help="of each run (default: 180)")
    options.add_argument("--every", type=float, default=60.0, help="seconds between two kills (default: 60)")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--link", default="100mbit")
    options.add_argument("--delay", default="25ms")
    options.add_argument("--only", default=",".join(MODES), help="runs to make; the others are read from --out")
    options.add_argument(
        "--torchft",
        default="",
        help="the Python of an environment with torchft and this project; without it these runs are left out",
    )
    options.add_argument("--checkpoint-every", type=int, default=50, help="steps, under torchrun (default: 50)")
    options.add_argument("--option", action="append", default=[], help="of the job, as width=384")
    options.add_argument("--quality", action="store_true", help="compare the loss at the end")
    options.add_argument("--joiner", action="store_true", help="measure how long one takes to join")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--steps", type=int, default=800, help="with --quality (default: 800)")
    options.add_argument("--kills", type=int, default=10, help="with --quality (default: 10)")
    options.add_argument("--out", type=Path, default=Path("build/goodput"))
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
    """The ranks of a run as processes, each in its place in the network, and its store in the last place."""

    def __init__(self, net: RunNetwork, ranks: int, out: Path, spec: Mapping[str, Any]) -> None:  # Any: JSON
        self.net, self.ranks, self.out, self.spec = net, ranks, out, spec
        self.places: dict[int, subprocess.Popen[bytes]] = {}
        self.waiting: dict[int, subprocess.Popen[bytes]] = {}  # to take a place when the rank there is killed
        self.started, self.port = 0, _free_port()
        self.store = self._process(ranks, self._serves(), "store")
        time.sleep(4.0)

    def _serves(self) -> list[str]:
        """Return the program at which ranks find each other."""
        if "python" in self.spec:
            lighthouse = str(Path(self.spec["python"]).with_name("torchft_lighthouse"))
            return [
                lighthouse,
                "--min_replicas=1",
                f"--bind=0.0.0.0:{self.port}",
                "--quorum_tick_ms=100",
                "--join_timeout_ms=10000",
            ]
        return [sys.executable, "-m", "sparsync_elastic", "--port", str(self.port)]

    def start(self, place: int, torchrun: bool = False, waits_for: Path | None = None) -> Path:
        """Start a rank at a place, beside the one that is there if it is to wait for a file first; return its log."""
        spec = {
            **self.spec,
            "address": f"{self.net.address(self.ranks)}:{self.port}",
            "log": str(self.out / f"{self.started}.jsonl"),
            "place": place,
            "own": self.net.address(place),
        }
        if waits_for is not None:
            spec["waits_for"] = str(waits_for)
        program = [self.spec.get("python", sys.executable), "-m", "studies", "goodput", "rank", json.dumps(spec)]
        if torchrun:
            rendezvous = f"--rdzv-endpoint={self.net.address(self.ranks)}:{self.port}"
            launcher = [
                "-m",
                "torch.distributed.run",
                f"--nnodes={self.ranks}",
                "--nproc-per-node=1",
                "--max-restarts=100",
            ]
            local = f"--local-addr={self.net.address(place)}"
            program = [
                sys.executable,
                *launcher,
                "--rdzv-backend=c10d",
                "--rdzv-conf=is_host=0",
                rendezvous,
                local,
                "-m",
                "studies",
                *program[3:],
            ]
        process = self._process(place, program, str(self.started))
        self.waiting, before = {**self.waiting, place: process}, self.places.get(place)
        if waits_for is None or before is None:
            self.places[place] = self.waiting.pop(place)
        self.started += 1
        return Path(str(spec["log"]))

    def _process(self, place: int, argv: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.net.interface}
        with (self.out / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                self.net.command(place, argv), stdout=log, stderr=log, env=env, start_new_session=True
            )

    def kill(self, place: int, torchrun: bool = False) -> None:
        """Kill a rank; under torchrun the worker, not its agent."""
        pid = self.places[place].pid
        if torchrun:
            found = subprocess.run(
                ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            for each in found:
                os.kill(int(each), signal.SIGKILL)
            return
        os.kill(pid, signal.SIGKILL)
        self.places.pop(place).wait()
        if place in self.waiting:
            self.places[place] = self.waiting.pop(place)

    def stop(self) -> None:
        """Kill everything."""
        for each in [*self.places.values(), *self.waiting.values(), self.store]:
            with suppress(ProcessLookupError):  # its group, as torchrun's agents have workers
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def told(self) -> list[dict[str, Any]]:  # Any: JSON
        """Return what ranks have logged, by time."""
        lines = [
            json.loads(line)
            for file in self.out.glob("*.jsonl")
            for line in file.read_text().splitlines()
            if line.endswith("}")
        ]
        return sorted(lines, key=lambda each: each["t"])

    def step(self) -> int:
        """Return the furthest step. Raises RuntimeError where a rank has failed."""
        for place, each in self.places.items():
            if each.poll():
                raise RuntimeError(
                    f"the rank at place {place} ended with {each.poll()}; see the last log in {self.out}"
                )
        return max((each["step"] for each in self.told() if "step" in each), default=0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


@contextmanager
def _started(
    given: argparse.Namespace, folder: Path, spec: Mapping[str, Any], linked: bool = True
) -> Iterator[Ranks]:  # Any: JSON
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    rate = parse_rate(given.link) if linked else None
    delay = Delay(parse_delay(given.delay)) if linked else Delay()
    with network(given.ranks + 1, rate, delay=delay) as net:
        ranks = Ranks(net, given.ranks, folder, {"ranks": given.ranks, "options": given.option, **spec})
        try:
            yield ranks
        finally:
            ranks.stop()


def _goodput(given: argparse.Namespace) -> str:
    found = {}
    for mode in MODES:
        file = given.out / f"{mode}.json"
        if mode in given.only.split(",") and (given.torchft or not mode.startswith("torchft")):
            file.write_text(json.dumps(_trained(given, mode), indent=1))
        if file.exists():
            found[mode] = json.loads(file.read_text())
    options = dict(each.split("=") for each in given.option)
    job: Any = workloads.get("gpt", **options)  # Any: a job has no batch size in general
    whole = {mode: found[UNDISTURBED.get(mode, "undisturbed")]["samples_per_s"] for mode in found}
    heads = (
        "",
        "kills",
        "samples a second",
        "of the undisturbed run of its kind",
        "of whole steps without a pause",
        "step, ms",
        "MB a rank and 1000 steps",
        "longest pause, s",
    )
    rows = [
        (
            MODES[mode].format(every=given.every),
            str(each["kills"]),
            significant(each["samples_per_s"]),
            f"{100 * each['samples_per_s'] / whole[mode]:.1f} %",
            f"{100 * each['samples_per_s'] * each['step_s'] / job.batch_size:.1f} %",
            significant(1e3 * each["step_s"]),
            significant(each["mb"]),
            significant(each["pause_s"]),
        )
        for mode, each in found.items()
    ]
    links = f"{given.link} and {given.delay} one way, {given.seconds:g} s each"
    about = f"{given.ranks} ranks on {os.cpu_count()} cores, {links}, steps at 0.8 bits but for torchft:"
    return f"{about}\n\n{parts.table(heads, rows)}"


def _trained(given: argparse.Namespace, mode: str) -> dict[str, Any]:  # Any: JSON
    """Return what a run of one kind has done in so many seconds after its first steps."""
    torchrun, chance = mode == "torchrun", random.Random(0)
    spec = {
        "mode": mode,
        "until": 10**6,
        "seed": 0,
        "folder": str(given.out / mode / "checkpoint"),
        "every": given.checkpoint_every,
    }
    if mode.startswith("torchft"):
        spec["python"] = given.torchft
    with _started(given, given.out / mode, spec) as ranks:
        for place in range(given.ranks):
            ranks.start(place, torchrun=mode in ("torchrun", "plain"))
        while ranks.step() < 10:
            time.sleep(0.2)
        began, first, kills, back = time.time(), ranks.step(), [], {}
        while (now := time.time() - began) < given.seconds:
            if mode in KILLED and now > given.every * (len(kills) + 0.5):
                place = chance.randrange(given.ranks)
                ranks.kill(place, torchrun)
                kills.append(time.time())
                if not torchrun:
                    back[place] = time.time() + 2.0
            for place, at in list(back.items()):
                if time.time() > at:
                    ranks.start(place)
                    del back[place]
            time.sleep(0.05)
        seconds, told = time.time() - began, [each for each in ranks.told() if began <= each["t"]]
    steps = [each for each in told if "samples" in each]
    times: dict[int, float] = {}  # when a step was in the weights that are there at the end
    for each in steps:
        times[each["step"]] = each["t"]
    last = max(times)
    applied = sorted(t for step, t in times.items())
    between = [after - before for before, after in pairwise(applied)]
    samples = sum(each["samples"] for each in {each["step"]: each for each in steps}.values())
    after = [min((t for t in applied if t > at), default=time.time()) - at for at in kills]
    return {
        "kills": len(kills),
        "samples_per_s": samples / seconds,
        "steps": last - first,
        "step_s": statistics.median(between),
        "mb": statistics.median(each["nbytes"] for each in steps[len(steps) // 2 :]) * 1000 / 1e6,
        "pause_s": max(between),
        "after_kill_s": after,
        "changes": [each for each in told if "change" in each],
    }


def _quality(given: argparse.Namespace) -> str:
    rows = []
    for seed in map(int, given.seeds.split(",")):
        ends = []
        for kills in (0, given.kills):
            file = given.out / f"quality-{seed}-{kills}.json"
            if not file.exists():
                file.write_text(json.dumps(_disturbed(given, seed, kills)))
            ends.append(json.loads(file.read_text()))
        whole, disturbed = ends
        behind = 100 * (disturbed["perplexity"] / whole["perplexity"] - 1)
        rows.append(
            (str(seed), *(f"{each['perplexity']:.3f}" for each in ends), f"{behind:+.1f} %", str(disturbed["changes"]))
        )
    heads = ("seed", "undisturbed", f"{given.kills} kills and joins", "behind", "meetings")
    return f"Perplexity after {given.steps} steps, {given.ranks} ranks:\n\n{parts.table(heads, rows)}"


def _disturbed(given: argparse.Namespace, seed: int, kills: int) -> dict[str, Any]:  # Any: JSON
    """Return the perplexity at the end of a run in which so many ranks were killed, and as many have joined."""
    chance, spec = random.Random(seed), {"mode": "killed", "until": given.steps, "seed": seed}
    with _started(given, given.out / f"quality-{seed}-{kills}", spec, linked=False) as ranks:
        for place in range(given.ranks):
            ranks.start(place)
        for number in range(kills):
            # A process that is ready takes the place of the killed one, so that the batch is smaller for a few steps only.
            ready, place = ranks.out / f"ready{number}", chance.randrange(given.ranks)
            joins = ranks.start(place, waits_for=ready)
            while ranks.step() < (number + 0.2) * given.steps / kills or not joins.exists():
                time.sleep(0.1)
            before = ranks.step()
            ranks.kill(place)
            while not any(each.get("ranks") == given.ranks - 1 and each["step"] >= before for each in ranks.told()):
                ranks.step()
                time.sleep(0.1)
            ready.touch()
            while not joins.read_text():
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
    return f"{given.link} and {given.delay} one way:\n\n{parts.table(('', 'in the background', 'while the others wait'), rows)}"


def _joined(given: argparse.Namespace, background: bool) -> dict[str, str]:
    """Return what there is to say of a rank that joins."""
    spec = {"mode": "killed", "until": 10**6, "seed": 0, "first": given.ranks - 1, "background": background}
    with _started(given, given.out / f"joiner-{background}", spec) as ranks:
        for place in range(given.ranks - 1):
            ranks.start(place)
        while ranks.step() < 5:
            time.sleep(0.2)
        asked = time.time()
        ranks.start(given.ranks - 1)
        log = ranks.out / f"{ranks.started - 1}.jsonl"
        while not log.exists() or '"samples"' not in log.read_text():
            time.sleep(0.1)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        told = ranks.told()
    others = [each for each in told if "change" in each and each["change"] == 2 and not each["nbytes"]]
    change, first = next(each for each in lines if "change" in each), next(each for each in lines if "samples" in each)
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


def _rank(spec: Mapping[str, Any]) -> None:  # Any: JSON
    """Train as one rank, and log each step."""
    torch.set_num_threads(1)
    job = workloads.get("gpt", **dict(each.split("=") for each in spec["options"]))
    model = job.model(spec["seed"])
    optimizer, schedule = job.optimizer(model, min(spec["until"], 10_000))
    if spec["mode"] in ("plain", "torchrun"):
        _plain(spec, job, model, optimizer, schedule)
        return
    if spec["mode"].startswith("torchft"):
        _torchft(spec, job, model, optimizer, schedule)
        return
    if "waits_for" in spec:
        job.batch(0, 0, 0, spec["ranks"])
        Path(spec["log"]).touch()
        while not Path(spec["waits_for"]).exists():
            time.sleep(0.05)
    run = elastic.Run(
        spec["address"],
        ranks=spec.get("first", spec["ranks"]),
        timeout_s=TIMEOUT_S,
        wait_s=120.0,
        background=spec.get("background", True),
    )
    handle: Any = sparsync.attach(model, sparsync.scheme(SCHEME), optimizer=optimizer)  # Any: AdamWSteps
    run.add(model, handle, optimizer, schedule)
    with Path(spec["log"]).open("w", buffering=1) as log:

        def tell(**what: Any) -> None:  # Any: JSON
            log.write(json.dumps({"t": time.time(), **what}) + "\n")

        def changed(of: elastic.Run) -> None:
            change, count = of.changes[-1], sum(each.numel() for each in model.parameters())
            sent = {"nbytes": change.received_nbytes, "received_s": change.received_s}
            sent |= {"ahead_nbytes": change.ahead_nbytes, "ahead_s": change.ahead_s}
            tell(change=change.epoch, ranks=change.ranks, step=change.step, s=change.seconds, parameters=count, **sent)

        run.on_change = changed
        for step in run.steps(spec["until"]):
            with run.attempt():
                _step(job, model, optimizer, schedule, handle, spec["seed"], step, run.rank, spec["ranks"])
                tell(step=step + 1, **_figures(job, handle, run.size / spec["ranks"]))
        with handle.averaged():
            total, count = job.evaluate(model, 0, 1)
        tell(perplexity=job.quality(total, count))
    run.close()


def _plain(spec: Mapping[str, Any], job: Any, model: Any, optimizer: Any, schedule: Any) -> None:  # Any: as in _rank
    """Train as torchrun starts it: from the last checkpoint, if there is one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    handle: Any = sparsync.attach(
        model, sparsync.scheme(SCHEME), optimizer=optimizer, options=sparsync.Options(timeout_s=TIMEOUT_S)
    )
    folder, first = Path(spec["folder"]), 0
    if spec["mode"] == "torchrun" and sparsync.checkpoint.holds_states(folder):
        first = sparsync.checkpoint.load(handle, folder) + 1
        schedule.load_state_dict(torch.load(folder / "schedule.pt", weights_only=True))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    with Path(spec["log"]).open("a", buffering=1) as log:
        for step in range(first, spec["until"]):
            _step(job, model, optimizer, schedule, handle, spec["seed"], step, rank, ranks)
            log.write(json.dumps({"t": time.time(), "step": step + 1, **_figures(job, handle)}) + "\n")
            if spec["mode"] == "torchrun" and (step + 1) % spec["every"] == 0:
                sparsync.checkpoint.save(handle, folder)
                if rank == 0:
                    torch.save(schedule.state_dict(), folder / "schedule.pt")
                    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def _torchft(spec: Mapping[str, Any], job: Any, model: Any, optimizer: Any, schedule: Any) -> None:  # Any: as in _rank
    """Train with torchft: a replica of one rank, with an all-reduce of the whole gradient in its process group.

    By `Manager.allreduce`, because the DistributedDataParallel of torchft 0.2.0 ends with an AssertionError where a replica is lost.
    """
    import torchft  # of another environment  # pyright: ignore[reportMissingImports]

    socket.gethostname = lambda: spec["own"]  # by which torchft has others fetch the weights
    own = dist.TCPStore(spec["own"], 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    trained = (model, optimizer, schedule)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        min_replica_size=1,
        load_state_dict=lambda state: [each.load_state_dict(saved) for each, saved in zip(trained, state, strict=True)],
        state_dict=lambda: [each.state_dict() for each in trained],
        replica_id=Path(spec["log"]).stem,
        store_addr=spec["own"],
        store_port=own.port,
        rank=0,
        world_size=1,
        hostname=spec["own"],
        lighthouse_addr=f"http://{spec['address']}",
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    stepping, parameters = torchft.Optimizer(manager, optimizer), list(model.parameters())
    nbytes = 2 * (spec["ranks"] - 1) / spec["ranks"] * sum(4 * each.numel() for each in model.parameters())
    with Path(spec["log"]).open("w", buffering=1) as log:
        while (step := manager.current_step()) < spec["until"]:
            stepping.zero_grad()
            job.loss(model, job.batch(spec["seed"], step, spec["place"], spec["ranks"])).backward()
            mean = torch.cat([each.grad.flatten() for each in parameters])
            manager.allreduce(mean).wait()
            for each, part in zip(parameters, mean.split([each.numel() for each in parameters]), strict=True):
                each.grad.copy_(part.view(each.shape))
            job.clip(model)
            stepping.step()
            schedule.step()
            if manager.current_step() > step:
                samples = job.batch_size * manager.num_participants() / spec["ranks"]
                log.write(json.dumps({"t": time.time(), "step": step + 1, "samples": samples, "nbytes": nbytes}) + "\n")
    manager.shutdown()


def _step(
    job: Any, model: Any, optimizer: Any, schedule: Any, handle: Any, seed: int, step: int, rank: int, ranks: int
) -> None:  # Any: as in _rank
    optimizer.zero_grad()
    job.loss(model, job.batch(seed, step, rank % ranks, ranks)).backward()
    job.clip(model)
    optimizer.step()
    schedule.step()


def _figures(job: Any, handle: Any, share: float = 1.0) -> dict[str, Any]:  # Any: as in _rank
    """Return the samples of a step, in which the ranks take this share of the batch, and the bytes that this rank has sent in it."""
    sent = sum((each.sent or each.cost).nbytes for each in handle.take_reports())
    return {"samples": share * job.batch_size, "nbytes": sent}
