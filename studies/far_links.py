"""Write the page about far links: two comparisons over links with a delay, and the delays that each method's step waits for.

    .venv/bin/python -m studies far_links [--run] [--only gpt,lstm,delays] [--out build/far_links]

`--run` first makes the comparisons, in about 10 minutes on two idle cores. The table of delays comes from `python -m studies delays --out
build/far_links/delays`, which you run separately.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsync_lab.demo import Half
from sparsync_lab.report.format import significant
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
    options = parts.options("far_links", __doc__, writes=False)
    options.add_argument("--run", action="store_true", help="make the comparisons first")
    options.add_argument("--only", default="gpt,lstm,delays", help="parts (default: gpt,lstm,delays)")
    options.add_argument("--out", type=Path, default=Path("build/far_links"), help="folder of the results")
    given = options.parse_args(argv)
    for half in HALVES:
        if half.folder in given.only.split(","):
            folder = given.out / half.folder
            if given.run:
                command = [sys.executable, "-m", "sparsync_lab.cli", "compare", *shlex.split(half.arguments)]
                subprocess.run([*command, "--out", str(folder)], check=True)
            parts.put(PAGE, f"far {half.folder}", _compared(half, summarise(read(folder).runs[-1])))
    if "delays" in given.only.split(","):
        parts.put(PAGE, "delays", (given.out / "delays" / "delays.md").read_text().strip())


def _compared(half: Half, found: RunSummary) -> str:
    delay_s, rate = found.run.delay_s, found.run.rate_bits_per_s
    if not delay_s or rate is None:
        raise SystemExit(f"{half.folder}: needs a run over links with a rate and a delay; run it again")
    heads = (
        "method",
        "bits per parameter and step",
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


if __name__ == "__main__":
    main(sys.argv[1:])
