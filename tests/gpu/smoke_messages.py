"""Message cases without pytest, and their speed: ``python -m tests.gpu.smoke_messages [ranks] [case
...]``.
"""

from __future__ import annotations

import sys

from tests.gpu.gpus import need_gpus
from tests.gpu.ranks import run_cases
from tests.gpu.test_messages_gpu import CASES, WORKER


def main() -> None:
    nranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    names = sys.argv[2:] or [*CASES, "speed"]
    need_gpus()
    answers = run_cases([{"case": name} for name in names], nranks, module=WORKER)
    for name, row in zip(names, answers, strict=True):
        if name == "speed":
            print(row[0])
            continue
        print(f"{name}: {'right' if not any(row) else 'WRONG'}")
        for rank, text in enumerate(row):
            if text:
                print(f"  rank {rank}: {text}")


if __name__ == "__main__":
    main()
