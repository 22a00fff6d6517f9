"""Delay of live sessions: many clients in real time, with the streaming graph and by decoding the tail again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.system.console import table
from sbkit.system.cores import usable_cores
from tools.bench.serving import models
from tools.bench.serving.clips import speech
from tools.bench.serving.server import NAME, Server, machine_seconds

SPEAKERS = Path(__file__).with_name("speakers.py")
MODES = ("stream", "tail")
_AUDIO_SECONDS = 300.0


@dataclass(frozen=True)
class Live:
    """What is measured.

    bundle : a bundle that has a streaming graph; None: one with random weights
    clips : recordings to say; None: something about as lively as speech
    sessions : numbers of sessions at once, one row of the table for each
    seconds : what each session says
    packet_ms, chunk_ms : as in ``speakers.Plan``
    options : further options of ``sbkit serve``
    processes : of clients
    modes : those of ``MODES`` to measure
    """

    bundle: Path | None
    clips: list[str] | None
    sessions: list[int]
    seconds: float
    packet_ms: float
    chunk_ms: int | None
    options: list[str]
    processes: int
    modes: tuple[str, ...] = MODES


def bench(live: Live, to: Path | None = None) -> int:
    """Measure, print a table and return the exit code: 1 if the streaming graph lost a session."""
    rows = []
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        audio = Path(home) / "audio.raw"
        audio.write_bytes(speech(live.clips, _AUDIO_SECONDS).astype("<i2").tobytes())
        bundle = live.bundle or models.streaming(Path(home) / "stream")
        bundles = {"stream": bundle, "tail": models.without_streams(bundle, Path(home) / "tail")}
        options = [*live.options, "--max-live", str(2 * max(live.sessions))]
        servers = {}
        for mode in live.modes:
            servers[mode] = Server(bundles[mode], options)
            stack.callback(servers[mode].close)
        running = servers[live.modes[0]].running
        print(f"{running}; {usable_cores()} cores, load {os.getloadavg()[0]:.1f} before", file=sys.stderr)
        for sessions in live.sessions:
            for mode in live.modes:
                rows.append({"mode": mode, **_measured(servers[mode], live, sessions, audio)})
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    print(table(["sessions", "mode", "p50 ms", "p95 ms", "partials/s", "lost", "server", "clients", "others"],
                [[row["sessions"], row["mode"], 1000 * row["p50"], 1000 * row["p95"], row["partials_per_second"],
                  row["lost"], row["server_cores"], row["client_cores"], row["other_cores"]] for row in rows]))
    if to is not None:
        to.write_text(json.dumps({"model": running, "cores": usable_cores(), "rows": rows}, indent=1) + "\n")
    return 1 if any(row["lost"] for row in rows if row["mode"] == "stream") else 0


def _line(row: dict[str, Any]) -> str:
    return (f"{row['sessions']} sessions, {row['mode']}: clients late by {1000 * row['late']:.1f} ms at the 95th "
            f"percentile; {row['finals']} lines; lost: {row['why'] or 'none'}")


def _measured(server: Server, live: Live, sessions: int, audio: Path) -> dict[str, Any]:
    """Run the clients, and compute what they saw and what it cost."""
    host, port = server.address
    began, own, everything = time.perf_counter(), server.cpu_seconds(), machine_seconds()
    processes = [
        subprocess.Popen([sys.executable, SPEAKERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(live.processes)]
    for i, process in enumerate(processes):
        plan = {"host": host, "port": port, "model": NAME, "audio": str(audio), "rate": models.RATE,
                "sessions": len(range(i, sessions, live.processes)), "seconds": live.seconds,
                "packet": round(models.RATE * live.packet_ms / 1000), "chunk_ms": live.chunk_ms,
                "first": i, "step": live.processes, "count": sessions}
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(plan))
        process.stdin.close()
    found = []
    for process in processes:
        assert process.stdout is not None, "it is a pipe"
        output = process.stdout.read()
        if process.wait():
            raise SystemExit(f"the clients failed; the server's output:\n{server.output()}")
        found.append(json.loads(output))
    seconds = time.perf_counter() - began
    own, everything = server.cpu_seconds() - own, machine_seconds() - everything
    return {"sessions": sessions, "seconds": seconds, **_summary(found, live, sessions),
            **_cores(own, sum(each["cpu_seconds"] for each in found), everything, seconds, live.seconds)}


def _summary(found: list[dict[str, Any]], live: Live, sessions: int) -> dict[str, Any]:
    def joined(name: str) -> list[float]:
        return [value for each in found for value in each[name]] or [float("nan")]

    p50, p95, p99 = np.percentile(joined("latencies"), (50, 95, 99))
    lost = [why for each in found for why in each["lost"]]
    return {"p50": p50, "p95": p95, "p99": p99, "gap": float(np.median(joined("gaps"))),
            "late": float(np.percentile(joined("late"), 95)), "lost": len(lost), "why": dict(Counter(lost)),
            "partials_per_second": len(joined("latencies")) / sessions / live.seconds,
            "finals": sum(each["finals"] for each in found)}


def _cores(own: float, clients: float, everything: float, seconds: float, spoken: float) -> dict[str, float]:
    """Compute the cores that server and clients need while all sessions speak, and those that others had."""
    return {"server_cores": own / spoken, "client_cores": clients / spoken,
            "other_cores": max(0.0, everything - own - clients) / seconds}
