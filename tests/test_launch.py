"""The files of `bestiary launch`, read as their readers do: sbatch and bash, kubectl and KubeRay."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from bestiary.cli.main import main
from bestiary.errors import UserError
from bestiary.launch import K8s, Slurm, manifest, script

TRAIN = ["train", "pong", "runtime:ray", "--runtime.actors", "16"]
POD = K8s(image="bestiary:1", claim="runs")


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.M))


def documents(cfg: K8s, words: list[str] = TRAIN) -> tuple[dict, dict]:
    config, job = yaml.safe_load_all(manifest(cfg, words))
    return config, job


# -- the command -----------------------------------------------------------------------------------------------------


def test_a_command_gets_a_run_directory_and_the_address_of_its_cluster():
    text = script(Slurm(), TRAIN)
    assert (
        "command=(bestiary train pong runtime:ray --runtime.actors 16 --run runs/pong --runtime.address auto)" in text
    )
    assert re.search(r"^# --run runs/pong was added: .*$", text, re.M)
    assert "--run runs/x --runtime.address" in script(Slurm(name="x"), TRAIN)


def test_run_and_address_of_a_command_are_kept():
    words = [*TRAIN, "--run=/scratch/a b", "--runtime.address", "10.0.0.1:6379"]
    text = script(Slurm(), words)
    assert f"command=({shlex.join(['bestiary', *words])})" in text
    assert "was added" not in text


@pytest.mark.parametrize("verb", ["train", "sweep", "study"])
@pytest.mark.parametrize("runtime", [["runtime:ray"], ["--executor", "ray"], ["--executor=ray"]])
def test_every_command_that_trains_can_be_launched(verb, runtime):
    assert f"bestiary {verb} riverraid" in script(Slurm(), [verb, "riverraid", *runtime])


# -- Slurm -----------------------------------------------------------------------------------------------------------


def test_settings_become_directives_of_slurm():
    cfg = Slurm(
        nodes=4, cpus=16, gpus=2, memory="64G", time="2-12:00:00", partition="long", account="lab", output="o-%j"
    )
    found = directives(script(cfg, TRAIN))
    assert found == {
        "job-name": "pong",
        "nodes": "4",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "2",
        "mem": "64G",
        "time": "2-12:00:00",
        "partition": "long",
        "account": "lab",
        "output": "o-%j",
        "open-mode": "append",
        "signal": "B:USR1@120",
        "requeue": "",
        "exclusive": "",
    }
    plain = directives(script(Slurm(exclusive=False), TRAIN))
    assert plain.keys().isdisjoint({"gpus-per-node", "mem", "partition", "account", "exclusive"})


def test_directives_come_before_the_first_command():
    lines = script(Slurm(setup="module load cuda"), TRAIN).splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[first] == "module load cuda"
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


HOSTILE = ["$(touch bad)", "`touch bad`", "a'b", 'c"d', "; touch bad", "@PORT@ @NAME@", "two\nlines", "~", "*", "é", ""]

# Fake programs that log their arguments. srun acts as two nodes, one after the other. ray runs the command after `--`
# if it is the head, and is killed by SIGTERM as the real one is. bestiary saves on SIGTERM.
FAKES = {
    "scontrol": """
        echo "$*" >>scontrol.log
        case "$1 $2" in
            "show hostnames") [ -e nameless ] || printf 'node7\\nnode8\\n' ;;
            "show job") echo "JobId=$3 PreemptTime=$(cat preempted 2>/dev/null || echo None)" ;;
        esac""",
    "srun": """
        printf '%s\\n' "$@" >srun.log
        while [ "$1" != bash ]; do shift; done
        [ -e slow ] && { trap 'kill %1; exit 137' TERM; sleep 60 & touch waiting; wait; }
        SLURM_NODEID=1 RECORD=worker "$@"
        SLURM_NODEID=0 RECORD=head exec "$@" """,
    "ray": """
        printf '%s\\n' "$@" >"$RECORD.log"
        [ "$RECORD" = head ] && [ ! -e broken ] || exit 0
        env | grep ^RAY_ >env.log
        stat -c %a "$RAY_AUTH_TOKEN_PATH" >mode.log
        cat "$RAY_AUTH_TOKEN_PATH" >>tokens.log; echo >>tokens.log
        while [ "$1" != -- ]; do shift; done
        shift
        "$@"
        exit $(($? ? 9 : 0))""",
    "bestiary": """
        printf '%s\\0' "$@" >bestiary.log
        [ -e code ] && exit "$(cat code)"
        trap 'trap "" TERM; touch saving; [ -e slowly ] && sleep 1; echo saved >saved; exit 143' TERM
        touch ready
        for _ in $(seq 600); do sleep 0.05; done""",
}


class FakeCluster:
    """A directory to submit from, with fake programs in place of those of Slurm and Ray."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        for name, body in FAKES.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
            (self.bin / name).chmod(0o755)

    def start(self, text: str, nodes: int = 2) -> subprocess.Popen[str]:
        (self.path / "job.sh").write_text(text)
        env = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "16",
            "RAY_ADDRESS": "elsewhere:1",
            "RAY_AUTH_TOKEN": "another",
        }
        return subprocess.Popen(
            ["bash", "job.sh"], cwd=self.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, text: str, nodes: int = 2) -> int:
        process = self.start(text, nodes)
        output, _ = process.communicate(timeout=30)
        print(output)
        return process.returncode

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + 20
        while not (self.path / name).exists():
            assert time.monotonic() < end, f"there is no {name}"
            time.sleep(0.02)

    def write(self, name: str, text: str = "") -> None:
        (self.path / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def requeued(self) -> bool:
        return "requeue 7" in self.read("scontrol.log").splitlines()

    def shared_files(self) -> list[str]:
        return [path.name for path in (self.path / "runs").iterdir()]


@pytest.fixture
def cluster(tmp_path) -> FakeCluster:
    return FakeCluster(tmp_path)


def test_the_command_reaches_the_first_node_word_for_word(cluster):
    cluster.write("code", "0")
    words = [*TRAIN, *HOSTILE, "--run", "runs/a b"]
    assert cluster.run(script(Slurm(), words)) == 0
    assert cluster.read("bestiary.log").split("\0")[:-1] == [*words, "--runtime.address", "auto"]
    assert not (cluster.path / "bad").exists()
    assert not cluster.requeued()


def test_ray_is_started_on_every_node_and_the_first_is_the_head(cluster):
    cluster.write("code", "0")
    assert cluster.run(script(Slurm(nodes=2, cpus=16, port=7000), TRAIN)) == 0
    options = cluster.read("srun.log").splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16"} <= set(options)
    head, worker = (cluster.read(f"{name}.log").splitlines() for name in ("head", "worker"))
    assert worker[:5] == ["symmetric-run", "--address", "node7:7000", "--min-nodes", "2"]
    assert {"--num-cpus=16", "--num-gpus=0"} <= set(worker[: worker.index("--")])
    assert head == [
        head[0],
        "--include-dashboard=false",
        *worker[1:],
    ]  # an option that `ray start` accepts for a head only


def test_a_cluster_that_does_not_start_is_a_failure(cluster):
    cluster.write("broken")
    assert cluster.run(script(Slurm(), TRAIN)) == 1
    assert not cluster.requeued()


def test_a_job_of_one_node_listens_on_loopback_only(cluster):
    cluster.write("code", "0")
    assert cluster.run(script(Slurm(nodes=1), TRAIN), nodes=1) == 0
    assert "127.0.0.1:6379" in cluster.read("head.log").splitlines()


def test_the_token_is_new_for_every_start_and_private(cluster):
    cluster.write("code", "0")
    for _ in range(2):
        assert cluster.run(script(Slurm(), TRAIN)) == 0
        assert cluster.read("mode.log") == "600\n"
        assert cluster.shared_files() == []
    env = dict(line.split("=", 1) for line in cluster.read("env.log").splitlines())
    assert env["RAY_AUTH_MODE"] == "token"
    assert Path(env["RAY_AUTH_TOKEN_PATH"]).parent == cluster.path / "runs"
    assert env.keys().isdisjoint({"RAY_ADDRESS", "RAY_AUTH_TOKEN"})  # of another cluster
    one, two = cluster.read("tokens.log").splitlines()
    assert one != two and all(re.fullmatch("[0-9a-f]{64}", token) for token in (one, two))


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_reaches_the_program_and_only_a_warning_requeues(cluster, number, requeued):
    process = cluster.start(script(Slurm(), TRAIN))
    cluster.wait_for("ready")
    start = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert cluster.read("saved") == "saved\n"
    assert process.returncode == 143  # the exit code of the program, not that of srun
    assert cluster.requeued() == requeued
    assert cluster.shared_files() == []


def test_a_second_signal_does_not_interrupt_saving(cluster):
    cluster.write("slowly")
    process = cluster.start(script(Slurm(), TRAIN))
    cluster.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    cluster.wait_for("saving")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 143 and cluster.read("saved") == "saved\n"


def test_a_job_warned_before_the_nodes_joined_ends_and_is_requeued(cluster):
    cluster.write("slow")
    process = cluster.start(script(Slurm(), TRAIN))
    cluster.wait_for("waiting")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 137  # srun kills its tasks
    assert cluster.requeued()


def test_a_job_that_fails_early_removes_its_token(cluster):
    cluster.write("nameless")
    assert cluster.run(script(Slurm(), TRAIN)) == 1
    assert not (cluster.path / "srun.log").exists()
    assert cluster.shared_files() == []


@pytest.mark.parametrize(
    ("code", "preempted", "requeued"), [(0, "", False), (2, "", False), (143, "", True), (9, "2026-11-18", True)]
)
def test_only_a_stopped_job_is_requeued(cluster, code, preempted, requeued):
    cluster.write("code", str(code))
    if preempted:
        cluster.write("preempted", preempted)
    assert cluster.run(script(Slurm(), TRAIN)) == code
    assert cluster.requeued() == requeued


# -- Kubernetes ------------------------------------------------------------------------------------------------------


def test_a_manifest_is_a_ray_job_with_the_command_in_a_file():
    config, job = documents(POD)
    assert (config["kind"], config["apiVersion"]) == ("ConfigMap", "v1")
    assert (job["kind"], job["apiVersion"]) == ("RayJob", "ray.io/v1")
    assert config["metadata"] == job["metadata"] == {"name": "pong"}
    assert job["spec"]["entrypoint"] == "bash /etc/bestiary/train.sh"
    assert job["spec"]["backoffLimit"] == 5 and job["spec"]["shutdownAfterJobFinishes"] is True
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == "2.60.0"
    head, worker = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    assert head["serviceType"] == "ClusterIP"
    for pod in (head["template"]["spec"], worker["template"]["spec"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
        assert mounts["runs"] == "/runs" and claims["runs"] == {"claimName": "runs"}
        assert pod["containers"][0]["image"] == "bestiary:1"
    assert {"name": "command", "configMap": {"name": "pong"}} in head["template"]["spec"]["volumes"]
    assert {"name": "command", "mountPath": "/etc/bestiary"} in head["template"]["spec"]["containers"][0][
        "volumeMounts"
    ]


def test_settings_become_resources_of_pods():
    cfg = K8s(
        "a:1", "c", 3, 2, 6, 8, "20Gi", 1, head_cpus=12, head_memory="40Gi", head_gpus=2, namespace="lab", retries=0
    )
    config, job = documents(cfg)
    assert config["metadata"]["namespace"] == job["metadata"]["namespace"] == "lab"
    assert job["spec"]["backoffLimit"] == 0
    cluster = job["spec"]["rayClusterSpec"]
    worker = cluster["workerGroupSpecs"][0]
    assert [worker[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [3, 2, 6]
    resources = [
        group["template"]["spec"]["containers"][0]["resources"] for group in (cluster["headGroupSpec"], worker)
    ]
    assert resources[0]["limits"] == resources[0]["requests"] == {"cpu": "12", "memory": "40Gi", "nvidia.com/gpu": "2"}
    assert resources[1]["limits"] == resources[1]["requests"] == {"cpu": "8", "memory": "20Gi", "nvidia.com/gpu": "1"}


def test_the_autoscaler_is_on_if_there_is_room_for_more_workers():
    fixed = documents(POD)[1]["spec"]["rayClusterSpec"]
    assert "enableInTreeAutoscaling" not in fixed
    assert [fixed["workerGroupSpecs"][0][name] for name in ("minReplicas", "maxReplicas")] == [1, 1]
    assert documents(K8s("a:1", "c", max_workers=9))[1]["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True


def files(tmp_path: Path, words: list[str]) -> Path:
    """The scripts of a manifest in a directory of this machine."""
    config, _ = documents(POD, words)
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text.replace("/tmp/bestiary.pid", str(tmp_path / "pid")))
    FakeCluster(tmp_path)
    return tmp_path


def test_the_command_of_a_manifest_is_kept_word_for_word(tmp_path):
    words = [*TRAIN, *HOSTILE, "--run", "/runs/a b"]
    path = files(tmp_path, words)
    (path / "code").write_text("3")
    env = os.environ | {"PATH": f"{path / 'bin'}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "train.sh"], cwd=path, env=env, check=False).returncode == 3
    assert (path / "bestiary.log").read_text().split("\0")[:-1] == [*words, "--runtime.address", "auto"]
    assert not (path / "bad").exists()


def test_a_deleted_head_waits_until_the_program_has_saved(tmp_path):
    path = files(tmp_path, TRAIN)
    assert subprocess.run(["bash", "stop.sh"], cwd=path, check=False).returncode == 0  # no command runs yet
    env = os.environ | {"PATH": f"{path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-c", "bash train.sh; echo $? >ended"], cwd=path, env=env)
    while not (path / "ready").exists():
        time.sleep(0.02)
    subprocess.run(["bash", "stop.sh"], cwd=path, check=True, timeout=10)
    assert (path / "saved").exists()
    process.wait(timeout=10)
    assert (path / "ended").read_text() == "143\n"
    hook = documents(POD)[1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert hook["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/bestiary/stop.sh"]
    assert hook["terminationGracePeriodSeconds"] == 120


# -- the program -----------------------------------------------------------------------------------------------------

IMAGE = ["--image", "a:1", "--claim", "c"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["slrum"], "did you mean slurm?"),
        (["slurm", "--nodes", "2"], "two dashes are missing"),
        (["slurm", *TRAIN], "comes after two dashes"),
        (["slurm", "--node", "2", "--", *TRAIN], "did you mean --nodes?"),
        (["slurm", "--"], "the command is missing"),
        (["slurm", "--", "eval", "runs/x"], "launch runs train, sweep or study, not 'eval'"),
        (["slurm", "--", "train"], "there is no preset ''"),
        (["slurm", "--", "train", "pnog", "runtime:ray"], "did you mean pong?"),
        (["slurm", "--", "train", "pong"], "add runtime:ray"),
        (["slurm", "--", *TRAIN, "--run"], "--run needs a directory"),
        (["slurm", "--nodes", "0", "--", *TRAIN], "nodes=0 must be at least 1"),
        (["slurm", "--cpus", "0", "--", *TRAIN], "cpus=0 must be at least 1"),
        (["slurm", "--gpus", "-1", "--", *TRAIN], "gpus=-1 must be at least 0"),
        (["slurm", "--time", "1h", "--", *TRAIN], "time='1h' is not a time"),
        (["slurm", "--time", "00:02:00", "--", *TRAIN], "too short"),
        (["slurm", "--memory", "much", "--", *TRAIN], "write it as 64G"),
        (["slurm", "--name", "my job", "--", *TRAIN], "name='my job' cannot be used"),
        (["slurm", "--partition", "a\n#SBATCH --wrap=x", "--", *TRAIN], "cannot be used"),
        (["slurm", "--output", "my file", "--", *TRAIN], "a path without spaces"),
        (["slurm", "--setup", "a\nb", "--", *TRAIN], "one line of shell"),
        (["slurm", "--port", "80", "--", *TRAIN], "port=80 must be from 1024 to 65535"),
        (["slurm", "--out", "no/such/place.sh", "--", *TRAIN], "--out no/such/place.sh cannot be written"),
        (["k8s", "--claim", "c", "--", *TRAIN], "--image is missing"),
        (["k8s", "--image", "a:1", "--", *TRAIN], "--claim is missing"),
        (["k8s", *IMAGE, "--workers", "0", "--", *TRAIN], "workers=0 must be at least 1"),
        (["k8s", *IMAGE, "--min-workers", "3", "--", *TRAIN], "min-workers=3 must be at most workers=1"),
        (
            ["k8s", *IMAGE, "--workers", "3", "--max-workers", "2", "--", *TRAIN],
            "max-workers=2 must be at least workers=3",
        ),
        (["k8s", *IMAGE, "--name", "My_Job", "--", *TRAIN], "name='My_Job' cannot be used"),
        (["k8s", *IMAGE, "--name", "a" * 48, "--", *TRAIN], "at most 47"),
        (["k8s", *IMAGE, "--memory", "8 GB", "--", *TRAIN], "write it as 16Gi"),
        (["k8s", *IMAGE, "--ray", "2.50.0", "--", *TRAIN], "ray=2.50.0 is too old"),
        (["k8s", "--image", "a b", "--claim", "c", "--", *TRAIN], "image='a b' cannot be used"),
        (["k8s", *IMAGE, "--", *TRAIN, "--run", "runs/x"], "not on the shared volume"),
        (["k8s", *IMAGE, "--", *TRAIN, "--run", "/runs/../x"], "not on the shared volume"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *args]) == 2
    out, err = capsys.readouterr()
    assert words in err and out == "" and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_python_raises_the_same_sentence():
    with pytest.raises(UserError, match="nodes=0 must be at least 1"):
        script(Slurm(nodes=0), TRAIN)


def test_out_names_the_file_and_without_it_the_text_is_printed(tmp_path, capsys):
    assert main(["launch", "slurm", "--out", str(tmp_path / "job.sh"), "--", *TRAIN]) == 0
    assert (tmp_path / "job.sh").read_text() == script(Slurm(), TRAIN)
    assert f"sbatch {tmp_path / 'job.sh'}" in capsys.readouterr().out
    assert main(["launch", "slurm", "--", *TRAIN]) == 0
    assert capsys.readouterr().out == script(Slurm(), TRAIN)


def test_a_plugin_after_the_dashes_is_part_of_the_command(capsys):
    assert main(["launch", "slurm", "--", *TRAIN, "--plugin", "mine.py"]) == 0
    assert "--plugin mine.py" in capsys.readouterr().out


def test_help_lists_the_clusters_and_their_flags(capsys):
    assert main(["--help"]) == 0
    assert "launch slurm|k8s" in capsys.readouterr().out
    assert main(["launch", "--help"]) == 0
    assert "usage: bestiary launch slurm|k8s" in capsys.readouterr().out
    for kind, flag in (("slurm", "--partition"), ("k8s", "--claim")):
        with pytest.raises(SystemExit) as end:
            main(["launch", kind, "--help"])
        assert end.value.code == 0 and flag in capsys.readouterr().out


def test_launch_imports_neither_torch_nor_ray():
    code = (
        f"import sys; from bestiary.cli.main import main; main(['launch', 'slurm', '--', *{TRAIN!r}]); "
        "print([m for m in ('torch', 'ray', 'gymnasium') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_launch_in_the_documentation_writes_a_file(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "cluster" / "launch.md").read_text()
    lines = re.findall(r"^bestiary (launch .*)$", page, re.M)
    monkeypatch.chdir(tmp_path)
    for line in lines:
        assert main(shlex.split(line.replace("IMAGE", "image:1").replace("CLAIM", "claim"))) == 0, (
            capsys.readouterr().err
        )
    assert {path.name for path in tmp_path.iterdir()} == {"job.sh", "job.yaml"}


@pytest.mark.parametrize("cls", [Slurm, K8s])
def test_every_flag_is_in_the_documentation(cls):
    page = (Path(__file__).parent.parent / "docs" / "cluster" / "launch.md").read_text()
    names = {f.name.replace("_", "-") for f in dataclasses.fields(cls)} - {"exclusive"} | {"no-exclusive"}
    assert not [name for name in names if f"--{name}" not in page]
