"""Dense reduction of every element, in full or in 16 bits: the baselines of all measurements."""

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
    """Write the mean of every element of the gradient.

    In 16 bits every addition rounds; the sum is divided by P in at least float32. float16 overflows above 65504.
    """

    wire: WireType = "gradient"  # the type that is sent and summed; "gradient": the gradient's
    form: Form = "native"  # "native": the backend's all-reduce; "ring": this library's, which SkipReduce shortens

    def __post_init__(self) -> None:
        check_one_of("wire", self.wire, WireType)
        check_one_of("form", self.form, Form)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The name, which depends on the type that is sent."""
        return {"gradient": "dense", "bfloat16": "bf16"}.get(self.wire, f"dense_{self.wire}")

    @classmethod
    def bf16(cls, form: Form = "native") -> Self:
        """Reduce in bfloat16: half the bytes of float32 at the same range, the honest baseline for every compressor."""
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
            # Divides before rounding to the gradient's type, in which the sum might overflow.
            kernels.divide_to_(grad, total, P)
        return self.report(bucket, comm.sent)

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        if self.wire == "gradient":
            from sparsync.schemes.sharded import SkipReduceScatter
            from sparsync.schemes.skip_reduce import SkipReduce

            return SkipReduceScatter(SkipReduce(skip=0), self.name)
        raise ValueError(
            f"FSDP2 itself offers a reduce-scatter with wire={self.wire!r}; "
            f"use fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{self.wire})) and Dense()"
        )
