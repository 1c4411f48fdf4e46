"""The examples of CONTRIBUTING.md: each is the file under examples/, and each trains."""

import json
from pathlib import Path

import pytest
from helpers.program import bestiary

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PARTS = {"leaky_core": "core:leaky", "repeat_env": "env:repeat", "actor_critic": "algo:actor-critic"}
SHORT = ["--frames", "3k", "--runtime.threads", "1", "--evaluation.episodes", "4", "--log.no-tensorboard", "--plain"]


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_contributing_shows_the_whole_example(name):
    code = (EXAMPLES / f"{name}.py").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"```python\n{code}```" in page, f"copy examples/{name}.py into its code block in CONTRIBUTING.md"


@pytest.mark.parametrize("name", PARTS)
def test_an_example_trains_and_evaluates_as_a_plugin(name, tmp_path):
    run = tmp_path / "run"
    plugin = ["--plugin", EXAMPLES / f"{name}.py"]
    trained = bestiary("train", "recall", *plugin, PARTS[name], *SHORT, "--run", run)
    assert trained.returncode == 0, trained.stderr
    family, part = PARTS[name].split(":")
    kind = json.loads((run / "experiment.json").read_text())[family]["kind"]
    assert kind.replace("_", "-") == part
    last = (run / "metrics.csv").read_text().splitlines()[-1]
    assert int(last.split(",")[0]) >= 3_000
    evaluated = bestiary("eval", run, "--episodes", "4", *plugin)
    assert evaluated.returncode == 0, evaluated.stderr


def test_the_example_core_obeys_the_core_contract():
    done = bestiary("doctor", "core", f"{EXAMPLES / 'leaky_core.py'}:Leaky")
    assert done.returncode == 0, done.stdout + done.stderr
