"""Ranks that a launcher has started: what they agree on, and what they write."""

import ipaddress
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync_lab.netlab import routes
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
def test_a_rank_that_fails_says_so_and_ends_all(tmp_path: Path) -> None:
    job = ["--workload", f"{THIRD_PARTY}:LineFit", "--steps", "2", "--schemes", "dense"]
    (tmp_path / "out").write_text("in the way of rank 0, which alone writes")
    done = torchrun("compare", *job, "--timeout", "20", "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert "cannot write" in done.stderr


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
def test_the_first_difference_between_ranks_is_named(found: list[dict[str, str]], problem: str | None) -> None:
    said = hosts._disagreement(found)
    assert said == problem if problem is None else said is not None and said.startswith(problem)
