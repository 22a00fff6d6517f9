"""Starts sbkit's server, has it compute, and asks which device it did that on: the last step of building an image.

    python docker/try_server.py cpu|cuda

Exits with 1 if the server ends, gives a wrong answer, or computes on another device.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import wave
from pathlib import Path

from onnx import TensorProto, helper, save

from sbkit.export import layout
from sbkit.export.layout import GraphConfig

RATE, PATIENCE = 16000, 300.0
#: Asks the server itself, where the environment names a proxy for the network.
ASK = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def bundle(folder: Path) -> None:
    """Write a bundle whose model gives the mean of each recording's samples."""
    signals = helper.make_tensor_value_info("signals", TensorProto.FLOAT, ["batch", "samples"])
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"])
    level = helper.make_tensor_value_info("level", TensorProto.FLOAT, ["batch", 1])
    nodes = [helper.make_node("ReduceSum", ["signals", "axis"], ["sum"], keepdims=1),
             helper.make_node("Cast", ["lengths"], ["counts"], to=TensorProto.FLOAT),
             helper.make_node("Unsqueeze", ["counts", "axis"], ["divisor"]),
             helper.make_node("Div", ["sum", "divisor"], ["level"])]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "mean", [signals, lengths], [level], [axis])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
    config = GraphConfig(sample_rate=RATE, outputs=["level"], models={layout.ONNX: "model.onnx"})
    config.files["model.onnx"] = layout.fingerprint(folder / "model.onnx")
    (folder / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")


def recording(value: int) -> bytes:
    """A second of one value, as WAV."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(struct.pack("<h", value) * RATE)
    return made.getvalue()


def computes(url: str) -> bool:
    """Whether the server gives the mean of a recording."""
    parts = [b'Content-Disposition: form-data; name="model"\r\n\r\nmodel',
             b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + recording(8192)]
    body = b"".join(b"--part\r\n" + part + b"\r\n" for part in parts) + b"--part--\r\n"
    request = urllib.request.Request(f"{url}/v1/audio/outputs", body,
                                     {"Content-Type": "multipart/form-data; boundary=part"})
    with ASK(request, timeout=PATIENCE) as answer:
        said = json.load(answer)
    print("the mean of a recording of 0.25:", said)
    return "0.25" in json.dumps(said)


def main(device: str) -> int:
    """Try the server; return the exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "model")
        folder.mkdir()
        bundle(folder)
        server = subprocess.Popen([sys.executable, "-m", "sbkit", "serve", str(folder), "--device", device,
                                   "--port", str(port)])
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while True:
                try:
                    with ASK(f"{url}/health", timeout=10) as answer:
                        health = json.load(answer)
                except OSError:
                    health = {"status": "not there"}
                if health["status"] == "ok":
                    break
                if server.poll() is not None or time.monotonic() > until:
                    print("the server doesn't start:", json.dumps(health))
                    return 1
                time.sleep(0.3)
            print("health:", json.dumps(health))
            used = [each["device"] for each in health["models"].values()]
            well = computes(url) and all(each.partition(":")[0] == device for each in used)
            print(f"asked for {device}, computed on {', '.join(used)}: {'well' if well else 'WRONG'}")
            return 0 if well else 1
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
