"""Machines and processes that die come back as tools/README.md says: no step is lost, none done twice."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sbkit.system.processes import free_port

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools"
SCRIPT = Path(__file__).with_name("elastic_worker.py")
SECONDS = 120  # for what takes a few: these tests share a small machine


def wait_for(what, process, seconds=SECONDS):
    """What ``what()`` returns as soon as it isn't None, while ``process`` lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found is not None:
            return found
        assert process.poll() is None, f"ended early with {process.returncode}"
        time.sleep(0.05)
    raise AssertionError("waited in vain")


class Cluster:
    """Agents on one machine, each standing for a machine of its own, that run a script together."""

    def __init__(self, folder: Path, nodes: str, script: Path, arguments: list[str]):
        self.folder, self.nodes, self.script, self.arguments = folder, nodes, script, arguments
        self.port = free_port()
        self.agents: dict[str, subprocess.Popen] = {}

    def start(self, name: str) -> subprocess.Popen:
        environment = {
            **os.environ, "AGENT": name, "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PET_LOCAL_ADDR": "127.0.0.1",
            # A lost machine is noticed in seconds, so that the test takes no minutes.
            "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3",
        }
        with open(self.folder / f"{name}.log", "w") as log:
            self.agents[name] = subprocess.Popen(
                ["bash", str(TOOLS / "launch_local.sh"), "--nodes", self.nodes,
                 "--head", f"127.0.0.1:{self.port}", "--processes", "1", "--max-restarts", "3",
                 "--script", str(self.script), *self.arguments],
                env=environment, stdout=log, stderr=subprocess.STDOUT)
        # The first one is the head: the others only come once it answers.
        return wait_for(lambda: self.agents[name] if self.answers() else None, self.agents[name])

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def starts(self) -> list[dict]:
        log = self.folder / "starts.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def state(self) -> dict:
        saved = self.folder / "saved.json"
        return json.loads(saved.read_text()) if saved.exists() else {"step": 0}

    def reaches(self, step: int) -> bool | None:
        return self.state()["step"] >= step or None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                lose(agent)


