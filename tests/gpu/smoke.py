"""All cases of the GPU tests without pytest: ``python -m tests.gpu.smoke [ranks]``."""

from __future__ import annotations

import sys
import time

from tests.gpu.cases import CASES, name_of
from tests.gpu.ranks import run_cases


def main() -> None:
    nranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    begin = time.monotonic()
    answers = run_cases(CASES, nranks)
    bad = 0
    for case, row in zip(CASES, answers, strict=True):
        for rank, text in enumerate(row):
            if text:
                bad += 1
                if bad <= 12:
                    print(f"{name_of(case)} rank {rank}: {text[-900:]}")
    print(f"{len(CASES)} cases, {nranks} ranks, {bad} wrong, {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
