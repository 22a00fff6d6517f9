"""Makes the README's pictures from real runs: terminals as SVG, a page as PNG, photographed by a headless Chromium.

    python -m tools.pictures RUN [--to docs/pictures] [--only check,rehearsal,report]

RUN is a run of hparams/ctc.yaml, as `make demo` leaves it.
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

#: Three mistakes, one of which no reader of YAML sees: the width isn't a multiple of the heads.
BROKEN = """\
recipe: !include:ctc.yaml
    d_model: 250
    lr: !ref <learning_rate>
    spec_augment: {time_mask: 4}
"""
COLUMNS, ROWS = 104, 30


def terminal(command: str, folder: Path) -> str:
    """Run a command of sbkit in a folder, and draw it and the beginning of what it says as an SVG."""
    words = [sys.executable, "-m", "sbkit", *command.split()[1:]]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    said = [piece for line in done.stdout.strip().splitlines()
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


def photograph(address: str, to: Path, size: str) -> None:
    """Photograph a page with a headless Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("there is no chromium here: apt-get install chromium, or --only check,rehearsal")
    rights = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([browser, "--headless", *rights, "--hide-scrollbars", f"--user-data-dir={profile}",
                        f"--window-size={size}", "--virtual-time-budget=3000", f"--screenshot={to.resolve()}", address],
                       check=True, stderr=subprocess.DEVNULL, timeout=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--only", default="check,rehearsal,report")
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
        photograph((args.run / "report.html").resolve().as_uri(), args.to / "report.png", "1000,1000")
    return 0


if __name__ == "__main__":
    sys.exit(main())
