"""Published systems that are a scheme and steps around it, by name: the library's, and those around a scheme of `rivals`."""

from sparsync.recipes import PUBLISHED

# name -> (what it stands for, what it is)
SYSTEMS = PUBLISHED | {
    "sparseloco": (
        "local_steps(every=30:keep=0.0)/sparse_loco",
        "SparseLoCo (2508.15706) without its clipping to the median norm",
    ),
}
