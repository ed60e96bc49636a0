"""Published systems, by name, that combine a scheme with steps around it: the library's, and those with a scheme of `rivals`."""

from sparsync.recipes import PUBLISHED

# name -> (text, description)
SYSTEMS = PUBLISHED | {
    "sparseloco": (
        "local_steps(every=30:keep=0.0)/sparse_loco",
        "SparseLoCo (2508.15706) without its clipping to the median norm",
    )
}
