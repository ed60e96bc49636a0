"""Rewrite the table "What works where" of docs/what_works.md: `python -m studies integrations`.

Fails, and writes nothing, if a cell neither works nor is refused.
"""

import sys
from collections.abc import Sequence

from studies import parts


def main(argv: Sequence[str]) -> None:
    options = parts.options("integrations", __doc__).parse_args(argv)
    sys.path.insert(0, str(parts.ROOT / "tests"))
    from integrations.page import PART, part
    from integrations.table import FAILS

    text = part()
    if f" {FAILS} (" in text:
        raise SystemExit(f"{text}\nsome cells fail; nothing was written")
    parts.put("docs/what_works.md", PART, text, options.print)
