"""The step of a DDP model over `sparsync launch --link 100mbit`, against the same links made by ip and tc in a shell script.

    .venv/bin/python studies/launch_by_hand.py [--pairs 7 --ranks 4 --steps 5]

Needs root. 25 MB of gradients and next to no computing, so that the link decides. The two take turns, and so does which one begins; the
table has medians over pairs of the median step of each run, and the median of the ratios, with their range.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIDE = 2500  # of the one matrix: 6.25 million parameters, 25 MB
WARM_UP = 1  # steps that are not counted: connections are made, buckets are rebuilt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each run")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)  # this program as one rank
    options = parser.parse_args()
    if options.train:
        train(options.steps)
    else:
        compare(options.pairs, options.ranks, options.steps)


def compare(pairs: int, ranks: int, steps: int) -> None:
    script = [sys.executable, __file__, "--train", "--steps", str(steps)]
    ways = {
        "sparsync launch": [sys.executable, "-m", "sparsync_lab.cli", "launch", "--ranks", str(ranks), "--", *script],
        "ip and tc by hand": ["sh", str(Path(__file__).with_name("network_by_hand.sh")), str(ranks), *script],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(pairs):
        for way in list(ways)[:: 1 if pair % 2 == 0 else -1]:
            seconds[way].append(median_step(ways[way]))
        print(
            f"pair {pair}: {', '.join(f'{way} {times[-1]:.3f} s' for way, times in seconds.items())}", file=sys.stderr
        )
    ratios = sorted(one / other for one, other in zip(*seconds.values(), strict=True))
    print("| links by | step, s | range |", "| --- | --- | --- |", sep="\n")
    for way, times in seconds.items():
        print(f"| {way} | {statistics.median(times):.3f} | {min(times):.3f} to {max(times):.3f} |")
    print(f"| ratio of a pair | {statistics.median(ratios):.4f} | {ratios[0]:.4f} to {ratios[-1]:.4f} |")


def median_step(command: list[str]) -> float:
    """Run the ranks, and return the median over steps of the mean over ranks."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[:6]} ended with exit status {done.returncode}:\n{done.stderr}")
    lines = [json.loads(line[line.index("{") :])["step_s"] for line in done.stdout.splitlines() if "step_s" in line]
    return statistics.median(statistics.fmean(step) for step in zip(*lines, strict=True))


def train(steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(SIDE, SIDE, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, times = torch.randn(1, SIDE), []
    for _ in range(WARM_UP + steps):
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    sys.stdout.write(
        json.dumps({"step_s": times[WARM_UP:]}) + "\n"
    )  # in one piece, as ranks by hand share their output
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
