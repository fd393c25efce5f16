"""All or some (``--match``, ``--elements``) GPU cases without pytest: ``python -m tests.gpu.smoke
[ranks]``.
"""

from __future__ import annotations

import argparse
import re
import time

from tests.gpu.cases import CASES, name_of
from tests.gpu.gpus import need_gpus
from tests.gpu.ranks import run_cases

SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    parser.add_argument(
        "--match", default="", help="only cases whose name has this regular expression in it"
    )
    parser.add_argument("--elements", type=int, help="only cases of at most so many elements")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all of them")
    options = parser.parse_args()
    need_gpus()
    cases = [case for case in CASES if re.search(options.match, name_of(case))]
    if options.elements is not None:
        cases = [case for case in cases if case["count"] <= options.elements]
    begin = time.monotonic()
    answers = run_cases(cases, options.ranks, timeout=options.timeout)
    wrong = [
        (case, rank, text)
        for case, row in zip(cases, answers, strict=True)
        for rank, text in enumerate(row)
        if text
    ]
    for case, rank, text in wrong[:SHOWN]:
        print(f"{name_of(case)} rank {rank}: {text[-900:]}")
    print(
        f"{len(cases)} cases, {options.ranks} ranks, {len(wrong)} wrong, "
        f"{time.monotonic() - begin:.1f} s"
    )


if __name__ == "__main__":
    main()
