"""The program in the README runs, links lead somewhere, and documentation that is generated is what would be generated."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from miraccl.tools import env
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multiprocess
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(block)
    command = [warm_python(), "-m", "miraccl", "run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "Candidate" in done.stdout


def test_the_table_of_settings_is_up_to_date() -> None:
    text = (ROOT / "docs" / "env.md").read_text()
    assert env.render_markdown() in text, "run: make docs"


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"