def lose(agent: subprocess.Popen) -> None:
    """What happens when a machine loses its power: the agent is gone with all that it started."""
    children = [
        int(pid) for task in Path(f"/proc/{agent.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()]
    agent.kill()
    for pid in children:  # before the agent is waited for, so that they can't be others by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait(timeout=30)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_process_comes_back_with_all_others_at_the_last_checkpoint(tmp_path):
    steps = 60
    with Cluster(tmp_path, "2", SCRIPT, [str(tmp_path), str(steps)]) as cluster:
        one, two = cluster.start("one"), cluster.start("two")
        wait_for(lambda: cluster.reaches(20), one)
        victim = next(start for start in cluster.starts() if start["agent"] == "two")
        os.kill(victim["pid"], signal.SIGKILL)
        for name, agent in (("one", one), ("two", two)):
            assert agent.wait(timeout=SECONDS) == 0, cluster.log(name)
    assert cluster.state() == {"step": steps, "total": steps * (steps + 1) / 2}
    for name in ("one", "two"):
        first, *later = [start for start in cluster.starts() if start["agent"] == name]
        assert first["first"] == 0
        assert later and all(20 <= start["first"] < steps and start["world"] == 2 for start in later)


@pytest.mark.long
@pytest.mark.slow
def test_a_range_of_machines_goes_on_without_a_lost_one_and_takes_a_new_one_in(tmp_path):
    with Cluster(tmp_path, "1:2", SCRIPT, [str(tmp_path), "100000"]) as cluster:
        one, two = cluster.start("one"), cluster.start("two")

        def together(name: str) -> bool | None:
            """Whether ``name`` takes part, and steps were saved since."""
            joined = [start["first"] for start in cluster.starts() if (start["agent"], start["world"]) == (name, 2)]
            return cluster.reaches(joined[-1] + 5) if joined else None

        wait_for(lambda: together("two"), one)
        lose(two)
        before = len(cluster.starts())
        wait_for(lambda: len(cluster.starts()) > before or None, one)
        alone = cluster.starts()[before]
        assert (alone["agent"], alone["world"]) == ("one", 1) and alone["first"] > 0
        three = cluster.start("three")
        wait_for(lambda: together("three"), one)
        (tmp_path / "enough").touch()
        for name, agent in (("one", one), ("three", three)):
            assert agent.wait(timeout=SECONDS) == 0, cluster.log(name)
    steps = cluster.state()["step"]
    assert cluster.state()["total"] == steps * (steps + 1) / 2


@pytest.fixture
def slurm(tmp_path):
    """Run the SLURM script among commands that only write down how they were called."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    calls = tmp_path / "calls"
    commands = {
        "scontrol": 'echo "scontrol $*" >> "$CALLS"\n[[ $1 == show ]] && printf "node7\\nnode8\\n"\ntrue',
        "srun": 'trap \'echo "srun got TERM" >> "$CALLS"; exit 1\' TERM\necho "srun $*" >> "$CALLS"\n'
                'for _ in $(seq "${STEP_LASTS:-0}"); do sleep 0.1; done',
        "torchrun": "true",
    }
    for name, body in commands.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin_folder / name).chmod(0o755)

    def start(*arguments, **extra):
        environment = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}", "VIRTUAL_ENV": "yes", "CALLS": str(calls),
            "SLURM_JOB_ID": "12345", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_GPUS_ON_NODE": "4", "SLURM_SUBMIT_DIR": str(ROOT), **extra}
        process = subprocess.Popen(
            ["bash", str(TOOLS / "launch_slurm.sh"), *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return process, lambda: calls.read_text().splitlines() if calls.exists() else []

    return start


def test_slurm_starts_one_torchrun_a_machine_that_meet_on_the_first(slurm):
    process, calls = slurm("hparams/ctc.yaml", "--language", "fr", MIN_NODES="1")
    assert process.wait(timeout=20) == 0
    (call,) = [line for line in calls() if line.startswith("srun")]
    for part in ("--ntasks=2", "--ntasks-per-node=1", "--rdzv-endpoint=node7:22345", "--nnodes=1:2",
                 "--nproc-per-node=4", "--max-restarts=3"):
        assert part in call.split()
    assert call.endswith("train.py hparams/ctc.yaml --language fr")
    assert not any("requeue" in line for line in calls())


def test_slurm_warning_saves_and_requeues(slurm):
    process, calls = slurm("hparams/ctc.yaml", STEP_LASTS="300")
    wait_for(lambda: any(line.startswith("srun --") for line in calls()) or None, process)
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=20)
    assert calls()[-2:] == ["srun got TERM", "scontrol requeue 12345"]
    assert "Back into the queue" in stderr and process.returncode == 1


def test_slurm_failure_without_a_warning_is_not_requeued(slurm, tmp_path):
    (tmp_path / "bin" / "srun").write_text("#!/usr/bin/env bash\nexit 3\n")
    process, calls = slurm("hparams/ctc.yaml")
    assert process.wait(timeout=20) == 3
    assert not any("requeue" in line for line in calls())


@pytest.mark.parametrize("arguments, says", [
    ([], "name a recipe"), (["--nodes", "2", "x.yaml"], "need --head"),
    (["--nodes", "two", "x.yaml"], "a range"), (["--wrong", "x.yaml"], "unknown option --wrong"),
    (["--id"], "--id needs a value"), (["--script", "no.py", "x.yaml"], "there is no script no.py"),
])
def test_launch_local_refuses_unknown_arguments(arguments, says):
    done = subprocess.run(["bash", TOOLS / "launch_local.sh", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["launch_local.sh", "launch_slurm.sh"])
def test_launchers_are_clean_and_explain_themselves(name):
    done = subprocess.run(["bash", TOOLS / name, "--help"], capture_output=True, text=True, check=True)
    assert "RECIPE.yaml [--key value ...]" in done.stdout and "set -" not in done.stdout
    subprocess.run(["bash", "-n", TOOLS / name], check=True)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", TOOLS / name], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_pytorchjob_is_elastic_and_runs_torchrun():
    job = yaml.safe_load((TOOLS / "kubernetes_pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["rdzvBackend"] == "c10d"
    assert 1 <= policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert policy["maxRestarts"] > 0 and worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["command"] == ["torchrun"]
    assert container["args"][0] == "train.py" and (ROOT / container["args"][1]).is_file()
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]} and "/dev/shm" in mounts.values()
    assert pod["terminationGracePeriodSeconds"] > 30  # torchrun's own patience
