"""Published systems that are a scheme and steps around it, by name: the library's, and those around a scheme of `rivals`."""

from sparsync.base import scheme_text

# name -> (what it stands for, what it is)
RECIPES = scheme_text.RECIPES | {
    "sparseloco": (
        "local_steps(every=30:keep=0.0)/sparse_loco",
        "SparseLoCo (2508.15706) without its clipping to the median norm",
    ),
    "muloco": (
        "local_steps(every=30:keep=0.0:outer_rate=0.7:outer_momentum=0.9)/quantized:values=2bit:decay=0.9",
        "MuLoCo (2505.23725), for jobs with Muon: all elements in 2 bits, with DiLoCo's outer optimizer and scales for blocks of 256",
    ),
    "pulseloco": (
        "local_steps(every=30:keep=0.0:outer_rate=0.7:outer_momentum=0.9)/pulse_loco",
        "PULSELoCo (2602.03839): of the changes over 30 steps, what changes a weight in bfloat16",
    ),
}


def recipes() -> dict[str, str]:
    """Return one line about each recipe by its name."""
    return {name: f"{about}: {text}" for name, (text, about) in RECIPES.items()}
