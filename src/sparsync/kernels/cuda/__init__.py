"""The kernels for CUDA, in Triton: the reference's results, bit for bit. `sparsync.kernels` and its `codecs` call what is named here.

What is not here is right in torch's own operations: `move_` is a copy and a fill, which together move no more bytes than one kernel
would; `isin`, `split` and `merge` are searches and a sort of the few elements selected, without atomic additions. Without a GPU
the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors.
"""

from sparsync.kernels.cuda import positions, values
from sparsync.kernels.cuda.collecting import above, accumulate, accumulate_select_, all_finite, select_ge
from sparsync.kernels.cuda.counting import histogram
from sparsync.kernels.cuda.launching import BLOCK
from sparsync.kernels.cuda.ranking import accumulate_top_k, accumulate_top_k_nonzero, argtopk, top_k, top_k_nonzero
from sparsync.kernels.cuda.scattering import clear_, coalesce, gather, put_, scatter_add_

__all__ = [
    "BLOCK",
    "above",
    "accumulate",
    "accumulate_select_",
    "accumulate_top_k",
    "accumulate_top_k_nonzero",
    "all_finite",
    "argtopk",
    "clear_",
    "coalesce",
    "gather",
    "histogram",
    "positions",
    "put_",
    "scatter_add_",
    "select_ge",
    "top_k",
    "top_k_nonzero",
    "values",
]
