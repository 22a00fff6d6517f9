"""Rehearses a run: starts its processes on cards that compute nothing, follows them, and collects what they found."""

from __future__ import annotations

import contextlib
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
from sbkit.rehearsal import nullcard
from sbkit.rehearsal.cards import Card
from sbkit.system.processes import ended_by, free_port, session_seconds, torchrun_environment

#: Ranks that stand for any larger number.
RANKS = 2
#: Seconds in which all ranks must end once one has failed, and after which processes that don't compute hang.
END, IDLE = 20.0, 15.0
#: Seconds that a rank waits for others in a collective, after which it fails; what watches it computes as well, so that
#: it needn't be seen to hang.
PATIENCE = 120
#: The share of a core below which a process counts as waiting, and of the time above which it waits for a core.
WAITS, WANTS = 0.05, 0.5
#: What is launched as soon as what it follows has gone well; the first three have one process.
AFTER = {"prepare": (), "measure": ("prepare",), "export": ("resume",), "train": ("prepare",), "resume": ("train",),
         "fail": ("measure", "train")}
ALONE = ("prepare", "measure", "export")
#: The stages of ``export``.
EXPORTS = ("export", "model.pt2 on the card")
#: The last lines of its log that tell why a process crashed.
LAST_LINES = 3

Line = dict[str, Any]


def rehearse(words: Sequence[str], count: int, card: Card) -> list[Line]:
    """Rehearse the run that these words of a command line describe; returns all that its processes wrote down.

    count : the number of cards
    """
    nullcard.build()
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # so that what has been started is ended, too
        signal.signal(signal.SIGTERM, lambda *given: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="sbkit-rehearsal-") as made:
        folder = Path(made)
        job = {"folder": made, "world": min(count, RANKS), "words": [*words, "--device", "cuda"]}
        (folder / "job.json").write_text(json.dumps(job))
        path = os.pathsep.join(filter(None, [str(Path(sbkit.__file__).parent.parent), os.environ.get("PYTHONPATH")]))
        environment = nullcard.environment(
            card, count, base={**os.environ, "PYTHONPATH": path}, patience=PATIENCE) | {
            "TORCH_FR_BUFFER_SIZE": "20000", "TMPDIR": made, "OMP_NUM_THREADS": "1"}
        with open(folder / "server.log", "w") as log:
            process = subprocess.Popen([sys.executable, "-m", "sbkit.rehearsal.run", made], env=environment,
                                       stdout=log, stderr=log)
            try:
                process.wait()
            finally:
                process.kill()
                for file in folder.glob("*.group"):
                    _end(int(file.read_text()))
        if not (folder / "found.json").exists():
            raise SbkitError(f"the rehearsal ended early:\n{(folder / 'server.log').read_text()[-3000:]}", exit_code=1)
        return json.loads((folder / "found.json").read_text().replace(made, "the rehearsal's folder"))  # it goes


def main(folder: str) -> None:
    """Launch the processes of a rehearsal from one that has imported what they need."""
    _import_all()
    job = json.loads(Path(folder, "job.json").read_text()) | {"figures": {}, "estimate": {}}
    found, waiting, running, well = list[Line](), dict(AFTER), dict[str, Launch](), set[str]()
    while waiting or running:
        for name in [name for name, after in waiting.items() if well.issuperset(after)]:
            del waiting[name]
            if name == "export" and not job["figures"]["exports"]:
                found += [{"launch": name, "stage": stage, "skip": "the task exports nothing"} for stage in EXPORTS]
            else:
                running[name] = Launch(name, job)
        time.sleep(0.05)
        for name, launch in list(running.items()):
            if not launch.is_over():
                continue
            lines = launch.close()
            del running[name]
            found += lines
            for line in lines:
                job["figures"] |= line.get("figures", {})
                job["words"] = line.get("words", job["words"])
                if "report" in line:
                    job["estimate"] = line["report"]["sections"].get("cost", {}).get("values", {})
            if launch.went_well(lines):
                well.add(name)
        if not running and not any(well.issuperset(after) for after in waiting.values()):
            break
    Path(folder, "found.json").write_text(json.dumps(found))


def _import_all() -> None:
    """Import what the processes need."""
    with nullcard.without_driver():
        import torch._dynamo
        import torch._refs  # noqa: F401 (of stand-ins)

        import sbkit.export.bundle
        import sbkit.runs.training
        import sbkit.train.memory.trials  # noqa: F401
        from sbkit.rehearsal import no_values
    no_values.install()


