"""The kernels for CUDA, in Triton, bit-identical to the reference. `sparsync.kernels.dispatch` looks them up here by name.

Torch does the rest: `move_put_` is a copy and a fill, which together move no more bytes than one kernel would; `divide_rows_` reads and
writes at positions; `isin`, `split` and `merge` search and sort the few selected elements, without atomic additions. The reference handles
ternary values, which no recipe sends.
Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors.
"""

# ruff: noqa: F401  # looked up by name

from sparsync.kernels.cuda.exact_top_k import (
    accumulate_select_ge,
    accumulate_top_k,
    accumulate_top_k_nonzero,
    accumulate_top_k_of_rows,
    select_ge,
    top_k,
    top_k_nonzero,
    top_k_of_each,
)
from sparsync.kernels.cuda.many_tensors import digests, write_own_
from sparsync.kernels.cuda.passes import accumulate, all_finite, finite_each
from sparsync.kernels.cuda.positions import decode_positions, encode_positions, locate
from sparsync.kernels.cuda.scatter import clear_, coalesce, gather, put_, scatter_add_
from sparsync.kernels.cuda.steps import apply_steps_, encode_steps_, make_steps_, move_steps_, write_mean_
from sparsync.kernels.cuda.sums import over_means, sketch, squares_fit
from sparsync.kernels.cuda.values import packets_fit, reduce_shares_, values_decode, values_encode
