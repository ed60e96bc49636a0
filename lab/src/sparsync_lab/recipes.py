"""Published systems that are a scheme and steps around it, by name: the library's, and those around a scheme of `rivals`."""

from sparsync.base import scheme_text

# name -> (what it stands for, what it is)
RECIPES = scheme_text.RECIPES | {
    "sparseloco": (
        "local_steps(every=30:keep=0.0)/sparse_loco",
        "SparseLoCo (2508.15706) without its clipping to the median norm",
    ),
}


def recipes() -> dict[str, str]:
    """Return one line about each recipe by its name."""
    return {name: f"{about}: {text}" for name, (text, about) in RECIPES.items()}
