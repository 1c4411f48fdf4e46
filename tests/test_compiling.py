"""Cached machine code is reused by later processes and recompiled when any source it depends on changes."""

import subprocess
import sys
from pathlib import Path

import bestiary

HEAD = "from bestiary.ops.jit import compiler\n"
CALLED = HEAD + "\n@compiler()\ndef called(x):\n    return x + {0}\n"
CALLS = HEAD + "from bestiary.called import called\n\n@compiler()\ndef calls(x):\n    return called(x)\n"
ASK = "from bestiary.calls import calls; print(calls(1), len(calls.stats.cache_hits))"


def test_a_changed_callee_invalidates_the_cached_caller(tmp_path):
    package = tmp_path / "bestiary"
    for name in ("ops/jit.py", "config/compat.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text((Path(bestiary.__file__).parent / name).read_text())
    (package / "__init__.py").write_text("")
    (package / "calls.py").write_text(CALLS)

    def answer(number: int) -> str:
        (package / "called.py").write_text(CALLED.format(number))
        done = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert answer(1) == "2 0"  # compiled
    assert answer(1) == "2 1"  # from the cache
    assert answer(77) == "78 0"  # recompiled; another length, since Python compares times in seconds
