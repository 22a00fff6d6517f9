"""Commands that are killed at random moments, again and again: the next start goes on to the same result.

Training is killed at chosen places by test_kill_resume.py. ``make tried`` kills each command twenty times.
"""

import json
import os
import random
import signal
import threading
import time

import bundles
import numpy as np
import processes
import pytest
import soundfile
import tried
from processes import ON_A_CPU, ROOT
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from trained_runs import different, outcome, tones

from tools.gpu import corpus

KILLS = int(os.environ.get("SBKIT_KILLS", "2"))
#: In the long run.
LONG = 20
pytestmark = pytest.mark.timeout(400 + 100 * KILLS)  # on a core that others use too
SMALL = ("--no-check --noprogressbar --step_seconds 4 --max_batch_seconds 20 --number_of_epochs 2 "
         "--d_model 16 --nhead 2 --d_ffn 16 --num_encoder_layers 1 --cnn_channels 4 --lr 0.01 --num_workers 0 "
         "--precision fp32 --ckpt_interval_minutes 0 --ckpt_interval_steps 4 --log_interval 0 "
         "--spec_augment null").split()
#: Enough for the labels that are wrong to stand out.
LEARNS = ("--no-check --noprogressbar --step_seconds 10 --min_steps 0 --number_of_epochs 10 --d_model 48 --nhead 2 "
          "--num_encoder_layers 1 --d_ffn 96 --kernel_size 7 --cnn_first_channels 4 --cnn_channels 8 --dropout 0 "
          "--CNN.dropout 0 --schedule.warmup 30 --lr 0.004 --num_workers 0 --precision fp32 --ckpt_interval_minutes 0 "
          "--ckpt_interval_steps 25 --spec_augment null --nonspeech null").split()


def trained(out):
    """What training left; a run that is started again at its end repeats the test."""
    return outcome(out, "valid_WER", kinds=("epoch",))


def label(home):
    """Labels of recordings, in the order in which they are written down, and what was left out."""
    drawn = np.random.default_rng(3)
    bundles.make(home / "bundle")
    lines = []
    for name, count, noise in (("dev", 60, 0.5), ("audio", 300, 0.4)):
        (home / name).mkdir()
        for i in range(count):
            text = " ".join(drawn.choice(["good", "people", "hear", "birds"], 4))
            heard = np.array(bundles.spell(text)) + drawn.normal(0, drawn.uniform(0, noise), len(bundles.spell(text)))
            soundfile.write(home / name / f"{i}.wav", bundles.voiced(list(heard)), bundles.RATE, subtype="FLOAT")
            if name == "dev":
                lines.append(json.dumps({"audio_filepath": f"dev/{i}.wav", "text": text}))
    (home / "dev.jsonl").write_text("\n".join(lines) + "\n")
    words = ["label", "bundle", "audio", "--calibrate", "dev.jsonl", "--batch-seconds", 4, "--to"]
    return words, lambda out: {path: sorted((out / path).read_text().replace(str(out), "OUT").splitlines())
                               for path in ("train.jsonl", "labelling/left_out-train.jsonl")}


def prepare(home):
    """Manifests and tokenizer of a corpus."""
    tones(home / "data", 1000, 40)
    words = ["prepare", ROOT / "hparams" / "ctc.yaml", "--data_folder", "data", "--language", "und", "--output_folder"]
    return words, lambda out: {path.name: path.read_bytes().replace(str(out).encode(), b"OUT")
                               for path in [*out.glob("manifests/*.csv"), *out.rglob("*.model"), *out.rglob("*.vocab")]}


def clean(home):
    """The list of rows whose labels are wrong, of which three were made so."""
    corpus.write(home / "data", {"train": 0.03, "dev": 0.004, "test": 0.004}, longest=2.5, words=12)
    path = home / "data" / "train.csv"
    lines = path.read_text().splitlines()
    for i in (3, 10, 20):
        row, _, text = lines[i].rpartition(",")
        lines[i] = f"{row},{text[::-1]}"
    path.write_text("\n".join(lines) + "\n")
    words = ["clean", ROOT / "hparams" / "ctc.yaml", *LEARNS, "--data_folder", "data", "--output_folder"]
    return words, lambda out: {"suspects": (out / "clean" / "suspects.csv").read_text()} | {
        f"fold {i}": trained(fold) for i, fold in enumerate(sorted(out.glob("clean/*/fold-*")))}


