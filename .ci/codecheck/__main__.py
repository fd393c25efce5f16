"""``python .ci/codecheck language|structure``: measure the source code of a checkout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

from codecheck.language import language_figures  # noqa: E402
from codecheck.report import figures_to_json, format_figures  # noqa: E402
from codecheck.structure import structure_figures  # noqa: E402

MEASURES = {"language": language_figures, "structure": structure_figures}


def main() -> None:
    """Print the figures that the command line asks for."""
    parser = argparse.ArgumentParser(prog="codecheck", description=__doc__)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--list", action="store_true", help="list the places that count")
    parser.add_argument("--json", action="store_true", help="print JSON, with the places")
    options = parser.parse_args()
    figures = MEASURES[options.measure](options.root)
    print(
        figures_to_json(figures) if options.json else format_figures(figures, details=options.list)
    )


if __name__ == "__main__":
    main()
