"""What a saved state of exchanged steps must be, checked before any of it is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.exchanges.block_ratios import FIRST
from sparsync.runtime.state_checks import check_alike, check_count, check_known


def check_steps(
    path: str,
    own: Mapping[str, Any],  # Any: as Handle.state_dict
    done: int,
    like: Mapping[str, Tensor],
    vectors: Sequence[str],
    counts: Sequence[str],
) -> None:
    """Raise ValueError unless `own`, which stands at `path`, is what exchanged steps save after `done` steps.

    `like` has a vector of each parameter; `vectors` and `counts` name what is saved of each.
    """
    numbers = dict.fromkeys(counts, dict.fromkeys(like, 0))
    check_alike(
        path,
        own,
        {
            **dict.fromkeys(vectors, like),
            "measured": 0,
            "measure_until": 0,
            "skipped": 0,
            **numbers,
            "ratio": {},
            "own": {},
            "idle": {},
        },
    )
    for key, limit in {"measured": done, "measure_until": done + FIRST, "skipped": done}.items():
        check_count(f"{path}[{key!r}]", own[key], limit)
    check_known(f"{path}['own']", own["own"], like)
    check_known(f"{path}['idle']", own["idle"], like)
    check_alike(f"{path}['own']", own["own"], {name: like[name] for name in own["own"]})
    squares = {f"['square'][{name!r}]": each for name, each in own.get("square", {}).items()}
    for key, saved in own["ratio"].items():  # of other blocks or buckets it may have other shapes
        where = f"['ratio'][{key!r}]"
        check_alike(path + where, saved, {"block": 1, "mean": None, "own": None})
        blocks = torch.zeros(saved["mean"].shape if isinstance(saved["mean"], Tensor) else 0)
        one = {"known": torch.zeros(2, dtype=torch.float64), **saved}  # states of earlier versions have none
        check_alike(path + where, one, {"mean": blocks, "own": blocks, "known": torch.zeros(2, dtype=torch.float64)})
        squares |= {f"{where}[{each!r}]": one[each] for each in ("mean", "own", "known")}
    if wrong := [where for where, values in squares.items() if bool((values < 0).any())]:
        raise ValueError(f"{path}{wrong[0]} has negative elements; load an older state")
