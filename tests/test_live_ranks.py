"""The ranks that serve one test after the other: each finds them as new, and what one leaves behind ends them."""

import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import distributed, stepped
from helpers.distributed import LiveRanks, run

pytestmark = pytest.mark.distributed


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRanks]:
    made = LiveRanks()
    monkeypatch.setattr(distributed, "LIVE", made)
    yield made
    made.end()


def seen() -> tuple[int, str, float, int, list[str]]:
    """Draw, sum over the group and warn; return the process, its folder, the draw, the sum, and what was warned of."""
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("once", stacklevel=1)
    return os.getpid(), str(Path.cwd()), float(torch.rand(())), int(total), [str(each.message) for each in shown]


def test_a_live_rank_has_the_seed_the_folder_and_the_warnings_of_a_new_one(
    live: LiveRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(seen, 2)
    monkeypatch.chdir(tmp_path)
    second, third, fresh = run(seen, 2), run(seen, 1), run(seen, 1, fresh=True)
    assert [each[0] for each in second] == [each[0] for each in first]
    assert third[0][0] == first[0][0] != fresh[0][0]
    assert [each[1:] for each in second] == [(str(tmp_path), first[0][2], 3, ["once"])] * 2
    assert third[0][1:] == fresh[0][1:] == (str(tmp_path), first[0][2], 1, ["once"])
    assert live.thrown_away == [] and live.started == 2


def leaving() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT"] = "1"
    stepped.Stepped.step = lambda self: None  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=time.sleep, args=[60.0], name="sleeper", daemon=True).start()
    dist.destroy_process_group()


def test_what_is_left_behind_is_told_and_ends_the_processes(live: LiveRanks) -> None:
    before = run(seen, 1)[0][0]
    run(leaving, 1)
    (told,) = live.thrown_away
    assert told.startswith("test_live_ranks.leaving on 1 left behind: another default process group; thread sleeper; ")
    for trace in (
        "default type: torch.float64",
        "deterministic algorithms: (True, False)",
        "environment variable LEFT",
        "helpers.stepped.Stepped.step changed",
    ):
        assert trace in told
    assert run(seen, 1)[0][0] != before
