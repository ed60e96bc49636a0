"""Dense reduction: every element of every rank, in full or in 16 bits. The baselines everything else is measured against."""

from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import Self

from sparsync.base.scheme import ReduceScatterScheme, Scheme
from sparsync.base.state import State
from sparsync.collectives.skipping import all_reduce_
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report, check_one_of, exact_divisor
from sparsync.kernels import operations as kernels

WireType = Literal["gradient", "float32", "bfloat16", "float16"]
Form = Literal["native", "ring"]


@dataclass(frozen=True)
class Dense(Scheme):
    """Write the mean gradient, every element of it.

    In 16 bits every addition on the way rounds; the sum is divided by P in at least float32. float16 overflows above 65504.
    """

    wire: WireType = "gradient"  # the type that is sent and summed; "gradient": the gradient's own
    form: Form = "native"  # "native": the backend's own all-reduce; "ring": ours, which SkipReduce shortens

    def __post_init__(self) -> None:
        check_one_of("wire", self.wire, WireType)
        check_one_of("form", self.form, Form)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The name of each type that is sent."""
        return {"gradient": "dense", "bfloat16": "bf16"}.get(self.wire, f"dense_{self.wire}")

    @classmethod
    def bf16(cls, form: Form = "native") -> Self:
        """Return the reduction in bfloat16: half the bytes of float32 at its range, the honest baseline of every compressor."""
        return cls(wire="bfloat16", form=form)

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        grad, P = bucket.grad, comm.size
        if P == 1:
            return self.report(bucket)
        dtype = grad.dtype if self.wire == "gradient" else getattr(torch, self.wire)
        comm = MeteredComm(comm)
        total = grad.to(dtype)
        if self.form == "ring":
            all_reduce_(total, comm)
        else:
            total = comm.all_reduce(total)
        if dtype == grad.dtype:
            torch.div(total, exact_divisor(total, P), out=grad)
        else:
            # Divided before it is rounded to the gradient's type, in which the sum might overflow.
            kernels.divide_to_(grad, total, P)
        return self.report(bucket, comm.sent)

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        if self.wire == "gradient":
            from sparsync.schemes.sharded import SkipReduceScatter
            from sparsync.schemes.skip_reduce import SkipReduce

            return SkipReduceScatter(SkipReduce(skip=0), self.name)
        raise ValueError(
            f"a reduce-scatter of wire={self.wire!r} is FSDP2's own matter; "
            f"use fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{self.wire})) and Dense()"
        )