class Launch:
    """Processes that work together: one, or the ranks of a run.

    name : what they do, a key of ``rank.LAUNCHES``
    job : what all launches know
    """

    def __init__(self, name: str, job: Line):
        from sbkit.rehearsal.rank import live

        self.name, self.folder, self.started = name, Path(job["folder"]), time.monotonic()
        self.world = 1 if name in ALONE else job["world"]
        self.hangs, self._last = False, (self.started, 0, 0.0, 0.0)
        port, self.processes = free_port(), list[BaseProcess]()
        for rank in range(self.world):
            place = torchrun_environment(rank, self.world, port) if self.world > 1 else {}
            process = multiprocessing.get_context("fork").Process(target=_enter, args=(live, place, name, rank, job))
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
        """Whether all processes have ended, are to be killed, or hang."""
        alive = [process.is_alive() for process in self.processes]
        if not any(alive):
            return True
        lines = [line for rank in range(self.world) for line in self._lines(rank)]
        ready = sum("ready" in line for line in lines)
        if self.name == "train" and ready == self.world:
            return True
        now, (then, count, computed_then, wanted_then) = time.monotonic(), self._last
        if now - then < 1:
            return False
        computed, waited = map(sum, zip(*(session_seconds(each.pid or 0) for each in self.processes), strict=True))
        wanted = computed + waited  # less than then if threads have ended
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # whoever computes gets no more than such a share
        if len(lines) > count or computed - computed_then > (WAITS * (now - then) + 0.5) / busy \
                or abs(wanted - wanted_then) > WANTS * (now - then) + 0.5:
            self._last = now, len(lines), computed, wanted
        self.hangs = now - then > busy * (IDLE if all(alive) and not ready else END)
        return self.hangs

    def close(self) -> list[Line]:
        """End what still runs; returns what all have written, and what a comparison of them shows."""
        from sbkit.rehearsal.rank import STANDS

        if self.hangs:
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid or 0, STANDS)
            time.sleep(2)  # they also write down their collectives each second
        ended, codes = time.monotonic(), [process.exitcode for process in self.processes]
        for rank, process in enumerate(self.processes):
            _end(process.pid or 0)
            process.join()
            self._file(rank, "group").unlink()
        found = [{"launch": self.name, "rank": rank, **line}
                 for rank in range(self.world) for line in self._lines(rank)]
        silent = {rank: code for rank, code in enumerate(codes) if code is not None
                  and not any(line["rank"] == rank and "end" in line for line in found)}
        failed = any(line.get("end") for line in found) or min(silent.values(), default=0) < 0
        # One that leaves with a code after another has failed does as it should.
        found += [self._crash(rank, code) for rank, code in silent.items() if code < 0 or not failed]
        found += self._compared(found) if self.name != "fail" else []
        found += self._where_it_stood(found) if self.hangs else []
        return [*found, {"launch": self.name, "rank": 0, "ended": ended}]

    def went_well(self, lines: Sequence[Line]) -> bool:
        """Whether what follows this launch can be launched."""
        if self.hangs or any(map(_ends, lines)):
            return False
        done = [line for line in lines if ("ready" in line if self.name == "train" else line.get("end") == 0)]
        return len(done) == self.world

    def _crash(self, rank: int, code: int) -> Line:
        """The finding that a process ended without a word, with the last ones of its log."""
        lines = self._lines(rank)
        how = ended_by(-code) if code < 0 else f"exit code {code}"
        stage = next((line["stage"] for line in reversed(lines) if "stage" in line), "start")
        log = self._file(rank, "log")
        last = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:] if log.exists() else []
        found = self._finding("crash", self._place(rank) or ("", 0), f"rank {rank} ended with {how} in stage '{stage}'",
                              f"the last lines of its log: {' | '.join(last)}", stage)
        return found | {"rank": rank, "at": lines[-1]["at"] if lines else self.started}

    def _compared(self, found: Sequence[Line]) -> list[Line]:
        """What is known of the collectives: how many there are, or the first one that isn't the same on all ranks."""
        files = [self._file(rank, "collectives") for rank in range(self.world)]
        if self.world == 1 or not all(file.exists() for file in files):
            return []
        calls = [json.loads(file.read_text()) for file in files]
        for number in range(max(map(len, calls))):
            here = [each[number] if number < len(each) else None for each in calls]
            if any((each and each[:2]) != (here[0] and here[0][:2]) for each in here):
                if None in here and any(map(_ends, found)):  # ranks ended early for another reason
                    return []
                said = [f"rank {rank} calls " + (f"{each[0]} of {each[1]}" if each else "none")
                        + (f" at {each[2]}:{each[3]}" if each and each[2] else "") for rank, each in enumerate(here)]
                place = next((each[2:] for each in here if each and each[2]), ["", 0])
                differs = self._finding("collectives", place, f"collective {number + 1} of the run differs: "
                                        f"{' and '.join(said)}", "all ranks must call the same ones in the same order")
                return [differs | {"at": self.started}]  # the cause of all else that ranks say
        return [{"launch": self.name, "rank": 0, "collectives": len(calls[0])}]

    def _place(self, rank: int) -> tuple[str, int] | None:
        """The line at which a rank stands or crashed."""
        from sbkit.rehearsal.watch import own_place

        file = self._file(rank, "stack")
        frames = re.findall(r'File "(.*)", line (\d+)', file.read_text()) if file.exists() else []
        return own_place([(name, int(line)) for name, line in frames]) if frames else None

    def _where_it_stood(self, found: Sequence[Line]) -> list[Line]:
        """The finding that nothing got further, with the line at which each rank stands."""
        places = [self._place(rank) for rank in range(self.world)]
        where = [f"rank {rank} " + (f"is at {place[0]}:{place[1]}" if place else "has ended")
                 for rank, place in enumerate(places)]
        stage = next((line["stage"] for line in reversed(found) if "stage" in line), self.name)
        return [self._finding("hang", next(filter(None, places), ("", 0)), f"the run hangs: {', '.join(where)}",
                              "does each rank reach this line, and do all call the same collectives?", stage)]

    def _finding(self, code: str, place: Sequence[Any], message: str, suggestion: str, stage: str = "steps") -> Line:
        return {"launch": self.name, "rank": 0, "finding": {
            "severity": "error", "code": code, "file": place[0], "line": place[1], "key": "", "message": message,
            "suggestion": suggestion, "stage": stage, "ends": True}}


def _ends(line: Line) -> bool:
    """Whether a line is a finding that ended its launch."""
    return line.get("finding", {}).get("ends", False)


def _enter(live: Callable[..., None], place: dict[str, str], launch: str, rank: int, job: Line) -> None:
    os.setsid()
    os.environ.update(place)
    live(launch, rank, job)


def _end(group: int) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
