"""Compile every Triton kernel as the library would launch it, for a GPU that need not exist, and print one JSON line per kernel.

A separate program, because Triton's interpreter disables the compiler. Nothing runs, so results are meaningless.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sparsync.kernels import cuda
from sparsync.kernels.cuda import launch, many_tensors, passes, positions, scatter, steps, sums, values, windows

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.kernel_cases import TABLE
from helpers.reference import filled

HOPPER = GPUTarget("cuda", 90, 32)
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
    """Tell whether Triton makes an argument a constant: a 1 that is not declared as plain."""
    return isinstance(given, int) and given == 1 and not plain


def _type(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"*{TYPES[given.dtype]}"
    # Any: what a kernel is called with
    return "fp32" if isinstance(given, float) else "i32" if -(2**31) <= given < 2**31 else "i64"


def main() -> None:
    setattr(JITFunction, "run", compile_instead)  # noqa: B010  # disables launches
    launch.take_tensors_of_any_device(True)  # no GPU is needed
    torch.empty = torch.zeros  # nothing runs, so the host would read uninitialised memory
    for operation in sorted(TABLE.keys() & vars(cuda).keys()):
        for arguments in TABLE[operation]("normal", 5000):
            getattr(cuda, operation)(*filled(operation, arguments))
    names = {name for module in MODULES for name, each in vars(module).items() if isinstance(each, JITFunction)}
    print(json.dumps({"all": sorted(name for name in names if name.endswith("_kernel"))}))


if __name__ == "__main__":
    main()
