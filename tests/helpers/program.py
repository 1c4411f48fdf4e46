"""The program `bestiary` as a subprocess."""

import re
import subprocess
import sys
from pathlib import Path

SMALL = ["--runtime.envs", "4", "--algo.replay.batch-size", "4", "--runtime.threads", "1", "--plain"]


def bestiary(*args: object, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bestiary", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The error message of a command that failed by the user's mistake: exit code 2 and no traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", done.stderr).split())
