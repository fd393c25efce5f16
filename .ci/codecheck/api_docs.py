"""Completeness of the exported API's documentation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_PROBE = r"""
import inspect, json, re
import miraccl

def problems(name, obj, owner=None):
    text = inspect.getdoc(obj) or ""
    if not text:
        return [f"{name}: no docstring"]
    target = obj.__init__ if inspect.isclass(obj) else obj
    if not callable(obj) or (inspect.isclass(obj) and issubclass(obj, BaseException)):
        return []
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [n for n in names if n not in ("self", "cls") and not re.search(rf"\b{n}\b", text)]
    result = [f"{name}: parameters {', '.join(missing)}"] if missing else []
    if "Raises" not in text and not inspect.isclass(obj):
        result.append(f"{name}: errors")
    return result

found = []
for name in miraccl.__all__:
    obj = getattr(miraccl, name)
    if not (inspect.isclass(obj) or inspect.isroutine(obj)):
        continue
    found += problems(name, obj)
    if inspect.isclass(obj) and not issubclass(obj, (BaseException, int, str)):
        for attribute, _ in inspect.getmembers(obj):
            if attribute.startswith("_"):
                continue
            value = inspect.getattr_static(obj, attribute)
            if isinstance(value, property):
                if not inspect.getdoc(value):
                    found.append(f"{name}.{attribute}: no docstring")
            elif inspect.isroutine(getattr(obj, attribute)):
                found += problems(f"{name}.{attribute}", getattr(obj, attribute))
print(json.dumps(found))
"""


def incomplete_api(root: Path) -> list[str]:
    """Return what the exported API of the package below ``root`` does not document.

    Each entry names an object of ``miraccl.__all__`` or a public method of one, and what is
    missing: the docstring, parameters that it does not mention, or the errors.
    """
    environ = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"cannot read the exported API: {done.stderr.strip().splitlines()[-1]}")
    found: list[str] = json.loads(done.stdout)
    return found
