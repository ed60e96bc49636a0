"""Compiles every Triton kernel for a GPU that need not be there, as the library would launch it, and prints one JSON line for each.

A program of its own, because where Triton's interpreter is on there is no compiler. Nothing is run: what functions return is worthless.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sparsync.core import Span, Sparse
from sparsync.kernels import cuda
from sparsync.kernels.codec_reference import PositionCodec, size_of
from sparsync.kernels.cuda import launch, many_tensors, passes, positions, scatter, steps, sums, values, windows
from sparsync.kernels.value_reference import values_nbytes
from sparsync.selection.exclusive import BlockCyclic

HOPPER = GPUTarget("cuda", 90, 32)
WIDTHS = (8, 4, 3, 1)
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
TYPES |= {torch.float16: "fp16", torch.bool: "i1", torch.float64: "fp64"}
MODULES = (many_tensors, passes, positions, scatter, steps, sums, values, windows)
seen: set[str] = set()


def compile_instead(
    kernel: JITFunction, *args: Any, grid: object, warmup: bool, **named: Any
) -> None:  # Any: arguments
    """Compile a kernel as its launch would, and print a line about it."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | named
    options = {"num_warps": given.pop("num_warps", 4), "enable_fp_fusion": given.pop("enable_fp_fusion", True)}
    constants = {p.name for p in kernel.params if p.is_constexpr or _is_one(given[p.name], p.do_not_specialize)}
    signature = {name: "constexpr" if name in constants else _type(given[name]) for name in kernel.arg_names}
    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = {place[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {place[name]: given[name] for name in constants}, aligned)
    form = f"{kernel.__name__} {signature} { ({name: given[name] for name in constants}) }"
    if form in seen:
        return
    seen.add(form)
    made = triton.compile(source, target=HOPPER, options=options)
    assert isinstance(made, triton.compiler.CompiledKernel)
    ptx = made.asm["ptx"]
    row = {
        "kernel": kernel.__name__,
        "types": sorted(set(signature.values()) - {"constexpr"}),
        "shared_nbytes": made.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global[.\w]*v[24]", ptx)),
        "wide_stores": len(re.findall(r"st\.global[.\w]*v[24]", ptx)),
        "inexact": re.findall(r"\b(?:\w+\.)+ftz[.\w]*|\bdiv\.(?:full|approx)[.\w]*|\bfma[.\w]*f32", ptx),
    }
    print(json.dumps(row), flush=True)


def _is_one(given: object, plain: bool) -> bool:
    """Return whether Triton makes a constant of an argument: a 1 that is not declared to be plain."""
    return isinstance(given, int) and given == 1 and not plain


def _type(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"*{TYPES[given.dtype]}"
    # Any: what a kernel is called with
    return "fp32" if isinstance(given, float) else "i32" if -(2**31) <= given < 2**31 else "i64"


def every_call(n: int) -> list[Callable[[], object]]:
    """Return calls that launch all kernels in all their forms."""
    x, out, index = torch.randn(n), torch.empty(n), torch.arange(40, dtype=torch.int32)
    part, packet = Sparse(index, x[:40].clone(), n), torch.zeros(2 * n, dtype=torch.uint8)
    bare = [x, x[:9].bfloat16(), x[:9].half()], [0, 9, 18], [1.0] * 3
    calls: list[Callable[[], object]] = []
    for grad in (x, x.bfloat16()):
        calls += [
            lambda grad=grad: cuda.accumulate(x, grad, out),
            lambda grad=grad: cuda.all_finite(grad),
            lambda grad=grad: cuda.accumulate_top_k(x, grad, 5, out),
            lambda grad=grad: cuda.accumulate_select_ge(x, grad, 1.0, out, Span(1, 9)),
            lambda grad=grad: cuda.put_(grad, index, part.value),
            lambda grad=grad: cuda.clear_(grad, index.long()),
            lambda grad=grad: cuda.gather(grad, index),
            lambda grad=grad: cuda.scatter_add_(grad, part),
        ]
    return [
        *calls,
        lambda: cuda.select_ge(x, 1.0),
        lambda: cuda.top_k(x, 5),
        lambda: cuda.top_k_nonzero(x, 5, Span(1, 9)),
        lambda: cuda.coalesce([part, part]),
        *(lambda codec=codec: cuda.encode_positions(codec, index, n) for codec in get_args(PositionCodec)),
        *(
            lambda codec=codec: cuda.decode_positions(codec, packet[: size_of(codec, 40, n)], 40, n)
            for codec in get_args(PositionCodec)
        ),
        lambda: cuda.locate(BlockCyclic(n, 4, 128).rows(1, x.device), index),
        *(lambda dtype=dtype: cuda.digests([x.to(dtype)[1:], x.to(dtype)]) for dtype in (torch.float32, torch.uint8)),
        lambda: cuda.digests([x[:5].bfloat16()]),
        lambda: cuda.top_k_of_rows(x, BlockCyclic(n, 4, 128).rows(1, x.device), 5),
        *steps_of(x, x, packet, WIDTHS, torch.zeros(1)),
        *steps_of(x, x.bfloat16(), packet, (3,), None),
        *(lambda bits=bits: cuda.values_encode(x, bits) for bits in WIDTHS),
        *(lambda bits=bits: cuda.values_decode(packet[: values_nbytes(n, bits)], n, bits) for bits in WIDTHS),
        *(
            lambda bits=bits: cuda.encode_steps_(x, *bare, None, None, 1, [], [], 0, 4, bits, None, x)
            for bits in WIDTHS
        ),
        *(call for bits in WIDTHS for call in mean_of(x, packet, bits)),
        *(call for grad in (x.half(), x.bfloat16()) for call in mean_of(grad, packet, 3)),
        *(
            lambda bits=bits, P=P: cuda.reduce_shares_(x, [packet[: values_nbytes(n, bits)]], bits, P, bits)
            for bits, P in zip(WIDTHS, (4, 4, 3, 4), strict=True)
        ),
        lambda: cuda.reduce_shares_(x, [packet[: values_nbytes(n, 3)]], 3, 4, 3, torch.zeros(1)),
    ]


def steps_of(
    x: Tensor, each: Tensor, packet: Tensor, widths: Sequence[int], skip: Tensor | None
) -> list[Callable[[], object]]:
    """Return calls of the passes of steps with gradients and weights of a type."""
    n, spans = x.numel(), [Span(0, x.numel())]
    about = ([each], [0], [1.0], x.clone(), x[:5], 1024, spans, [(1e-3, 0.99, 1e-8, 0.5)])
    place, move = ([each], [0], x.clone()), (spans, [(0.9, 0.999, 1e-3)])
    return [
        lambda: cuda.squares_fit([each], [1.0], 3e38),
        lambda: cuda.make_steps_(x, *about),
        *(lambda bits=bits: cuda.encode_steps_(x, *about, 0, 2, bits, skip) for bits in widths),
        lambda: cuda.move_steps_(*place, x, *move),
        *(
            lambda bits=bits: cuda.apply_steps_(*place, [packet[: values_nbytes(n, bits)]], bits, *move, skip)
            for bits in widths
        ),
        *(lambda block=block: cuda.sketch([each], [0], [1.0], x, block, 7) for block in (1, 64)),
    ]


def mean_of(grad: Tensor, packet: Tensor, bits: int) -> list[Callable[[], object]]:
    """Return calls that write a mean to a gradient of a type."""
    n, kept = grad.numel(), torch.empty(grad.shape)
    packets = [packet[: values_nbytes(n, bits)]]
    return [
        lambda: cuda.packets_fit(packets, [n], bits, 4, grad.dtype),
        lambda: cuda.write_mean_(grad, kept, kept.clone(), packets, bits, 0, torch.zeros(1)),
    ]


def main() -> None:
    setattr(JITFunction, "run", compile_instead)  # noqa: B010  # launches no more
    launch.take_tensors_of_any_device(True)  # there need be no GPU
    for call in every_call(5000):
        call()
    names = {name for module in MODULES for name, each in vars(module).items() if isinstance(each, JITFunction)}
    print(json.dumps({"all": sorted(name for name in names if name.endswith("_kernel"))}))


if __name__ == "__main__":
    main()
