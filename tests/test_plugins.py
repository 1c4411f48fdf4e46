"""Plugin cores: loading, the contract's checks, training, and refusals in one sentence."""

from pathlib import Path

import pytest
import torch
from helpers.program import SMALL, bestiary, refused

from bestiary.analysis.core_contract import check_contract
from bestiary.cli.main import main
from bestiary.config.experiment import family
from bestiary.cores import DeltaNet, Ff, Gpt, Lstm
from bestiary.cores.base import Core
from bestiary.nets import Net, Torso
from bestiary.types import Spec, TimeStep

EXAMPLE = Path(__file__).parent.parent / "examples" / "leaky_core.py"

BROKEN = '''
from dataclasses import dataclass
import torch
from bestiary.cores.base import Core

class Sum(Core):
    """Adds up its inputs; {fault}"""
    def __init__(self):
        super().__init__()
        self.width = 6
        self.scale = torch.nn.Parameter(torch.ones(6))
        self.idle = torch.nn.Parameter(torch.ones(6))
    def initial_state(self, batch_size):
        return (self.scale.new_zeros({leaf}),)
    def forward(self, x, is_first, state):
        (h,) = state
        outputs = []
        for step, new in zip(x, is_first):
            {forget}
            h = h + self.scale * step {mix}
            outputs.append(h)
        return torch.stack(outputs) {idle}, (h,)

@dataclass(frozen=True)
class Config:
    def build(self, input_width):
        return Sum()
'''
CORRECT = {
    "fault": "",
    "leaf": "batch_size, 6",
    "forget": "h = torch.where(new[:, None], 0, h)",
    "mix": "",
    "idle": "+ self.idle",
}


def write(tmp_path: Path, **changes: str) -> str:
    file = tmp_path / "core.py"
    file.write_text(BROKEN.format(**(CORRECT | changes)))
    return f"{file}:Config"


@pytest.mark.parametrize("name", family("core"))
def test_every_core_of_the_package_keeps_the_contract(name):
    narrow = {"hidden": 8, "width": 8, "heads": 2, "feedforward": 8, "window": 16}
    cls = family("core")[name]
    config = cls(**{k: v for k, v in narrow.items() if k in cls.__dataclass_fields__})
    assert [finding for finding in check_contract(config) if finding.violation] == []


def test_the_example_keeps_the_contract():
    done = bestiary("doctor", "core", f"{EXAMPLE}:Leaky")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the core keeps the contract" in done.stdout


def test_the_example_is_forty_lines_of_code():
    lines = [line for line in EXAMPLE.read_text().split('"""', 2)[2].splitlines() if line.strip()]
    assert len(lines) <= 40


def test_a_correct_core_passes(tmp_path, capsys):
    assert main(["doctor", "core", write(tmp_path)]) == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forget": "pass"}, "begins at step"),
        ({"forget": "h = torch.where(is_first[0][:, None], 0, h)"}, "differs first at step"),
        ({"mix": "+ x.mean((0, 1))"}, "stream 0 differs first at step 0"),
        ({"idle": ""}, "idle gets none"),
        ({"leaf": "6, batch_size"}, "the first axis must be the batch"),
        ({"forget": "h = torch.where(new[:, None], 0, h if outputs else h.detach())"}, "the gradient of"),
        ({"forget": "h = torch.where(new[:, None], 0, h); x.add_(1)"}, "x was changed"),
        ({"idle": "+ self.idle + nonsense"}, "NameError"),
    ],
)
def test_a_broken_core_is_reported_with_its_violation(tmp_path, capsys, changes, message):
    assert main(["doctor", "core", write(tmp_path, **changes)]) == 1, capsys.readouterr()
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_plugin_core_trains_evaluates_and_resumes(tmp_path):
    small = [*SMALL, "--evaluation.episodes", 4, "--run", tmp_path / "run", "--plugin", EXAMPLE]
    done = bestiary("train", "recall", "core:leaky", "--core.hidden", 8, "--frames", "2k", *small)
    assert done.returncode == 0, done.stderr
    assert "core:leaky" in bestiary("list", "cores", "--plugin", EXAMPLE).stdout
    evaluated = bestiary("eval", tmp_path / "run", "--episodes", 4, "--plugin", EXAMPLE)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "needs --plugin FILE.py" in refused(bestiary("eval", tmp_path / "run", "--episodes", 4))


