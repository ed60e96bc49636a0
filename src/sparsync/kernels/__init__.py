"""The kernels of `operations` for everybody else: every function checks its arguments.

It raises ValueError or TypeError for arguments that are not what its signature says, before it writes anything, on every backend.
"""

from sparsync.kernels import operations
from sparsync.kernels.arguments import checked
from sparsync.kernels.dispatch import backend, backends, set_backend

__all__ = [
    "accumulate",
    "accumulate_select_ge",
    "accumulate_top_k",
    "accumulate_top_k_nonzero",
    "accumulate_top_k_of_rows",
    "all_finite",
    "argtopk",
    "backend",
    "backends",
    "clear_",
    "coalesce",
    "gather",
    "isin",
    "locate",
    "merge",
    "move_put_",
    "put_",
    "scatter_add_",
    "select_ge",
    "set_backend",
    "smallest_magnitude",
    "split",
    "top_k",
    "top_k_nonzero",
    "top_k_of_rows",
]

accumulate = checked(operations.accumulate)
accumulate_select_ge = checked(operations.accumulate_select_ge)
accumulate_top_k = checked(operations.accumulate_top_k)
accumulate_top_k_nonzero = checked(operations.accumulate_top_k_nonzero)
accumulate_top_k_of_rows = checked(operations.accumulate_top_k_of_rows)
all_finite = checked(operations.all_finite)
select_ge = checked(operations.select_ge)
top_k = checked(operations.top_k)
top_k_nonzero = checked(operations.top_k_nonzero)
top_k_of_rows = checked(operations.top_k_of_rows)
locate = checked(operations.locate)
smallest_magnitude = checked(operations.smallest_magnitude)
argtopk = checked(operations.argtopk)
scatter_add_ = checked(operations.scatter_add_)
clear_ = checked(operations.clear_)
put_ = checked(operations.put_)
gather = checked(operations.gather)
move_put_ = checked(operations.move_put_)
merge = checked(operations.merge)
coalesce = checked(operations.coalesce)
split = checked(operations.split)
isin = checked(operations.isin)
