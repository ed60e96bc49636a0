"""The table "What works where" of docs/what_works.md. A new integration is one more line in INTEGRATIONS."""

from collections.abc import Mapping, Sequence

import torch

from integrations import attach, fsdp, manual, steps
from integrations.table import SCHEMES, Case, cells, markdown

PART = "what works"
INTEGRATIONS: dict[str, Mapping[str, Case]] = {
    "`attach`, DDP": attach.CASES,
    "`GradientReducer`": manual.CASES,
    "`Steps`, bare module": steps.BARE,
    "`Steps`, DDP": steps.DDP,
    "`Steps`, FSDP2 replicas": steps.REPLICAS,
    "`LocalSteps`": steps.LOCAL,
    "`attach`, FSDP2 shard axis": fsdp.SHARDS,
    "`attach`, FSDP2 replicate axis": fsdp.REPLICAS,
    "`attach`, FSDP2 with HSDP": fsdp.BOTH,
}
SITUATIONS = tuple(fsdp.SHARDS)  # every integration has a case for each


def part(situations: Sequence[str] = SITUATIONS) -> str:
    """Run these situations and format this part of the page; all of them take some minutes."""
    verdicts = {integration: cells(cases, situations) for integration, cases in INTEGRATIONS.items()}
    return _HEAD + markdown(INTEGRATIONS, verdicts)


_TORCH = torch.__version__.split("+")[0]
_HEAD = f"""`python -m studies integrations` runs every cell with real processes over gloo on CPU and torch {_TORCH}:
{len(SITUATIONS)} situations, {len(INTEGRATIONS)} integrations and {len(SCHEMES)} schemes ({", ".join(SCHEMES)}).

- *works*: gradients and residuals (for `Steps` and `LocalSteps` also own and common weights) are bit-identical on all ranks to those of
  the same scheme in a `LocalWorld`. A note says what else was checked. Unless a note names schemes, it holds for all of them.
- *refused*: the integration raises on all ranks before anything is sent, for the reason in the note. *-*: the situation does not arise.

"""
