"""Rehearses a run: starts its processes on fake GPUs, watches them, and collects their log lines."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sbkit
from sbkit.errors import SbkitError
from sbkit.rehearsal import fake_gpu
from sbkit.rehearsal.cards import Card
from sbkit.system.console import LINE_SECONDS, time_span
from sbkit.system.processes import child, ended_by, free_port, session_seconds, torchrun_environment

#: The most ranks that are started; two represent any larger number.
RANKS = 2
#: Seconds for all ranks to end once one has failed, and seconds without computing after which a process hangs.
END, IDLE = 20.0, 15.0
#: Seconds that a rank waits for others in a collective before it fails. Threads that watch the collective use CPU time,
#: so such a rank may not count as hanging.
PATIENCE = 120
#: A process is busy if it uses more than the first share of a core, or waits for a core for the second share of time.
BUSY_SHARE, WANTED_SHARE = 0.05, 0.5
#: The launches that must succeed before each launch.
DEPENDS_ON = {"prepare": (), "measure": ("prepare",), "export": ("resume",), "train": ("prepare",),
              "resume": ("train",), "fail": ("measure", "train")}
SINGLE_PROCESS = ("prepare", "measure", "export")
#: The stages of ``export``.
EXPORTS = ("export", "model.pt2 on the card")
#: How many of the last lines of its log a finding shows for a process that crashed.
LAST_LINES = 3

Line = dict[str, Any]


def rehearse(args: Sequence[str], count: int, card: Card) -> list[Line]:
    """Rehearse the run of a command line, and return the log lines of all its processes.

    args : the command line, after ``sbkit train``
    count : the number of cards
    """
    fake_gpu.build()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sbkit-rehearsal-") as temporary:
        folder = Path(temporary)
        job = {"folder": temporary, "world": min(count, RANKS), "args": [*args, "--device", "cuda"]}
        (folder / "job.json").write_text(json.dumps(job))
        path = os.pathsep.join(filter(None, [str(Path(sbkit.__file__).parent.parent), os.environ.get("PYTHONPATH")]))
        environment = fake_gpu.environment(
            card, count, base={**os.environ, "PYTHONPATH": path}, patience=PATIENCE) | {
            "TORCH_FR_BUFFER_SIZE": "20000", "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        with open(folder / "server.log", "w") as log:
            command = [sys.executable, "-m", "sbkit.rehearsal.run", temporary]
            try:
                with child(command, environment, log, end_by=signal.SIGKILL) as process:
                    while True:
                        try:
                            process.wait(LINE_SECONDS)
                            break
                        except subprocess.TimeoutExpired:  # say which stage a process has begun last
                            print(f"rehearsing for {time_span(time.monotonic() - started)}: {_latest_stage(folder)}",
                                  file=sys.stderr, flush=True)
            finally:
                for file in folder.glob("*.group"):
                    _kill_group(int(file.read_text()))
        if not (folder / "found.json").exists():
            raise SbkitError("rehearsal-failed",
                             f"the rehearsal ended early:\n{(folder / 'server.log').read_text()[-3000:]}", exit_code=1)
        return json.loads((folder / "found.json").read_text().replace(temporary, "the rehearsal's folder"))


def _latest_stage(folder: Path) -> str:
    """Return the stage that a process has begun last."""
    diary = max(folder.glob("*.jsonl"), key=os.path.getmtime, default=None)
    text = diary.read_text(encoding="utf-8") if diary is not None else ""
    stages = ["start", *re.findall(r'"stage": "([^"]+)"', text)]
    return stages[-1]


def main(folder: str) -> None:
    """Fork the processes of a rehearsal from this one, which imports everything once."""
    with fake_gpu.without_driver():
        import torch._dynamo
        import torch._refs  # noqa: F401 (for fake tensors)

        import sbkit.export.bundle
        import sbkit.runs.training
        import sbkit.train.memory.trials  # noqa: F401
        from sbkit.rehearsal import no_values
    no_values.install()
    job = json.loads(Path(folder, "job.json").read_text()) | {"figures": {}, "estimate": {}}
    all_lines: list[Line] = []
    waiting = dict(DEPENDS_ON)
    running: dict[str, Launch] = {}
    succeeded: set[str] = set()
    while waiting or running:
        for name in [name for name, after in waiting.items() if succeeded.issuperset(after)]:
            del waiting[name]
            if name == "export" and not job["figures"]["exports"]:
                all_lines += [{"launch": name, "stage": stage, "skip": "the task exports nothing"} for stage in EXPORTS]
            else:
                running[name] = Launch(name, job)
        time.sleep(0.05)
        for name, launch in list(running.items()):
            if not launch.is_over():
                continue
            lines = launch.close()
            del running[name]
            all_lines += lines
            for line in lines:
                job["figures"] |= line.get("figures", {})
                job["args"] = line.get("args", job["args"])
                if "report" in line:
                    job["estimate"] = line["report"]["sections"].get("cost", {}).get("values", {})
            if launch.has_succeeded(lines):
                succeeded.add(name)
        if not running and not any(succeeded.issuperset(after) for after in waiting.values()):
            break
    Path(folder, "found.json").write_text(json.dumps(all_lines))


class Launch:
    """Processes that are started together: one, or the ranks of a run.

    name : a key of ``rank.LAUNCHES``
    job : the settings and results that all launches share
    """

    def __init__(self, name: str, job: Line):
        from sbkit.rehearsal.rank import run_rank

        self.name = name
        self.folder = Path(job["folder"])
        self.started = time.monotonic()
        self.world = 1 if name in SINGLE_PROCESS else job["world"]
        self.hangs = False
        #: When a process was busy last, with the lines written and the CPU seconds computed and wanted until then.
        self._last_busy = self.started, 0, 0.0, 0.0
        self.processes: list[BaseProcess] = []
        port = free_port()
        for rank in range(self.world):
            variables = torchrun_environment(rank, self.world, port) if self.world > 1 else {}
            process = multiprocessing.get_context("fork").Process(
                target=_start_rank, args=(run_rank, variables, name, rank, job))
            process.start()
            self._file(rank, "group").write_text(str(process.pid))
            self.processes.append(process)

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"{self.name}.{rank}.{kind}"

    def _lines(self, rank: int) -> list[Line]:
        diary = self._file(rank, "jsonl")
        lines = diary.read_text(encoding="utf-8").split("\n")[:-1] if diary.exists() else []
        return [json.loads(line) for line in lines]

    def is_over(self) -> bool:
        """Return whether all processes have ended, are ready to be killed, or hang."""
        alive = [process.is_alive() for process in self.processes]
        if not any(alive):
            return True
        lines = [line for rank in range(self.world) for line in self._lines(rank)]
        ready = sum("ready" in line for line in lines)
        if self.name == "train" and ready == self.world:
            return True
        now = time.monotonic()
        then, lines_then, computed_then, wanted_then = self._last_busy
        elapsed = now - then
        if elapsed < 1:
            return False
        seconds = [session_seconds(process.pid or 0) for process in self.processes]
        computed = sum(cpu for cpu, _ in seconds)
        wanted = computed + sum(waited for _, waited in seconds)  # smaller than before if threads have ended
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # each process gets 1 / load of a core
        has_computed = computed - computed_then > (BUSY_SHARE * elapsed + 0.5) / load
        has_wanted = abs(wanted - wanted_then) > WANTED_SHARE * elapsed + 0.5
        if len(lines) > lines_then or has_computed or has_wanted:
            self._last_busy = now, len(lines), computed, wanted
        self.hangs = elapsed > load * (IDLE if all(alive) and not ready else END)
        return self.hangs

    def close(self) -> list[Line]:
        """Kill the remaining processes; return the lines of all, with crashes, hangs and differing collectives."""
        from sbkit.rehearsal.rank import TRACEBACK_SIGNAL

        if self.hangs:
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid or 0, TRACEBACK_SIGNAL)
            time.sleep(2)  # they also write their collectives each second
        ended = time.monotonic()
        codes = [process.exitcode for process in self.processes]
        for rank, process in enumerate(self.processes):
            _kill_group(process.pid or 0)
            process.join()
            self._file(rank, "group").unlink()
        lines = [{"launch": self.name, "rank": rank, **line}
                 for rank in range(self.world) for line in self._lines(rank)]
        silent = {rank: code for rank, code in enumerate(codes) if code is not None
                  and not any(line["rank"] == rank and "end" in line for line in lines)}
        failed = any(line.get("end") for line in lines) or min(silent.values(), default=0) < 0
        # Once one has failed, it is right for another to exit with a code.
        lines += [self._crash(rank, code) for rank, code in silent.items() if code < 0 or not failed]
        if self.name != "fail":
            lines += self._compare_collectives(lines)
        if self.hangs:
            lines.append(self._hang(lines))
        return [*lines, {"launch": self.name, "rank": 0, "ended": ended}]

    def _hang(self, lines: Sequence[Line]) -> Line:
        """Return the finding that the launch hangs, with the line at which each rank is."""
        locations = [self._location(rank) for rank in range(self.world)]
        where = [f"rank {rank} " + (f"is at {location[0]}:{location[1]}" if location else "has ended")
                 for rank, location in enumerate(locations)]
        stage = next((line["stage"] for line in reversed(lines) if "stage" in line), self.name)
        return self._finding("hang", next(filter(None, locations), ("", 0)), f"the run hangs: {', '.join(where)}",
                             "does each rank reach this line, and do all call the same collectives?", stage)

    def has_succeeded(self, lines: Sequence[Line]) -> bool:
        """Return whether the launches that depend on this one can start."""
        if self.hangs or any(map(_ended_launch, lines)):
            return False
        if self.name == "train":  # which is killed
            successes = [line for line in lines if "ready" in line]
        else:
            successes = [line for line in lines if line.get("end") == 0]
        return len(successes) == self.world

    def _crash(self, rank: int, code: int) -> Line:
        """Return the finding that a process ended without an error, with the last lines of its log."""
        lines = self._lines(rank)
        how = ended_by(-code) if code < 0 else f"exit code {code}"
        stage = next((line["stage"] for line in reversed(lines) if "stage" in line), "start")
        log = self._file(rank, "log")
        last = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:] if log.exists() else []
        crash = self._finding("crash", self._location(rank) or ("", 0),
                              f"rank {rank} ended with {how} in stage '{stage}'",
                              f"the last lines of its log: {' | '.join(last)}", stage)
        return crash | {"rank": rank, "at": lines[-1]["at"] if lines else self.started}

    def _compare_collectives(self, lines: Sequence[Line]) -> list[Line]:
        """Return the number of collectives, or a finding for the first one that differs between ranks."""
        files = [self._file(rank, "collectives") for rank in range(self.world)]
        if self.world == 1 or not all(file.exists() for file in files):
            return []
        # Each call: the collective, its tensors, and the file and line that called it.
        calls_of_ranks = [json.loads(file.read_text()) for file in files]
        for number, calls in enumerate(itertools.zip_longest(*calls_of_ranks), 1):
            same = all((call and call[:2]) == (calls[0] and calls[0][:2]) for call in calls)
            if same:
                continue
            if None in calls and any(map(_ended_launch, lines)):  # ranks ended early for another reason
                return []
            described = [f"rank {rank} calls {_describe_call(call)}" for rank, call in enumerate(calls)]
            location = next((call[2:] for call in calls if call and call[2]), ["", 0])
            differs = self._finding(
                "collectives", location, f"collective {number} of the run differs: {' and '.join(described)}",
                "all ranks must call the same ones in the same order")
            return [differs | {"at": self.started}]  # first, because it causes the other findings
        return [{"launch": self.name, "rank": 0, "collectives": len(calls_of_ranks[0])}]

    def _location(self, rank: int) -> tuple[str, int] | None:
        """Return the line at which a rank hangs or crashed."""
        from sbkit.rehearsal.watch import own_location

        file = self._file(rank, "stack")
        frames = re.findall(r'File "(.*)", line (\d+)', file.read_text()) if file.exists() else []
        return own_location([(name, int(line)) for name, line in frames]) if frames else None

    def _finding(self, code: str, location: Sequence[Any], message: str, suggestion: str, stage: str = "steps") -> Line:
        return {"launch": self.name, "rank": 0, "finding": {
            "severity": "error", "code": code, "file": location[0], "line": location[1], "key": "", "message": message,
            "suggestion": suggestion, "stage": stage, "ends": True}}


def _describe_call(call: Sequence[Any] | None) -> str:
    if call is None:
        return "none"
    name, tensors, file, line = call
    return f"{name} of {tensors}" + (f" at {file}:{line}" if file else "")


def _ended_launch(line: Line) -> bool:
    """Return whether a line is a finding that ended its launch."""
    return line.get("finding", {}).get("ends", False)


def _start_rank(run_rank: Callable[..., None], variables: dict[str, str], launch: str, rank: int, job: Line) -> None:
    os.setsid()
    if sys.platform == "linux":  # it is killed when its parent ends, however that happens
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ.update(variables)
    run_rank(launch, rank, job)


def _kill_group(group: int) -> None:
    """Kill a process and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
