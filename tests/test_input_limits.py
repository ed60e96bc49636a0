"""Numbers that no machine holds are refused where they come in."""

import re
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import Le

from sparsync.comm.local import LocalWorld
from sparsync_lab.cli import main
from sparsync_lab.predict import probe_file
from sparsync_lab.predict.exchanges import MOST_RANKS, Given
from sparsync_lab.predict.probe_file import Kernel, Latency, Memory, Operation, Probe, ProbedGroup
from sparsync_lab.simulate import setup

GROUP = ProbedGroup(4, "gloo", 2, "10 Gbit/s", "cpu", 8, "2.13.0", "2026-11-22T15:00:00+00:00")
OPERATIONS = tuple(
    Operation(kind, nbytes, 1.0, 1.0, 1.0)
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv")
    for nbytes in (1, 9)
)
PROBE = Probe(GROUP, OPERATIONS, Latency(3e-5), Memory(1e10), (Kernel("select", 1e9, 0.0),))


def test_a_probe_of_more_ranks_than_plans_are_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe.toml"
    path.write_text(probe_file.text(PROBE).replace("ranks = 4", "ranks = 1000000000"))
    with pytest.raises(ValueError, match=r"probe\.toml: group\.ranks: .* 100000, got 1000000000"):
        probe_file.read(path)
    with pytest.raises(ValueError, match="at most 100,000 ranks, got P = 100001"):
        Given(1, MOST_RANKS + 1)
    assert Le(MOST_RANKS) in get_args(setup.Ranks)


@pytest.mark.usefixtures("signal_handlers_are_put_back")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["simulate", "--preset", "lstm-4-100mbit", "--ranks", "1000000000"],
            "at most 100,000 ranks, got P = 1000000000",
        ),
        (["traffic", "--ranks", "4097", "--elements", "1"], "a world in one process has 1 to 4,096 ranks"),
        (
            ["compare", "--ranks", "1000000000", "--link", "none"],
            "--ranks must be at most 64 on one machine, got 1000000000",
        ),
        (
            ["probe", "--ranks", "1000000000", "--link", "none"],
            "--ranks must be at most 64 on one machine, got 1000000000",
        ),
    ],
)
def test_numbers_that_no_machine_holds_are_refused_where_they_come_in(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_thousand_ranks_still_fit_into_one_process() -> None:
    assert sum(LocalWorld(1024).run(lambda comm: comm.rank)) == 1024 * 1023 // 2
