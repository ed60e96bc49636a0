"""The name of the reference kernels, and advice if they ran: their results are exact, but their times are not representative."""

SLOW_KERNELS = "reference"  # as in `sparsync.kernels.backends()`
SLOW_KERNELS_FIX = (
    "Install a C++ compiler such as g++ (on GPUs triton) and install sparsync again, then repeat this; `sparsync doctor` says what "
    "is missing."
)
