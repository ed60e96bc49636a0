"""Writes docs/integrations.md anew: `python runs/integrations.py`. Fails, and writes nothing, where a cell neither works nor is refused."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    from integrations.page import page
    from integrations.table import FAILS

    text = page()
    if f" {FAILS} (" in text:
        raise SystemExit(f"{text}\nsome cells fail; nothing was written")
    (ROOT / "docs" / "integrations.md").write_text(text)


if __name__ == "__main__":
    main()
