"""The kernels for CUDA, in Triton: the reference's results, bit for bit. `sparsync.kernels` and its `codecs` call what is named here.

What is not here is right in torch's own operations: `move_` is a copy and a fill, which together move no more bytes than one kernel
would; `among`, `split` and `sorted_union` are searches and a sort of the few elements selected, without atomic additions. Without a GPU
the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors.
"""

from sparsync.kernels.cuda import positions, values
from sparsync.kernels.cuda.collecting import above, accumulate, accumulate_select_, all_finite, at_least
from sparsync.kernels.cuda.counting import histogram
from sparsync.kernels.cuda.launching import BLOCK
from sparsync.kernels.cuda.ranking import accumulate_top_k, accumulate_top_k_nonzero, largest, top_k, top_k_nonzero
from sparsync.kernels.cuda.scattering import clear_, gather, put_, scatter_add_, summed

__all__ = [
    "BLOCK",
    "above",
    "accumulate",
    "accumulate_select_",
    "accumulate_top_k",
    "accumulate_top_k_nonzero",
    "all_finite",
    "at_least",
    "clear_",
    "gather",
    "histogram",
    "largest",
    "positions",
    "put_",
    "scatter_add_",
    "summed",
    "top_k",
    "top_k_nonzero",
    "values",
]
