"""Rewrite parts of a hand-written page, each between its two markers."""

import re
from pathlib import Path


def replaced(page: Path, part: str, content: str) -> str:
    """Return the text of the page with `content` between the markers of `part`. Raises ValueError if they are missing."""
    begin, end = f"<!-- begin {part} -->", f"<!-- end {part} -->"
    text = page.read_text("utf-8") if page.is_file() else ""
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"--page: {page} has no part {part!r}; put the lines {begin} and {end} where it is to stand")
    return f"{text[: found.start()]}{begin}\n\n{content}\n\n{end}{text[found.end() :]}"
