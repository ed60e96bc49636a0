"""Measure the codecs of positions and values on random ones: bits beside the entropy, speed beside a memory copy of the same run.

    python -m studies bench wire [--n 50000000 --density 0.01 0.001 --rounds 15 --backend cpp] [--json -]

One JSON line per case. Every position is in the selection with the same probability, independently; `entropy_bits` is H(d)/d for the
share d that was drawn. Rates are of raw data, int32 positions or float32 values, on one thread: p20, p50 and p80 over rounds in which the
cases are interleaved. Checks of the input, and the allocation of the output, are in them; `memory_copy` writes into allocated memory.
"fixed_length" is the case that schemes run. A round trip that does not bring back what was encoded ends the run.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from sparsync.kernels import backend, set_backend
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.dispatch import run
from sparsync.wire import ValueCodec, Values, decode_fixed_length, encode_fixed_length, fixed_length_codec
from sparsync_lab.environment import machine, versions
from sparsync_lab.progress import progress
from studies.bench.interleave import interleaved
from studies.bench.output import destination, percentiles, write

LONGEST_BITMAP = 100  # bits an index: beyond, a bitmap is no choice and only takes time


@dataclass
class CodecCase:
    """A codec on one input; `accepts` returns whether what was decoded is right."""

    name: str
    raw: Tensor
    encode: Callable[[], Tensor]
    decode: Callable[[Tensor], Tensor]
    accepts: Callable[[Tensor], bool]
    facts: dict[str, Any]  # Any: JSON
    packet: Tensor = field(init=False)

    def measure(self) -> tuple[float, float]:
        """Encode and decode once, and return the seconds of each. Raises RuntimeError when the result is wrong."""
        began = time.perf_counter()
        self.packet = self.encode()
        between = time.perf_counter()
        decoded = self.decode(self.packet)
        ended = time.perf_counter()
        if not self.accepts(decoded):
            raise RuntimeError(f"{self.name} did not bring back what was encoded")
        return between - began, ended - between

    def row(self, seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
        bits = round(8 * self.packet.numel() / max(1, self.raw.numel()), 3)
        encode_s, decode_s = zip(*seconds, strict=True)
        rates = {"encode": self._rates(encode_s), "decode": self._rates(decode_s)}
        return {"case": self.name, "bits": bits, **self.facts, "raw_gbytes_per_s": rates}

    def _rates(self, seconds: Sequence[float]) -> dict[str, float]:
        p20, p50, p80 = percentiles(seconds).values()
        return {name: round(self.raw.nbytes / s / 1e9, 3) for name, s in (("p20", p80), ("p50", p50), ("p80", p20))}


def main(arguments: Sequence[str]) -> None:
    """Measure and print JSON lines."""
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.backend:
        set_backend(options.backend)
    rows = [row for density in options.density for row in _measured(_index_cases(options.n, density), options)]
    rows += _measured(_value_cases(max(1, int(options.n * options.density[0]))), options)
    write(rows, options.json)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m studies bench wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=50_000_000, help="length of the span")
    parser.add_argument(
        "--density", type=float, nargs="+", default=[0.01, 0.001], help="shares of it that are selected"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which every case is measured once, 2 or more")
    parser.add_argument("--backend", help="of the kernels, such as reference; the fastest unless told")
    parser.add_argument("--json", type=destination, default="-", help="file for the JSON lines, - for standard output")
    options = parser.parse_args(arguments)
    if not 1 <= options.n <= 2**31 - 1 or options.rounds < 2 or not all(0 < d < 1 for d in options.density):
        parser.error("--n must be in [1, 2147483647], --rounds 2 or more, --density in (0, 1)")
    return options


def spread(n: int, density: float) -> Tensor:
    """Return each position of [0, n) with probability `density`, ascending, int32; drawn by geometric gaps."""
    count = int(n * density + 6 * math.sqrt(n * density) + 10)
    gaps = torch.empty(count, dtype=torch.float64).geometric_(density, generator=torch.Generator().manual_seed(0))
    index = gaps.long().cumsum(0) - 1
    return index[index < n].to(torch.int32)


def _index_cases(n: int, density: float) -> list[CodecCase]:
    index = spread(n, density)
    k = index.numel()
    share = k / n
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share if 0 < k < n else 0.0
    facts = {"kind": "positions", "n": n, "k": k, "density": density, "entropy_bits": round(entropy, 3)}

    def accepts(decoded: Tensor) -> bool:
        return torch.equal(decoded, index)

    def case(codec: PositionCodec) -> CodecCase:
        return CodecCase(
            codec,
            index,
            lambda: run("encode_positions", codec, index, n),
            lambda packet: run("decode_positions", codec, packet, k, n),
            accepts,
            facts,
        )

    best = CodecCase(
        f"fixed_length ({fixed_length_codec(k, n)})",
        index,
        lambda: encode_fixed_length(index, n),
        lambda packet: decode_fixed_length(packet, k, n),
        accepts,
        facts,
    )
    each = [case(codec) for codec in get_args(PositionCodec) if codec != "bitmap" or n <= LONGEST_BITMAP * k]
    return [best, *each, _copy(index, facts)]


def _value_cases(k: int) -> list[CodecCase]:
    value = torch.randn(k, generator=torch.Generator().manual_seed(1))
    facts = {"kind": "values", "k": k}

    def case(format: Values) -> CodecCase:
        codec = ValueCodec(format)
        decoded_once = codec.decode(codec.encode(value), k, value.dtype)
        lost = float((value - decoded_once).double().norm() / value.double().norm())

        def decode(packet: Tensor) -> Tensor:
            return codec.decode(packet, k, value.dtype)

        def accepts(decoded: Tensor) -> bool:
            return torch.equal(decoded, decoded_once) and (codec.exact or lost < 1)

        return CodecCase(
            format, value, lambda: codec.encode(value), decode, accepts, {**facts, "relative_error": round(lost, 6)}
        )

    return [*(case(format) for format in get_args(Values)), _copy(value, facts)]


def _copy(raw: Tensor, facts: dict[str, Any]) -> CodecCase:
    """Return the ceiling: a copy there, and a copy back."""
    there, back = torch.empty_like(raw), torch.empty_like(raw)
    return CodecCase(
        "memory_copy",
        raw,
        lambda: there.copy_(raw).view(torch.uint8),
        lambda _: back.copy_(there),
        lambda decoded: torch.equal(decoded, raw),
        facts,
    )


def _measured(cases: Sequence[CodecCase], options: argparse.Namespace) -> list[dict[str, Any]]:
    # The first round touches the memory and does not count.
    facts = cases[0].facts
    with progress(f"{facts['kind']}, k {facts['k']}") as shown:
        found = interleaved(cases, lambda case, _: case.measure(), options.rounds, 1, shown.measured)
    about = {"bench": "wire", "backend": backend(), "rounds": options.rounds, **versions(), "machine": machine()}
    return [case.row(each) | about for case, each in zip(cases, found, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
