"""The colours of a page and of the pictures on it: those of a light page, and of a dark one where the reader's system asks for it."""

import re

# What the pictures are drawn in, and what takes its place on a dark page. Other colours serve for both.
DARK = {
    "#ffffff": "#16181c",
    "#222222": "#e8e8e8",  # type
    "#777777": "#9aa0a6",  # faint type, axes
    "#e8e8e8": "#2c3037",  # grid
    "#3d3d3d": "#d6d6d6",  # dense
    "#b5b5b5": "#6b7078",  # computing
    "#e6e6e6": "#3a3f47",  # other
    "#8cc8ee": "#2d5a77",  # communicating
    "#0072b2": "#5c86ff",
    "#d55e00": "#ef7f3b",
    "#009e73": "#2bbd93",
}


def variables(dark: bool) -> str:
    """Return the declarations of the colours, as CSS."""
    return " ".join(f"{_name(light)}: {DARK[light] if dark else light};" for light in DARK)


def coloured(colour: str) -> str:
    """Return the colour as CSS that follows the page."""
    return f"var({_name(colour.lower())})" if colour.lower() in DARK else colour


def themed(svg: str, name: str) -> str:
    """Return an SVG image of matplotlib's as a part of a page: in the page's colours, with ids that begin with `name`."""
    found = svg[svg.index("<svg") :].strip()
    found = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", found, flags=re.DOTALL)
    found = re.sub(r' xmlns(:xlink)?="[^"]*"', "", found).replace("xlink:href", "href")
    found = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", found)
    found = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', found)
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: coloured(match[0]), found)


def _name(colour: str) -> str:
    return f"--c{colour.removeprefix('#')}"
