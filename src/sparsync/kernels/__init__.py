"""The hot loops over whole vectors, one signature each; `reference` and `sparse_reference` are their specification in plain torch.

Each function runs on the backend that `backend()` names, and on the reference where that one lacks the tensor's device or type.
"""

from sparsync.kernels.backends import backend, backends, use

__all__ = ["backend", "backends", "use"]
