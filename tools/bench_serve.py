#!/usr/bin/env python3
"""Throughput and latency of `sbkit serve` by the number of clients, with and without batching, in the same run.

    python tools/bench_serve.py                                      makes a small model and clips of noise first
    python tools/bench_serve.py BUNDLE --clips manifests/test.csv    a bundle of yours, and recordings of yours
    python tools/bench_serve.py --concurrency 1,4,16,64 --requests 128 --json bench.json

Two servers, one with --no-batching, take turns at each number of clients. Each client sends the next clip as soon as it
has the answer to the last. First every clip is sent alone; under load, an answer that differs from that one, or does
not come, is counted as lost. Latencies are of whole requests, with upload and decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soundfile

from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.vocabulary import write_tokens
from sbkit.system.console import table
from sbkit.system.cores import usable_cores

RATE, FRAME = 16_000, 640
LETTERS = ["<blk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
MODES = {"batched": [], "alone": ["--no-batching"]}


def make_bundle(folder: Path, width: int, layers: int) -> Path:
    """Make a model with random weights, as large as a small encoder: feed-forward layers over frames of 40 ms."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    values = {"frame": np.array([0, -1, FRAME], dtype=np.int64), "whole": np.array([FRAME], dtype=np.int64),
              "pads": np.array([0, 0, 0, FRAME - 1], dtype=np.int64), "zero": np.array([0], dtype=np.int64),
              "one": np.array([1], dtype=np.int64)}
    nodes = [  # pad to whole frames, and cut into them
        helper.make_node("Pad", ["signals", "pads"], ["padded"]),
        helper.make_node("Shape", ["padded"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["long"]),
        helper.make_node("Div", ["long", "whole"], ["count"]),
        helper.make_node("Mul", ["count", "whole"], ["end"]),
        helper.make_node("Slice", ["padded", "zero", "end", "one"], ["fitting"]),
        helper.make_node("Reshape", ["fitting", "frame"], ["x0"]),
        helper.make_node("Add", ["lengths", "lengths_up"], ["up"]),
        helper.make_node("Div", ["up", "whole"], ["frames"]),
    ]
    values["lengths_up"] = np.array([FRAME - 1], dtype=np.int64)

    def dense(name: str, rows: int, columns: int) -> str:
        values[name] = (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        return name

    nodes.append(helper.make_node("MatMul", ["x0", dense("in", FRAME, width)], ["y0"]))
    for i in range(layers):
        nodes += [helper.make_node("MatMul", [f"y{i}", dense(f"a{i}", width, 4 * width)], [f"h{i}"]),
                  helper.make_node("Relu", [f"h{i}"], [f"r{i}"]),
                  helper.make_node("MatMul", [f"r{i}", dense(f"b{i}", 4 * width, width)], [f"o{i}"]),
                  helper.make_node("Add", [f"y{i}", f"o{i}"], [f"y{i + 1}"])]
    nodes += [helper.make_node("MatMul", [f"y{layers}", dense("out", width, len(LETTERS))], ["scores"]),
              helper.make_node("LogSoftmax", ["scores"], ["log_probs"], axis=-1)]
    graph = helper.make_graph(
        nodes, "bench",
        [helper.make_tensor_value_info("signals", TensorProto.FLOAT, ["b", "s"]),
         helper.make_tensor_value_info("lengths", TensorProto.INT64, ["b"])],
        [helper.make_tensor_value_info("log_probs", TensorProto.FLOAT, ["b", "t", len(LETTERS)]),
         helper.make_tensor_value_info("frames", TensorProto.INT64, ["b"])],
        [numpy_helper.from_array(value, name) for name, value in values.items()])
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
              folder / "model.onnx")
    write_tokens(folder / layout.TOKENS, LETTERS, 0)
    config = Config(sample_rate=RATE, hop_samples=160, subsampling=4, vocabulary=len(LETTERS), language="en",
                    models={"onnx": "model.onnx"})
    config.files = {"model.onnx": layout.fingerprint(folder / "model.onnx")}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder


def make_clips(count: int) -> list[tuple[bytes, float]]:
    """Make clips of noise, of one to twelve seconds, as FLAC; returns each with its seconds."""
    rng = np.random.default_rng(1)
    clips = []
    for seconds in rng.uniform(1, 12, count):
        file = io.BytesIO()
        noise = 0.1 * rng.standard_normal(int(seconds * RATE)).astype(np.float32)
        soundfile.write(file, noise, RATE, format="FLAC", subtype="PCM_16")
        clips.append((file.getvalue(), float(seconds)))
    return clips


def read_clips(names: list[str], count: int) -> list[tuple[bytes, float]]:
    """Read whole recordings from files, folders and manifests; returns each with its seconds."""
    from sbkit.data.audio import audio_info, read_bytes
    from sbkit.infer.inputs import collect

    files = [str(each.audio) for each in collect(names)[:count]]
    return [(read_bytes(file), audio_info(file)[0]) for file in files]


class Server:
    """A process that runs `sbkit serve`."""

    def __init__(self, bundle: Path, mode: str, args: argparse.Namespace):
        words = [f"bench={bundle}", "--port", "0", "--max-requests", "4096", "--max-active", str(args.active),
                 "--device", args.device, *MODES[mode]]
        if args.threads:
            words += ["--threads", str(args.threads)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen([sys.executable, "-m", "sbkit", "serve", *words], stderr=self.log)
        self.url = self.running = ""
        while not self.url:
            if self.process.poll() is not None:
                raise SystemExit(self._said())
            for line in self._said().splitlines():
                if line.startswith("ready on "):
                    self.url = line.split()[-1]
                elif line.startswith("bench: "):
                    self.running = line.removeprefix("bench: ")
            time.sleep(0.1)

    def _said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


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
    heard = 0.0

    def one(client: httpx.Client) -> None:
        nonlocal lost, heard
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
                heard += clips[turn][1]

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
            "requests_per_second": len(latencies) / seconds, "audio_per_second": heard / seconds,
            "p50": p50, "p95": p95, "p99": p99}


def rows_per_batch(url: str) -> tuple[float, float]:
    """Return the number of requests in all batches so far, and that of batches."""
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in httpx.get(f"{url}/metrics").text.splitlines()
             if line.startswith(("sbkit_batch_rows_sum", "sbkit_batch_rows_count"))}
    return found["sbkit_batch_rows_sum"], found["sbkit_batch_rows_count"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=Path, help="default: a model with random weights")
    parser.add_argument("--clips", nargs="+", metavar="FILES", help="recordings, folders, a manifest (default: noise)")
    parser.add_argument("--count", type=int, default=32, help="different clips (32)")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32", help="clients at once")
    parser.add_argument("--requests", type=int, default=128, help="requests for each row of the table (128)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the one with the median throughput is shown (3)")
    parser.add_argument("--active", type=int, default=64, help="requests that a server works on at once (64)")
    parser.add_argument("--width", type=int, default=144, help="width of the model with random weights")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="threads of the model (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        bundle = args.bundle or make_bundle(Path(home) / "bench", args.width, args.layers)
        clips = read_clips(args.clips, args.count) if args.clips else make_clips(args.count)
        servers = {}
        for mode in MODES:
            servers[mode] = Server(bundle, mode, args)
            stack.callback(servers[mode].close)
        print(f"{servers['batched'].running}; {usable_cores()} cores; {len(clips)} clips of "
              f"{np.mean([seconds for _, seconds in clips]):.1f} s on average", file=sys.stderr)
        with httpx.Client(timeout=600) as client:
            expected = {mode: [ask(client, each.url, clip) for clip, _ in clips] for mode, each in servers.items()}
        if expected["batched"] != expected["alone"] or None in expected["alone"]:
            raise SystemExit("the two servers give different texts for clips that are sent alone")
        found = []
        for clients in map(int, args.concurrency.split(",")):
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
