"""Ranks that a launcher has started: what they agree on, and how a failure of any of them reaches rank 0."""

import ipaddress
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers.distributed import run
from sparsync_lab import cli
from sparsync_lab.netlab import routes
from sparsync_lab.predict import probe_file
from sparsync_lab.workers import hosts
from sparsync_lab.workers.group import RankFailedError
from sparsync_lab.workers.process import Emit, Message, Place

THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--standalone"]
ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
ens4	00000000	0100000A	0003	0	0	0	00000000	0	0	0
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
ib0	0000010A	00000000	0001	0	0	0	0000FFFF	0	0	0
down0	0001010A	00000000	0000	0	0	0	00FFFFFF	0	0	0
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched", "signal_handlers_are_put_back")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4"], "torchrun has started 2 ranks, got --ranks 4; leave --ranks out"),
        (["--link", "100mbit"], "the hosts' own links, got --link 100mbit; leave --link out"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "probe"])
def test_options_that_contradict_the_launcher_are_refused(
    command: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("signal_handlers_are_put_back")
def test_a_backend_is_for_launched_ranks_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--backend", "nccl"])
    assert "for ranks that torchrun has started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.1.2.3", "ib0"), ("10.1.1.3", "ib0"), ("172.17.0.5", "docker0"), ("8.8.8.8", "ens4"), ("0.0.0.0", "ens4")],
)
def test_the_interface_of_an_address_is_that_of_its_most_specific_route(
    address: str, interface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "route"
    table.write_text(ROUTES)
    monkeypatch.setattr(routes, "IPV4_ROUTES", table)
    assert routes._routed(ipaddress.IPv4Address(address)) == interface


def test_loopback_leads_to_loopback_unless_the_others_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "route"
    table.write_text(ROUTES)
    monkeypatch.setattr(routes, "IPV4_ROUTES", table)
    assert routes.interface_towards("localhost") == "lo"
    assert routes.interface_towards("localhost", elsewhere=True) == "ens4"


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([{"density": "0.1"}, {"density": "0.1"}], None),
        (
            [{"density": "0.1"}, {"density": "0.2"}],
            "ranks differ in density: rank 0 has 0.1, rank 1 has 0.2; start all",
        ),
        ([{"a": "1"}, {"a": "1"}, {"a": "1", "b": "2"}], "ranks differ in b: rank 0 has nothing, rank 2 has 2"),
        ([{"a": "1"}, "no data"], "rank 1: no data"),
    ],
)
def test_the_first_difference_between_ranks_is_named(found: list[Any], problem: str | None) -> None:
    said = hosts._disagreement(found)
    assert said == problem if problem is None else said is not None and said.startswith(problem)


@pytest.mark.parametrize(
    ("stacks", "backend", "text"),
    [
        (["a", "a"], "gloo", ""),  # loopback is no network
        (["a", "b"], "gloo", "2 hosts of 1 rank, gloo over eth0 at 10-25 Gbit/s"),
        (["a", "a", "b"], "gloo", "2 hosts of 1-2 ranks, gloo over eth0 at 10-25 Gbit/s"),
        (["a", "a"], "nccl", "1 host of 2 ranks, NCCL"),
    ],
)
def test_the_network_is_described_by_what_the_hosts_say(stacks: list[str], backend: Any, text: str) -> None:
    assert hosts._network(Counter(stacks), ["eth0"], backend, (10e9, 25e9, None)) == text


def here() -> hosts.Hosts:
    place = Place(dist.get_rank(), dist.get_world_size(), "lo", False, 30.0)
    return hosts.Hosts(place, "", 1, dist.distributed_c10d._get_default_store())  # pyright: ignore


def fails_on_rank_1(spec: Mapping[str, Any], place: Place, emit: Emit) -> None:
    emit({"kind": "from", "rank": place.rank})
    if place.rank == 1:
        raise ValueError("the disk is full")
    dist.barrier()


def outcome(kind: str) -> tuple[str, list[Message]]:
    taken: list[Message] = []
    ours = here()
    try:
        if kind == "agree":
            ours.agree(lambda: (None, {"density": str(ours.place.rank)}))
        elif kind == "prepare":
            ours.agree(lambda: (1 // ours.place.rank, {}))
        else:
            ours.run(fails_on_rank_1, {}, taken.append, lambda why: None)
    except (ValueError, RankFailedError, SystemExit) as error:
        return f"{type(error).__name__}: {error}", taken
    return "", taken


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("agree", "ValueError: ranks differ in density: rank 0 has 0, rank 1 has 1", "SystemExit: 2"),
        ("prepare", "ValueError: integer division or modulo by zero", "SystemExit: 2"),
        ("run", "RankFailedError: rank 1 failed: the disk is full", "RankFailedError: rank 1 failed: the disk is full"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_all_and_rank_0_says_it(kind: str, first: str, second: str) -> None:
    (said, taken), (other, none) = run(outcome, 2, kind=kind, fresh=kind == "run")
    assert said.startswith(first)
    assert other.startswith(second)
    assert taken == ([{"kind": "from", "rank": 0}] if kind == "run" else [])
    assert none == []


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [*TORCHRUN, "-m", "sparsync_lab.cli", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_compares_and_rank_0_alone_writes(tmp_path: Path) -> None:
    job = ["--workload", f"{THIRD_PARTY}:LineFit", "--option", "width=2000", "--steps", "3", "--eval-every", "2"]
    done = torchrun("compare", *job, "--schemes", "dense,topk:density=0.1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["config"]["ranks"] == 2
    assert not lines[0]["limited"]
    ends = [line for line in lines if line["kind"] == "end"]
    assert [end["status"] for end in ends] == ["finished"] * 2
    assert all(end["replicas_identical"] for end in ends)
    assert all(line["interface_bytes"] is None for line in lines if line["kind"] == "step")
    assert done.stdout.count("Report: ") == 1
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_probes_and_the_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "probe.toml"
    job = ["--workload", f"{THIRD_PARTY}:LineFit", "--seconds", "1", "--schemes", "topk", "--out", str(path)]
    done = torchrun("probe", *job)
    assert done.returncode == 0, done.stderr
    found = probe_file.read(path)
    assert (found.group.ranks, found.group.hosts, found.group.backend) == (2, 1, "gloo")
    assert found.backward is not None
    assert sum(bucket.elements for bucket in found.backward.bucket) == 9
