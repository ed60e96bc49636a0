"""Published systems that are a scheme and steps around it, by name. Importing this loads no torch: listing the names is instant."""

# name -> (what it stands for, what it is)
RECIPES = {
    "diloco": (
        "local_steps(every=50:keep=0.0:outer_rate=0.7:outer_momentum=0.9)/dense",
        "DiLoCo (arXiv 2311.08105), every 50 steps, the most often that its authors tried",
    ),
    "streaming_diloco": (
        "local_steps(every=50:keep=0.0:fragments=4:delay=5:mixing=0.5:outer_rate=0.7:outer_momentum=0.9)/int4",
        "Streaming DiLoCo (2501.18512): fragments in 4 bits that arrive while training goes on",
    ),
    "sparseloco": (
        "local_steps(every=30:keep=0.0)/sparse_loco",
        "SparseLoCo (2508.15706) without its clipping to the median norm",
    ),
}


def recipes() -> dict[str, str]:
    """Return one line about each recipe by its name."""
    return {name: f"{about}: {text}" for name, (text, about) in RECIPES.items()}
