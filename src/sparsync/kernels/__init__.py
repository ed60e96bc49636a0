"""The kernels: operations on vectors, their specifications and backends."""

from sparsync.kernels.dispatch import backend as backend
from sparsync.kernels.dispatch import backends as backends
from sparsync.kernels.dispatch import set_backend as set_backend
from sparsync.kernels.operations import accumulate as accumulate
from sparsync.kernels.operations import accumulate_select_ge as accumulate_select_ge
from sparsync.kernels.operations import accumulate_top_k as accumulate_top_k
from sparsync.kernels.operations import accumulate_top_k_nonzero as accumulate_top_k_nonzero
from sparsync.kernels.operations import accumulate_top_k_of_rows as accumulate_top_k_of_rows
from sparsync.kernels.operations import all_finite as all_finite
from sparsync.kernels.operations import clear_ as clear_
from sparsync.kernels.operations import coalesce as coalesce
from sparsync.kernels.operations import gather as gather
from sparsync.kernels.operations import isin as isin
from sparsync.kernels.operations import locate as locate
from sparsync.kernels.operations import merge as merge
from sparsync.kernels.operations import move_put_ as move_put_
from sparsync.kernels.operations import put_ as put_
from sparsync.kernels.operations import scatter_add_ as scatter_add_
from sparsync.kernels.operations import select_ge as select_ge
from sparsync.kernels.operations import smallest_magnitude as smallest_magnitude
from sparsync.kernels.operations import split as split
from sparsync.kernels.operations import top_k as top_k
from sparsync.kernels.operations import top_k_nonzero as top_k_nonzero
from sparsync.kernels.operations import top_k_of_rows as top_k_of_rows
