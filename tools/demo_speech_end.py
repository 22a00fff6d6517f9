"""The end of ``make demo-speech``: a server speaks texts that are not in training, and transcribes its speech.

    python tools/demo_speech_end.py VOICE_RUN VOICE_BUNDLE RECOGNISER_BUNDLE
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from sbkit.data.manifest import Manifest
from sbkit.score.rates import ErrorRates
from sbkit.score.significance import interval
from sbkit.system.console import progress, table
from sbkit.system.processes import free_port

#: Texts that are spoken, and those of them that are shown.
TEXTS, SHOWN = 60, 8
_START_SECONDS = 120.0
_BOUNDARY = "a-boundary-that-no-sound-has-in-it"


class RoundTrip(NamedTuple):
    """A text, the transcript of its speech, and the seconds to the first and to the last byte of audio."""

    text: str
    transcript: str
    first: float
    whole: float
    seconds: float


def main(run: Path, voice: Path, recogniser: Path) -> float:
    """Serve both bundles, send texts of the run's test split round, print the transcripts; returns the WER."""
    texts = list(Manifest.read(run / "manifests" / "test.csv").texts)[:TEXTS]
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "sbkit", "serve", f"voice={voice}", f"recogniser={recogniser}",
                               "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        at = f"http://127.0.0.1:{port}/v1/audio"
        _wait(f"http://127.0.0.1:{port}/ready", server)
        found = [_round(at, text) for text in progress(texts, what="speaking and transcribing", total=len(texts),
                                                       unit="text")]
    finally:
        server.terminate()
        server.wait()
    rates = ErrorRates("word")
    rates.add([str(i) for i in range(len(found))], [each.text for each in found],
              [each.transcript for each in found])
    _show(found, rates, run)
    return rates.rate


def _show(found: list[RoundTrip], rates: ErrorRates, run: Path) -> None:
    print(f"\n{table(['text', 'transcript'], [[each.text, each.transcript] for each in found[:SHOWN]])}\n")
    low, high = interval(rates)
    seconds = sum(each.seconds for each in found)
    first = sorted(each.first for each in found)
    print(f"WER {rates.rate:.1f} % (95 % interval {low:.1f} to {high:.1f}) of {len(found)} texts that are not in "
          f"training; {seconds:.0f} s of speech, real-time factor {sum(each.whole for each in found) / seconds:.3f}, "
          f"first audio after {1000 * first[len(first) // 2]:.0f} ms (median)")
    print(f"\nTexts, transcripts and players: {run / 'report.html'}")


def _round(at: str, text: str) -> RoundTrip:
    """Send a text to the voice, and the audio to the recogniser."""
    began = time.perf_counter()
    asked = json.dumps({"model": "voice", "input": text, "response_format": "wav"}).encode()
    request = urllib.request.Request(f"{at}/speech", asked, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        sound = answer.read(1)
        first = time.perf_counter() - began
        sound += answer.read()
    whole = time.perf_counter() - began
    fields = {"model": "recogniser", "response_format": "verbose_json"}
    parts = [f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
             for name, value in fields.items()]
    file = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="said.wav"\r\n\r\n'
    body = "".join(parts).encode() + file.encode() + sound + f"\r\n--{_BOUNDARY}--\r\n".encode()
    request = urllib.request.Request(f"{at}/transcriptions", body,
                                     {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"})
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    return RoundTrip(text, found["text"], first, whole, float(found["duration"]))


def _wait(ready: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server has loaded both bundles."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}; its output is above")
        try:
            with urllib.request.urlopen(ready):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready after {_START_SECONDS:g} s")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
