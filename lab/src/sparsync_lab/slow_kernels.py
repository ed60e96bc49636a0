"""The name of the reference kernels, and what to do where they ran: their results are right to the bit, their times are not sparsync's."""

SLOW_KERNELS = "reference"  # as in `sparsync.kernels.backends()`
SLOW_KERNELS_FIX = (
    "Install a C++ compiler such as g++ (on GPUs triton) and install sparsync again, then repeat this; `sparsync doctor` says what "
    "is missing."
)
