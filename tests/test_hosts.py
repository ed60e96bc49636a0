"""Ranks that a launcher has started: what they agree on, and what they write."""

import ipaddress
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sparsync_lab import cli
from sparsync_lab.netlab import routes
from sparsync_lab.predict import probe_file
from sparsync_lab.workers import hosts

THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--standalone"]
ROUTES = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
docker0	000011AC	00000000	0001	0	0	0	0000FFFF	0	0	0
ib0	0000010A	00000000	0001	0	0	0	0000FFFF	0	0	0
ens4	00000000	0100000A	0003	0	0	0	00000000	0	0	0
down0	0001010A	00000000	0000	0	0	0	00FFFFFF	0	0	0
"""


@pytest.mark.usefixtures("signal_handlers_are_put_back")
@pytest.mark.parametrize(
    ("ranks", "arguments", "said"),
    [
        ("2", ["compare", "--ranks", "4"], "torchrun has started 2 ranks, got --ranks 4; leave --ranks out"),
        ("2", ["probe", "--link", "100mbit"], "the hosts' own links, got --link 100mbit; leave --link out"),
    ],
)
def test_options_that_contradict_the_launcher_are_refused(
    ranks: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks:
        variables = {"RANK": "0", "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_interface_of_an_address_is_that_of_its_most_specific_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "route"
    table.write_text(ROUTES)
    monkeypatch.setattr(routes, "IPV4_ROUTES", table)
    found = {"10.1.2.3": "ib0", "10.1.1.3": "ib0", "172.17.0.5": "docker0", "8.8.8.8": "ens4", "0.0.0.0": "ens4"}
    assert {address: routes._routed(ipaddress.IPv4Address(address)) for address in found} == found
    # Loopback leads to loopback, unless the other ranks are on other machines.
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
    ],
)
def test_the_first_difference_between_ranks_is_named(found: list[Any], problem: str | None) -> None:
    said = hosts._disagreement(found)
    assert said == problem if problem is None else said is not None and said.startswith(problem)


@pytest.mark.parametrize(
    ("stacks", "backend", "text"),
    [
        (["a", "a"], "gloo", ""),  # loopback is no network
        (["a", "b"], "gloo", "2 hosts, gloo over eth0"),
        (["a", "a", "b"], "gloo", "2 hosts, gloo over eth0"),
        (["a", "a"], "nccl", "1 host, NCCL"),
    ],
)
def test_the_network_is_described_by_what_the_hosts_say(stacks: list[str], backend: Any, text: str) -> None:
    assert hosts._network(Counter(stacks), ["eth0"], backend) == text


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
    assert done.stdout.count("Picture: ") == 1
    assert (tmp_path / "quality_over_time.png").exists()


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


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_fails_says_so_and_ends_all(tmp_path: Path) -> None:
    job = ["--workload", f"{THIRD_PARTY}:LineFit", "--steps", "2", "--schemes", "dense"]
    (tmp_path / "out").write_text("in the way of rank 0, which alone writes")
    done = torchrun("compare", *job, "--timeout", "20", "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "cannot write" in done.stderr
