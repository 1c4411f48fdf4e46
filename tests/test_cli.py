"""The command-line program in real processes: exit codes and output."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.program import SMALL, bestiary, refused

from bestiary.cli.commands.train import read
from bestiary.cli.main import main
from bestiary.config.experiment import family
from bestiary.presets import PRESETS, preset


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "recall"
    done = bestiary("train", "recall", *SMALL, "--frames", "3k", "--evaluation.episodes", 4, "--run", path)
    assert done.returncode == 0, done.stderr
    return path


def test_help_is_fast_and_does_not_import_torch():
    code = (
        "import sys; from bestiary.cli.main import main; main(['--help']); "
        "print([m for m in ('torch', 'gymnasium', 'numpy') if m in sys.modules])"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "[]"
    assert min(times) < 0.5
    assert "usage: bestiary" in done.stdout


def test_the_module_and_the_program_print_the_same():
    program = Path(sys.executable).with_name("bestiary")
    one = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert one.stdout == bestiary("--help").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "did you mean train?"),
        (["train", "recal"], "did you mean recall?"),
        (["train", "recall", "core:lstmm"], "there is no core 'lstmm': did you mean lstm?"),
        (["train", "recall", "env:atary"], "did you mean atari?"),
        (["train", "recall", "--algo.replay.batchsize", "3"], "did you mean --algo.replay.batch-size"),
        (["train", "recall", "lstm"], "what is 'lstm'?"),
        (["train", "recall", "--frames", "many"], "'many' is not a whole number"),
        (["train", "recall", "--frames", "0"], "frames=0 must be at least 1"),
        (["train", "recall", "--algo.replay.batch-size", "0"], "batch-size=0 must be at least 1"),
        (["train", "recall", "--algo.unroll", "0"], "unroll=0 must be at least 1"),
        (["train", "recall", "--runtime.envs", "0"], "envs=0 must be at least 1"),
        (["train", "recall", "--algo.replay.batch-size", "65"], "can never be filled: at most 64"),
        (["train", "recall", "--runtime.device", "cuda:7"], "cannot be used here"),
        (["train", "recall", "--core.layers", "0"], "layers=0 must be at least 1"),
        (["train", "recall", "net.encoder:shallow"], "encoder shallow needs images"),
        (["train", "recall", "--net.frame-stack", "4"], "frame-stack=4 needs images"),
        (
            ["train", "recall", "--algo.count-epsilon=3"],
            "there is no flag --algo.count-epsilon for what is chosen here: it belongs to algo:dqn",
        ),
        (["train", "pong", "--env.game", "Brakeout"], "did you mean Breakout"),
        (["train", "cartpole", "--env.id", "CartPole-v9"], "not registered with Gymnasium"),
        (["train", "cartpole", "--env.id", "Pendulum-v1"], "only Discrete is supported"),
        (["eval", "nowhere"], "nowhere is not a run"),
        (["resume", "nowhere"], "nowhere is not a run"),
        (["bench", "impala-atary"], "did you mean impala-atari?"),
        (["list", "gamess"], "did you mean games"),
        (["doctor", "who"], "doctor does not know"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(args, words, tmp_path):
    assert words in refused(bestiary(*args, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_of_another_experiment_is_refused(run):
    sentence = refused(bestiary("train", "recall", *SMALL, "--seed", 5, "--run", run))
    assert "holds another experiment (seed: 0 -> 5)" in sentence
    sentence = refused(bestiary("train", "recall", "core:ff", *SMALL, "--run", run))
    assert "core: lstm -> ff" in sentence


def test_an_invalid_experiment_file_is_refused(run, tmp_path):
    for text in (
        "{",
        '{"kind": "experiment", "unknown": 1}',
        '{"kind": "experiment", "core": {"kind": "os.system"}}',
        "[]",
    ):
        (tmp_path / "experiment.json").write_text(text)
        assert "Traceback" not in refused(bestiary("eval", tmp_path))


def test_train_then_eval_needs_only_the_run_directory(run):
    done = bestiary("eval", run, "--episodes", 12, "--repeats", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads(next(run.glob("eval-*.json")).read_text())
    assert result["greedy"]["score"]["n"] == result["sampled"]["score"]["n"] == 24
    assert len(result["greedy"]["repeat_means"]) == 2
    assert result["protocol"]["env"]["kind"] == "recall"
    assert "IQM" in done.stdout


def test_resume_continues_from_the_last_checkpoint(run):
    before = len((run / "metrics.csv").read_text().splitlines())
    done = bestiary("resume", run, "--frames", "5k", "--plain")
    assert done.returncode == 0, done.stderr
    assert "continues at" in done.stdout
    assert len((run / "metrics.csv").read_text().splitlines()) > before


def test_commands_that_training_prints_can_be_run(tmp_path):
    args = ["train", "recall", *SMALL, "--frames", "1k", "--evaluation.episodes", 0, "--run", tmp_path / "r"]
    hints = re.findall(r"^  bestiary (.*?)(?:\s{2,}.*)?$", bestiary(*args).stdout, re.M)
    assert [hint.split()[0] for hint in hints] == ["eval"]
    for hint in hints:
        done = bestiary(*shlex.split(hint))
        assert done.returncode == 0, done.stderr


def test_train_on_the_same_directory_resumes(tmp_path):
    args = ["train", "recall", *SMALL, "--evaluation.episodes", 0, "--run", tmp_path / "r", "--frames"]
    assert bestiary(*args, "2k").returncode == 0
    resumed = bestiary(*args, "4k")
    assert resumed.returncode == 0
    assert "continues at" in resumed.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_exits(number, tmp_path):
    args = ["train", "recall", *SMALL, "--frames", "100M", "--run", str(tmp_path / "r")]
    process = subprocess.Popen(
        [sys.executable, "-m", "bestiary", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "%" in line:
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    (hint,) = re.findall("continue with: bestiary (resume .*)", out)
    assert list((tmp_path / "r" / "checkpoints").iterdir())
    done = bestiary(*shlex.split(hint), "--frames", "1", "--plain")
    assert done.returncode == 0
    assert "has used its budget of 1 frames" in done.stdout


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path):
    args = ["train", "recall", *SMALL, "--frames", "100M", "--checkpoint.frames", "500", "--run", str(tmp_path / "r")]
    process = subprocess.Popen([sys.executable, "-m", "bestiary", *args], stdout=subprocess.DEVNULL)
    saved = tmp_path / "r" / "checkpoints"
    while not saved.exists() or len(list(saved.glob("0*"))) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    last = max(int(p.name) for p in saved.glob("0*"))
    done = bestiary("resume", tmp_path / "r", "--frames", last + 1_000, "--plain")
    assert done.returncode == 0, done.stderr


def test_an_environment_that_raises_shows_its_traceback_and_saves(tmp_path):
    (tmp_path / "boom.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Boom(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    n = 0\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.n += 1\n"
        "        if self.n > 300: raise ValueError('sensor unplugged')\n"
        "        return np.zeros(2, np.float32), 0.0, False, False, {}\n"
        "gymnasium.register('Boom-v0', Boom)\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    args = ["train", "cartpole", "--env.id", "boom:Boom-v0", *SMALL, "--run", str(tmp_path / "r")]
    done = subprocess.run(
        [sys.executable, "-m", "bestiary", *args], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 1
    assert "ValueError: sensor unplugged" in done.stderr
    assert "Traceback" in done.stderr
    assert list((tmp_path / "r" / "checkpoints").iterdir())


def test_a_diverging_run_reports_the_update(tmp_path):
    args = ["train", "cartpole", *SMALL, "algo.optimizer:rms-prop", "--algo.optimizer.lr", "1e30"]
    done = bestiary(*args, "--algo.grad-norm", "1e30", "--run", tmp_path / "r")
    assert re.search(r"update \d+ gave a loss of (nan|-?inf)", refused(done))
    assert list((tmp_path / "r" / "checkpoints").iterdir())


def test_a_closed_output_pipe_gives_no_traceback():
    program = subprocess.Popen(
        [sys.executable, "-m", "bestiary", "train", "recall", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout and program.stderr
    program.stdout.close()
    message = program.stderr.read()
    program.stderr.close()
    assert program.wait(120) == 141
    assert not message


def test_everything_can_be_listed():
    done = bestiary("list")
    assert all(name in done.stdout for name in (*PRESETS, "core:lstm", "env:atari", "algo:impala", "runtime:overlap"))
    assert "MsPacman" in bestiary("list", "games").stdout


def test_doctor_lists_versions_and_missing_extras():
    done = bestiary("doctor")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("torch", "device", "threads", "atari"))


@pytest.mark.parametrize("name", PRESETS)
def test_the_help_of_every_preset_lists_its_settings(name, capsys):
    with pytest.raises(SystemExit) as stop:  # in this process, because there are many presets
        main(["train", name, "--help"])
    assert stop.value.code == 0
    assert "--algo.unroll" in capsys.readouterr().out


def test_no_environment_variable_is_written_to_the_run(tmp_path):
    env = os.environ | {"MY_API_TOKEN": "hunter2-should-not-appear"}
    args = ["train", "recall", *SMALL, "--frames", "1k", "--evaluation.episodes", "0", "--run", str(tmp_path / "r")]
    subprocess.run([sys.executable, "-m", "bestiary", *args], env=env, check=True, capture_output=True)
    for file in (tmp_path / "r").rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes()


@pytest.mark.parametrize("part", ["env", "algo", "core", "runtime"])
def test_every_part_can_be_selected_by_its_name(part):
    for name, cls in family(part).items():
        if name != "gym":  # needs an id
            assert type(getattr(read(["recall", f"{part}:{name}"]).experiment, part)) is cls


def test_a_boolean_can_be_turned_off_without_naming_its_part():
    assert preset("pong").env.life_loss
    assert not read(["pong", "--env.no-life-loss"]).experiment.env.life_loss
