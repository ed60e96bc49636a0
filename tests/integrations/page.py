"""The page docs/integrations.md: a table for each integration. A new integration is one more line in INTEGRATIONS."""

from collections.abc import Mapping, Sequence

import torch

from integrations import attach, fsdp, manual
from integrations.table import SCHEMES, SITUATIONS, Case, cells, markdown

INTEGRATIONS: dict[str, Mapping[str, Case]] = {
    "sparsync.attach (DistributedDataParallel)": attach.CASES,
    "sparsync.GradientReducer (any training loop)": manual.CASES,
    "sparsync.attach (FSDP2, shard axis)": fsdp.SHARDS,
    "sparsync.attach (FSDP2, replicate axis)": fsdp.REPLICAS,
    "sparsync.attach (FSDP2, mesh of two axes: HSDP)": fsdp.BOTH,
}


def page(situations: Sequence[str] = SITUATIONS) -> str:
    """Run these situations and return the page; all of them take some minutes."""
    return "\n".join(
        [
            _HEAD,
            *[markdown(integration, cases, cells(cases, situations)) for integration, cases in INTEGRATIONS.items()],
        ]
    )


_COUNTED = f"{len(SITUATIONS)} situations x {len(INTEGRATIONS)} integrations x {len(SCHEMES)} schemes"
_TORCH = torch.__version__.split("+")[0]
_HEAD = f"""# What works behind which integration

Made by `python runs/integrations.py`, which runs every cell: real processes over gloo on CPU, torch {_TORCH}, with 2 ranks, or
3 where a group, a failure or a change of ranks needs them. {_COUNTED}. Nothing here is typed by hand.

"works": what the second column says was checked; "the same bits" is that each gradient and each residual is, to the last bit and on all
ranks, what the scheme makes of the same buckets in a `LocalWorld`, without processes or an integration. FSDP2 has 2 shards on the shard
axis, and 2 replicas of 1 shard on the replicate axis and with a mesh of two axes (tests/test_fsdp.py: 2 x 2 ranks). "refused": the
integration raises, on all ranks, before anything is sent; the reason is below the table. "does not arise": so is the reason why not.
"""