def test_plugins_that_cannot_be_used_are_refused(tmp_path, capsys):
    def error_message(*args: object) -> str:
        assert main(["list", "cores", *map(str, args)]) == 2
        return capsys.readouterr().err

    assert "there is no such Python file" in error_message("--plugin", tmp_path / "nothing.py")
    assert "--plugin needs a file" in error_message("--plugin")
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\nimport nowhere_to_be_found\n")
    assert "bad.py does not import (line 2): ModuleNotFoundError" in error_message("--plugin", bad)
    bad.write_text("x = (\n")
    assert "does not import" in error_message("--plugin", bad)
    bad.write_text("x = 1\n")
    assert "registers nothing" in error_message("--plugin", bad)
    bad = tmp_path / "worse.py"
    bad.write_text("import bestiary\nclass Unfrozen: pass\nbestiary.register(core=Unfrozen)\n")
    assert "Unfrozen must be a frozen dataclass" in error_message("--plugin", bad)


def test_doctor_refuses_what_is_not_a_core(tmp_path, capsys):
    def error_message(*args: str) -> str:
        assert main(["doctor", *args]) == 2
        return capsys.readouterr().err

    assert "did you mean lstm" in error_message("core", "lstmm")
    file = tmp_path / "core.py"
    file.write_text("class Plain: pass\n")
    assert "has no class Other" in error_message("core", f"{file}:Other")
    assert "must be a frozen dataclass" in error_message("core", f"{file}:Plain")
    file = tmp_path / "other.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Wrong:\n  def build(self, w): return 3\n"
    )
    assert "must return a bestiary.cores.base.Core" in error_message("core", f"{file}:Wrong")
    assert "doctor does not know" in error_message("nothing")


@pytest.mark.parametrize("other", [Ff(), Lstm(hidden=16), Lstm(hidden=8, layers=2), Gpt(width=8, heads=2), DeltaNet()])
def test_the_recurrent_state_of_another_core_is_refused(other):
    spec = Spec("toy", (3,), torch.float32, 2)
    torso = Torso(spec, Net(), Lstm(hidden=8))
    flag, number = torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    step = TimeStep(torch.zeros(1, 2, 3), number, torch.zeros(1, 2), flag, flag)
    torso(step, torso.initial_state(2))
    foreign: Core = other.build(8)
    with pytest.raises(ValueError, match="this core needs"):
        torso(step, foreign.initial_state(2))


@pytest.mark.parametrize("core", ["ff", "lstm", "gru", "gpt", "delta-rnn"])
def test_inspect_plots_an_episode_into_the_run(tmp_path, core):
    path = str(tmp_path / "run")
    short = [*SMALL, "--frames", "1k", "--evaluation.episodes", "0", "--run", path]
    assert main(["train", "recall", f"core:{core}", *short]) == 0
    assert main(["inspect", path, "--seed", "3"]) == 0
    (figure,) = (tmp_path / "run").glob("inspect-*-3.png")
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert figure.stat().st_size > 10_000


def test_inspect_refuses_what_is_not_a_run(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_plugin_may_register_an_environment_with_gymnasium_alone(tmp_path, capsys):
    plugin = tmp_path / "plugin.py"
    plugin.write_text("import gymnasium\ngymnasium.register('PluggedIn-v0', entry_point='nowhere:Nothing')\n")
    assert main(["list", "cores", "--plugin", str(plugin)]) == 0
    assert not capsys.readouterr().err
