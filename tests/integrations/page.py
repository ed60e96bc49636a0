"""The table "What works where" of docs/attach.md. A new integration is one more line in INTEGRATIONS."""

from collections.abc import Mapping, Sequence

import torch

from integrations import attach, fsdp, manual, steps
from integrations.table import SCHEMES, SITUATIONS, Case, cells, markdown

PART = "what works"
INTEGRATIONS: dict[str, Mapping[str, Case]] = {
    "`attach`, DDP": attach.CASES,
    "`GradientReducer`": manual.CASES,
    "`AdamWSteps`": steps.ADAMW,
    "`LocalSteps`": steps.LOCAL,
    "`attach`, FSDP2 shard axis": fsdp.SHARDS,
    "`attach`, FSDP2 replicate axis": fsdp.REPLICAS,
    "`attach`, FSDP2 with HSDP": fsdp.BOTH,
}


def part(situations: Sequence[str] = SITUATIONS) -> str:
    """Run these situations and return this part of the page; all of them take some minutes."""
    verdicts = {integration: cells(cases, situations) for integration, cases in INTEGRATIONS.items()}
    return _HEAD + markdown(INTEGRATIONS, verdicts)


_TORCH = torch.__version__.split("+")[0]
_HEAD = f"""`python -m studies integrations` runs every cell with real processes over gloo on CPU and torch {_TORCH}:
{len(SITUATIONS)} situations, {len(INTEGRATIONS)} integrations and {len(SCHEMES)} schemes ({", ".join(SCHEMES)}).

- *works*: every gradient and every residual equals, bit for bit and on all ranks, what the scheme makes of the same buckets in a
  `LocalWorld`, without processes or an integration. For `AdamWSteps` and `LocalSteps` this holds for own weights, common weights and
  residuals after each step. A note says what was checked beyond that. Unless a note names schemes, a cell holds for all of them.
- *refused*: the integration raises on all ranks before anything is sent. The note is the reason.
- *-*: the situation does not arise. The note says why.

Cells run on 2 ranks, or on 3 where a group, a failure or a change of ranks needs them. FSDP2 has 2 shards on the shard axis, and
2 replicas of 1 shard on the replicate axis and with HSDP (tests/test_fsdp.py has 2 x 2 ranks).

"""
