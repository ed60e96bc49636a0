"""Write the two comparisons of docs/far_links.md, over links with a delay.

    .venv/bin/python -m studies far_links [--out build/far_links] [--print]

Comparisons that are in the folder are not repeated; both take about 10 minutes on two idle cores. `python -m studies delays` writes the
other table of the page.
"""

from collections.abc import Sequence
from pathlib import Path

from sparsync_lab import cli
from sparsync_lab.demo import Half, commands
from sparsync_lab.report.format import significant
from sparsync_lab.report.page import PICTURE
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import RunSummary, SchemeFigures, summarise
from studies import parts

PAGE = "docs/far_links.md"
DDP = "sparsync_lab.rivals.torch_ddp:TorchDDP"
LINK = "--ranks 4 --link 100mbit --delay 25ms --seed 0"
HALVES = (
    Half(
        "gpt",
        "A character-level transformer, trained by AdamW",
        f"--workload gpt {LINK} --target 15 --steps 120 --eval-every 10 --schemes "
        f"{DDP},dense,bf16,powersgd:rank=8,powersgd:rank=16,steps/two_shot:density=0.03:values=sign:density_down=0.12",
    ),
    Half(
        "lstm",
        "A word-level language model (LSTM), trained by SGD",
        f"--workload shakespeare-small {LINK} --target 80 --steps 120 --eval-every 20 --schemes "
        f"{DDP},dense,bf16,powersgd:rank=2,topk:density=0.01:values=int4,exact_oktopk:density=0.01:values=int4,"
        "two_shot:density=0.022:values=int4",
    ),
)
LEAST_DELAYS = 2  # per step: to the owners of chunks, and back


def main(argv: Sequence[str]) -> None:
    options = parts.options("far_links", __doc__)
    options.add_argument("--out", type=Path, default=Path("build/far_links"), help="folder of the results")
    given = options.parse_args(argv)
    for half, command in zip(HALVES, commands(given.out, halves=HALVES), strict=True):
        if not (given.out / half.folder / PICTURE).exists():
            cli.main(command)
        found = summarise(read(given.out / half.folder).runs[-1])
        parts.put(PAGE, f"far {half.folder}", _compared(half, found), given.print)


def _compared(half: Half, found: RunSummary) -> str:
    delay_s, rate = found.run.delay_s, found.run.rate_bits_per_s
    assert rate is not None
    heads = (
        "method",
        "bits per parameter per step",
        f"seconds to {found.run.target:g}",
        "step, ms",
        "limit, ms",
        "step / limit",
    )
    rows = [_row(each, delay_s, rate) for each in found.schemes]
    told = "\n\n".join(f"{each.text.capitalize()} {each.why}" for each in found.banners if each.kind == "disturbed")
    return f"{half.title}:\n\n{parts.table(heads, rows)}\n\n`sparsync compare {half.arguments}`. {told}"


def _row(scheme: SchemeFigures, delay_s: float, rate: float) -> list[str]:
    bits, step_s, compute_s, nbytes = (
        scheme.over_seeds(name) for name in ("bits", "step_s", "own_compute_s", "sent_bytes")
    )
    assert bits is not None and step_s is not None and compute_s is not None and nbytes is not None
    limit_s = compute_s.median + 8 * nbytes.median / rate + LEAST_DELAYS * delay_s
    reached = "not reached" if scheme.target_s is None else significant(scheme.target_s.median)
    name = scheme.label.removeprefix("sparsync_lab.rivals.torch_ddp:")
    shown = (bits.median, 1e3 * step_s.median, 1e3 * limit_s, step_s.median / limit_s)
    return [f"`{name}`", significant(shown[0]), reached, *map(significant, shown[1:])]