def replay(home):
    """A run that goes on from another one, and trains on the data of both."""
    for name in ("old", "new"):
        tones(home / name, 60, 12)
    for path in (home / "new").glob("*.csv"):
        text = path.read_text()
        for english, other in (("low", "tief"), ("high", "hoch"), ("both", "mu")):
            text = text.replace(f",{english}\n", f",{other}\n")
        path.write_text(text)
    words = ["train", ROOT / "hparams" / "ctc.yaml", *SMALL, "--cnn_first_channels", 4, "--schedule.max_rise_per_step",
             "null", "--schedule.max_lr_at_chance", "null"]
    processes.sbkit(*words, "--data_folder", "old", "--output_folder", "source", "--min_steps", 60, cwd=home)
    return [*words, "--data_folder", "new", "--language", "de", "--init_from", "source", "--replay", 0.3,
            "--min_steps", 60, "--output_folder"], trained


def transducer(home):
    tones(home / "data", 60, 12)
    return ["train", ROOT / "hparams" / "transducer.yaml", *SMALL, "--language", "und", "--data_folder", "data",
            "--min_steps", 60, "--output_folder"], trained


@pytest.mark.long
@pytest.mark.parametrize("command", [label, prepare, clean, replay, transducer])
def test_a_command_that_is_killed_at_random_goes_on_to_the_same_result(command, tmp_path):
    words, result = command(tmp_path)
    began = time.monotonic()
    processes.sbkit(*words, tmp_path / "whole", cwd=tmp_path)
    seconds, wanted = time.monotonic() - began, result(tmp_path / "whole")
    drawn, kills, rounds = random.Random(1), 0, 0
    while kills < KILLS:
        out, rounds, here = tmp_path / f"killed{rounds}", rounds + 1, 0
        while kills < KILLS and here < 4:
            until = time.monotonic() + drawn.uniform(0.05, 0.8) * seconds
            if not processes.killed(lambda until=until: time.monotonic() > until, *words, out, cwd=tmp_path,
                                    timeout=200 + 2 * seconds):
                break
            kills, here = kills + 1, here + 1
        processes.sbkit(*words, out, cwd=tmp_path)
        assert different(result(out), wanted) == [], f"after {kills} kills"
    tried.record("kill -9 of label, prepare, clean and training", kills, LONG)


def dying(seconds, victim, *words):
    """A command one of whose processes is killed at a moment that nothing chose."""
    if os.environ["RANK"] == victim:
        timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    processes.command(*words)


def launched(ranks, *given):
    """Under torchrun's agent, which ends a process that waits for one that has died."""
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), run_id="killed",
                                rdzv_backend="c10d", rdzv_endpoint="localhost:0", monitor_interval=0.1, max_restarts=0,
                                start_method="fork"), dying)(*given)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_one_of_whose_processes_is_killed_ends_as_the_one_never_stopped(ranks, tmp_path):
    tones(tmp_path / "data", 60, 12)
    words = ["train", ROOT / "hparams" / "ctc.yaml", *SMALL, "--cnn_first_channels", 4, "--language", "und",
             "--data_folder", "data", "--min_steps", 60, "--output_folder"]
    began = time.monotonic()
    processes.sbkit(*words, "whole", cwd=tmp_path, ranks=ranks)
    seconds, wanted = time.monotonic() - began, trained(tmp_path / "whole")
    drawn, kills, rounds = random.Random(ranks), 0, 0
    while kills < KILLS:
        out, rounds, code = f"killed{rounds}", rounds + 1, 1
        while kills < KILLS and code:
            given = ranks, drawn.uniform(0, seconds), drawn.randrange(ranks), tmp_path, *words, out
            code, _, said = processes.program(launched, *map(str, given), timeout=300, **ON_A_CPU)
            if code:
                # The agent may see first that the other process has lost this one.
                assert "Signal 9 (SIGKILL)" in said or "lost the connection to another rank" in said, said[-3000:]
                kills += 1
        processes.sbkit(*words, out, cwd=tmp_path, ranks=ranks)
        assert different(trained(tmp_path / out), wanted) == [], f"after {kills} kills"
    tried.record("kill -9 of label, prepare, clean and training", kills, LONG)
