"""Throughput and latency of `sbkit serve` by the number of clients, with and without batching, in the same run.

    python -m tools.bench.serve                                      makes a small model and clips of noise first
    python -m tools.bench.serve BUNDLE --clips manifests/test.csv    your own bundle and recordings
    python -m tools.bench.serve --concurrency 1,4,16,64 --requests 128 --json bench.json
    python -m tools.bench.serve --live                               live sessions, of a model of hparams/streaming.yaml

Two servers, one with --no-batching, alternate at each number of clients. Each client sends the next clip as soon as it
has the answer to the last. First every clip is sent alone; under load, an answer that is missing or differs from that
one is counted as lost. Latencies are of whole requests, with upload and decoding.

With --live, sessions send speech in real time, in packets of 20 ms and starting at different times, from separate
processes, first to a server with the bundle's streaming graph and then to one without it, which decodes the tail of the
audio again and again. The delay of a partial is the time from the end of its audio to its arrival. A session without
its last transcript is lost. "server" and "clients" are the cores that they use while all sessions send; "others" are
the cores that all other processes use, for which no figure here is corrected.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sbkit.system.console import table
from sbkit.system.cores import usable_cores
from tools.bench.serving import live, models
from tools.bench.serving.clips import make_clips, read_clips
from tools.bench.serving.server import Server

MODES = {"batched": [], "alone": ["--no-batching"]}


def ask(client: httpx.Client, url: str, clip: bytes) -> str | None:
    """Send a clip; returns its text, or None without an answer."""
    answer = client.post(f"{url}/v1/audio/transcriptions", data={"model": "bench"}, files={"file": ("clip", clip)})
    return answer.json()["text"] if answer.status_code == 200 else None


def load(url: str, clips: list[tuple[bytes, float]], expected: Sequence[str | None], clients: int,
         requests: int) -> dict[str, Any]:
    """Measure this number of requests, sent by this number of clients at once."""
    turns, lock = iter(itertools.islice(itertools.cycle(range(len(clips))), requests)), threading.Lock()
    latencies: list[float] = []
    lost = 0
    audio_seconds = 0.0

    def one(client: httpx.Client) -> None:
        nonlocal lost, audio_seconds
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            began = time.perf_counter()
            try:
                text = ask(client, url, clips[turn][0])
            except httpx.HTTPError:
                text = None
            took = time.perf_counter() - began
            with lock:
                latencies.append(took)
                lost += text != expected[turn]
                audio_seconds += clips[turn][1]

    with contextlib.ExitStack() as stack:  # made before the clock starts, without certificates, which take time to read
        asking = [stack.enter_context(httpx.Client(timeout=600, verify=False)) for _ in range(clients)]
        threads = [threading.Thread(target=one, args=(each,)) for each in asking]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    p50, p95, p99 = np.percentile(latencies, (50, 95, 99))
    return {"clients": clients, "requests": len(latencies), "lost": lost, "seconds": seconds,
            "requests_per_second": len(latencies) / seconds, "audio_per_second": audio_seconds / seconds,
            "p50": p50, "p95": p95, "p99": p99}


def rows_per_batch(url: str) -> tuple[float, float]:
    """Return the number of requests in all batches so far, and that of batches."""
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in httpx.get(f"{url}/metrics").text.splitlines()
             if line.startswith(("sbkit_batch_rows_sum", "sbkit_batch_rows_count"))}
    return found["sbkit_batch_rows_sum"], found["sbkit_batch_rows_count"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help="default: a model with random weights")
    parser.add_argument("--clips", nargs="+", metavar="FILES", help="recordings, folders, a manifest (default: noise)")
    parser.add_argument("--count", type=int, default=32, help="number of different clips (32)")
    parser.add_argument("--concurrency", help="simultaneous clients (1,2,4,8,16,32; live: 10,100)")
    parser.add_argument("--requests", type=int, default=128, help="requests for each row of the table (128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the one of median throughput is shown (3)")
    parser.add_argument("--active", type=int, default=64, help="requests that a server works on at once (64)")
    parser.add_argument("--width", type=int, default=144, help="width of the model with random weights")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--model", default="auto", help="the bundle's format: onnx, int8, torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="threads of the model (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    spoken = parser.add_argument_group("with --live")
    spoken.add_argument("--live", action="store_true", help="measure live sessions")
    spoken.add_argument("--modes", default=",".join(live.MODES), help="stream, tail or both, in this order")
    spoken.add_argument("--seconds", type=float, default=30.0, help="speech in each session (30)")
    spoken.add_argument("--chunk-ms", type=int, help="the chunk that sessions ask for (default: the server's own)")
    spoken.add_argument("--packet-ms", type=float, default=20.0, help="audio in one frame of a client (20)")
    spoken.add_argument("--processes", type=int, default=1, help="processes of clients (1)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    options = ["--model", args.model, "--device", args.device]
    if args.threads:
        options += ["--threads", str(args.threads)]
    if args.live:
        return live.bench(live.Live(
            args.bundle, args.clips, [*map(int, (args.concurrency or "10,100").split(","))], args.seconds,
            args.packet_ms, args.chunk_ms, options, args.processes, tuple(args.modes.split(","))), args.json)
    return recordings(args, [*options, "--max-requests", "4096", "--max-active", str(args.active)])


def recordings(args: argparse.Namespace, options: list[str]) -> int:
    """Measure requests with whole recordings."""
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        bundle = args.bundle or models.feed_forward(Path(home) / "bench", args.width, args.layers)
        clips = read_clips(args.clips, args.count) if args.clips else make_clips(args.count)
        servers = {}
        for mode, more in MODES.items():
            servers[mode] = Server(bundle, [*options, *more])
            stack.callback(servers[mode].close)
        print(f"{servers['batched'].running}; {usable_cores()} cores; {len(clips)} clips of "
              f"{np.mean([seconds for _, seconds in clips]):.1f} s on average", file=sys.stderr)
        with httpx.Client(timeout=600) as client:
            expected = {mode: [ask(client, each.url, clip) for clip, _ in clips] for mode, each in servers.items()}
        if expected["batched"] != expected["alone"] or None in expected["alone"]:
            raise SystemExit("the two servers return different texts for clips that are sent alone")
        found = []
        for clients in map(int, (args.concurrency or "1,2,4,8,16,32").split(",")):
            rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
            for turn in range(args.rounds):
                for mode in (list(MODES), list(MODES)[::-1])[turn % 2]:
                    before = rows_per_batch(servers[mode].url)
                    row = load(servers[mode].url, clips, expected[mode], clients, args.requests)
                    after = rows_per_batch(servers[mode].url)
                    row |= {"mode": mode, "rows_per_batch": (after[0] - before[0]) / (after[1] - before[1])}
                    rounds[mode].append(row)
            for mode in MODES:
                middle = sorted(rounds[mode], key=lambda row: row["seconds"])[args.rounds // 2]
                found.append(middle | {"lost": sum(row["lost"] for row in rounds[mode])})
        running = servers["batched"].running
    print(table(
        ["clients", "mode", "requests/s", "audio s/s", "p50 ms", "p95 ms", "p99 ms", "rows/batch", "lost"],
        [[row["clients"], row["mode"], row["requests_per_second"], row["audio_per_second"], 1000 * row["p50"],
          1000 * row["p95"], 1000 * row["p99"], row["rows_per_batch"], row["lost"]] for row in found]))
    lost = sum(row["lost"] for row in found)
    print(f"{lost} lost of {len(found) * args.rounds * args.requests} requests")
    if args.json:
        args.json.write_text(json.dumps({"model": running, "cores": usable_cores(), "machine": platform.platform(),
                                         "rows": found}, indent=1) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
