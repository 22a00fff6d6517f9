"""Makes the README's pictures from real runs: terminals as SVG, a page as PNG, photographed by a headless Chromium.

    python -m tools.pictures RUN [--to docs/pictures] [--only check,rehearsal,report,live]

RUN is a run of hparams/ctc.yaml with its bundle, as `make demo` leaves it.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import soundfile

from sbkit.data.audio import read_utterance
from sbkit.data.manifest import Manifest
from tools.chromium import WAIT, Browser

#: Three mistakes, one of which no reader of YAML sees: the width isn't a multiple of the heads.
BROKEN = """\
recipe: !include:ctc.yaml
    d_model: 250
    lr: !ref <learning_rate>
    spec_augment: {time_mask: 4}
"""
COLUMNS, ROWS = 104, 33


def terminal(command: str, folder: Path) -> str:
    """Run a command of sbkit in a folder, and draw it and the beginning of what it says as an SVG."""
    words = [sys.executable, "-m", "sbkit", *command.split()[1:]]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    # A picture shows what a command found, not how it waited.
    said = [piece for line in done.stdout.strip().splitlines() if not line.startswith("rehearsing for ")
            for piece in textwrap.wrap(line, COLUMNS, subsequent_indent="    ", drop_whitespace=False) or [""]]
    lines = [f"$ {command}", *said[:ROWS], *(["..."] if len(said) > ROWS else [])]
    drawn = []
    for number, line in enumerate(lines, 1):
        colour = "#8ec07c" if line.startswith("$") else "#fb7a68" if " error: " in line else "#e8e6e3"
        text = html.escape(line, quote=False)
        drawn.append(f'<text x="14" y="{10 + 18 * number}" fill="{colour}" xml:space="preserve">{text}</text>')
    width, height = 28 + round(7.9 * COLUMNS), 26 + 18 * len(lines)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="13" '
            f'font-family="Menlo, Consolas, DejaVu Sans Mono, monospace">\n'
            f'<rect width="100%" height="100%" rx="8" fill="#23272e"/>\n' + "\n".join(drawn) + "\n</svg>\n")


def live_page(run: Path, to: Path, home: Path) -> None:
    """Photograph the server's page while a pretended microphone hears two test clips of a run, one after the other."""
    test = Manifest.read(run / "manifests" / "test.csv")
    pause, parts = np.zeros(48_000, np.float32), []
    for row in map(test.row, range(2)):
        parts += [pause, read_utterance(row.wav, row.start, row.duration, sample_rate=48_000), pause]
    soundfile.write(home / "said.wav", np.concatenate(parts), 48_000, subtype="PCM_16")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "sbkit", "serve", str(run / "bundle"), "--port", str(port)]
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
             f"--use-file-for-fake-audio-capture={home / 'said.wav'}%noloop")
    server = subprocess.Popen(words)
    try:
        with Browser(home / "hearing", flags=flags) as browser:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            browser.open(f"http://127.0.0.1:{port}/", width=900, height=560)
            browser.run(WAIT % "!document.getElementById('speak').disabled")
            browser.run("document.getElementById('speak').click()")
            # The first clip is settled, and of the second there are words that may still change.
            browser.run(WAIT % "document.querySelector('#words .soft')?.innerText.trim().split(' ').length > 2 && "
                        "document.getElementById('words').innerText.trim().includes('\\n')")
            browser.picture(to, whole=False)
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--only", default="check,rehearsal,report,live")
    args = parser.parse_args()
    wanted = args.only.split(",")
    args.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        subprocess.run([sys.executable, "-m", "sbkit", "new", f"{home}/mine"], check=True, stdout=subprocess.DEVNULL)
        mine = Path(home, "mine")
        (mine / "hparams" / "mine.yaml").write_text(BROKEN)
        for name, command in (("check", "sbkit check hparams/mine.yaml"),
                              ("rehearsal", "sbkit check hparams/ctc.yaml --as 2xH100")):
            if name in wanted:
                (args.to / f"{name}.svg").write_text(terminal(command, mine))
        if "report" in wanted:
            with Browser(Path(home, "reading")) as browser:
                browser.open((args.run / "report.html").resolve().as_uri(), width=1000, height=1000)
                browser.picture(args.to / "report.png", whole=False)
        if "live" in wanted:
            live_page(args.run, args.to / "live.png", Path(home))
    return 0


if __name__ == "__main__":
    sys.exit(main())
