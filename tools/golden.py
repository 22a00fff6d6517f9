"""Records the results of small runs of every kind, and reports every bit in which those of another commit differ.

    python tools/golden.py record before.json                   every scenario, some minutes on one core
    python tools/golden.py compare before.json joint server     of this checkout, only these
    python tools/golden.py record old.json --tree ../old        of another checkout

A scenario uses only commands, recipes and documented files, so that it runs before and after a refactoring. It records
each step's loss, learning rate and gradient norm, each epoch's figures, and each tensor of the last checkpoint; or the
outputs of a bundle, the findings of ``sbkit check``, the answers of a server. The wording of messages is left out. The
figures depend on the machine and its torch: compare on the machine that recorded them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

RATE = 16_000
SPLITS = {"train": 24, "dev": 4, "test": 4}
WORDS = {"low": [300], "high": [1100], "both": [300, 1100], "none": []}  # the pitches that stand for a word
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
#: Options of all trainings.
TRAIN = ("--no-check --noprogressbar --log_interval 0 --precision fp32 --num_workers 0 --number_of_epochs 2 "
         "--min_steps 0 --ckpt_interval_minutes 0 --ckpt_interval_steps 2").split()
RECOGNISER = [*TRAIN, *"--language und --max_batch_seconds 3 --step_seconds 6".split()]
CONFORMER = "--d_model 16 --nhead 2 --d_ffn 16 --num_encoder_layers 2 --cnn_channels 4".split()
FLAGSHIP = ["hparams/ctc.yaml", *RECOGNISER, *CONFORMER, "--cnn_first_channels", "4"]
ENCODER = ["--encoder_source", "encoder", "--layer_decay", "0.9", "--mask_time_prob", "0.3", "--mask_time_length", "3"]
CODEC = ["hparams/codec.yaml", *TRAIN, *(
    "--n_mels 20 --size 16 --hidden 24 --encoder_layers 1 --slow_layers 1 --fast_layers 1 --sizes [256,512] "
    "--crop_seconds 0.5 --step_seconds 4 --max_batch_seconds 4 --adversarial_from 3 --discriminators.channels 4 "
    "--discriminators.sizes [256]").split()]
ENHANCER = ["hparams/enhance.yaml", *TRAIN, *(
    "--channels 16 --hidden 24 --layers 2 --crop_seconds 0.5 --step_seconds 4 --max_batch_seconds 4").split()]
VOICE = ["hparams/tts.yaml", *TRAIN, *(
    "--size 16 --hidden 24 --frame_size 20 --frame_hidden 24 --text_encoder.layers 1 --durations.size 12 "
    "--durations.hidden 16 --durations.layers 1 --frame_decoder.layers 1 --decoder.size 16 --decoder.hidden 24 "
    "--decoder.slow_layers 1 --decoder.fast_layers 1 --head.input_size 16 --step_seconds 6 "
    "--max_batch_seconds 3").split()]
#: Of metrics.jsonl's lines, besides those of validation and test; the others are of the clock, or of one start alone.
FIGURES = ("loss", "lr", "grad_norm", "skipped_steps", "loss_scale", "train_loss")
SCRIPT = '''
import sys

import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter

import sbkit


class Loudness(sbkit.Brain):
    """Learns how loud the first second is."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch.signal.data)

    def compute_objectives(self, predictions, batch, stage):
        return (predictions[:, 0] - batch.signal.data.square().mean(1)).square().mean()

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def dataset(split):
    found = DynamicItemDataset.from_csv(f"data/{split}.csv")
    found.add_dynamic_item(lambda wav: torch.from_numpy(soundfile.read(wav, frames=9600, dtype="float32")[0]),
                           takes="wav", provides="signal")
    found.set_output_keys(["id", "signal"])
    return found


sb.utils.seed.seed_everything(1234)
model = torch.nn.Sequential(torch.nn.Linear(9600, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1))
counter = EpochCounter(2)
brain = Loudness({"model": model}, lambda parameters: torch.optim.Adam(parameters, 0.01),
                 {"output_folder": sys.argv[1], "log_interval": 0},
                 {"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": 2},
                 Checkpointer(f"{sys.argv[1]}/save", {"model": model, "counter": counter}))
loading = {"batch_size": 4, "shuffle": True}
brain.fit(counter, dataset("train"), dataset("dev"), train_loader_kwargs=loading, valid_loader_kwargs={"batch_size": 4})
'''
CHECKING = '''
import runpy, shlex, sys
for line in open(sys.argv[1]):
    name, out, *given = shlex.split(line)
    sys.argv = ["sbkit", "check", "--json", name, *given]
    sys.stdout = open(out, "w")
    try:
        runpy.run_module("sbkit", run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    sys.stdout.close()
'''

#: What a scenario found: a value, which JSON has, by what it is.
Figures = dict[str, Any]


class Failed(Exception):
    """Raised if a command ends otherwise than it should."""


class Place:
    """A folder with a corpus and an encoder, and the runs that scenarios share.

    tree : the checkout that is tried
    """

    def __init__(self, folder: Path, tree: Path):
        self.folder, self.tree = folder, tree.resolve()
        corpus(folder / "data")
        self._made: dict[str, Path] = {}

    def command(self, *words: object, cwd: Path | None = None, **more: Any) -> subprocess.Popen[bytes]:
        """Start a Python program with the checkout's sbkit."""
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self.tree), "SBKIT_CACHE": str(self.folder)}
        return subprocess.Popen([sys.executable, *map(str, words)], cwd=cwd or self.folder, env=environment, **more)

    def run(self, *words: object, cwd: Path | None = None) -> str:
        """Run a Python program to its end, and return what it printed."""
        with tempfile.TemporaryFile() as log:
            code = self.command(*words, cwd=cwd, stdout=subprocess.PIPE, stderr=log)
            out = code.communicate()[0].decode()
            log.seek(0)
            if code.returncode:
                told = (out + log.read().decode(errors="replace"))[-3000:]
                raise Failed(f"{' '.join(map(str, words))} ended with {code.returncode}:\n{told}")
        return out

    def train(self, name: str, *words: object, ranks: int = 1) -> Figures:
        """Train into the folder ``name``, and return all its figures."""
        self.run(*self._launch(name, words, ranks))
        return trained(self.folder / name)

    def _launch(self, name: str, words: Iterable[object], ranks: int = 1) -> list[object]:
        several = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
        recipe, *more = words
        return ["-m", *several, "sbkit", "train", self.tree / str(recipe), *more, "--output_folder",
                self.folder / name]

    def killed(self, name: str, *words: object, step: int) -> None:
        """Train until a step was logged, and end it there with SIGKILL."""
        started = self.command(*self._launch(name, words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while _logged(self.folder / name) < step:
            if started.poll() is not None:
                raise Failed(f"{name} ended before step {step} with {started.returncode}")
            time.sleep(0.01)
        started.send_signal(signal.SIGKILL)
        started.wait()

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder that several scenarios use, made by the first of them."""
        if name not in self._made:
            make(self.folder / name)
            self._made[name] = self.folder / name
        return self._made[name]

    @cached_property
    def encoder(self) -> None:
        """A tiny pretrained encoder in the folder ``encoder``."""
        self.run("-c", "import torch, transformers as t; torch.manual_seed(0); "
                 "c = t.Wav2Vec2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, "
                 "intermediate_size=32, conv_dim=(16,) * 7, num_conv_pos_embeddings=16, "
                 "num_conv_pos_embedding_groups=2); t.Wav2Vec2Model(c).save_pretrained('encoder'); "
                 "t.Wav2Vec2FeatureExtractor().save_pretrained('encoder')")

    def recogniser(self) -> Path:
        """The flagship's bundle."""
        def make(bundle: Path) -> None:
            self.train("shipped", *FLAGSHIP, "--data_folder", "data")
            self.run("-m", "sbkit", "export", "shipped", "--to", bundle, "--formats", "onnx,int8", "--clips", 4)

        return self.once("recogniser", make)

    def codec(self) -> Path:
        """A codec's bundle."""
        def make(bundle: Path) -> None:
            self.train("coder", *CODEC, "--data_folder", "data")
            self.run("-m", "sbkit", "export", "coder", "--to", bundle, "--formats", "onnx", "--clips", 4)

        return self.once("codec", make)


def corpus(folder: Path) -> None:
    """Words as chords and noise, in SpeechBrain's CSVs."""
    import numpy as np
    import soundfile

    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split, count in SPLITS.items():
        lines = ["ID,duration,wav,spk_id,wrd"]
        for i in range(count):
            words = [str(word) for word in draw.choice(list(WORDS), 2 + i % 3)]
            parts = [_sound(WORDS[word], draw) for word in words]
            path = folder / f"{split}{i}.wav"
            soundfile.write(path, np.concatenate(parts), RATE, subtype="PCM_16")
            lines.append(f"{split}{i},{sum(map(len, parts)) / RATE},{path},speaker{i % 2},{' '.join(words)}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")


def _sound(pitches: list[int], draw: Any) -> Any:  # numpy's generator, and its array
    import numpy as np

    at = np.arange(int(draw.integers(4800, 7200))) / RATE
    tone = sum((0.2 * np.sin(2 * np.pi * pitch * at) for pitch in pitches), start=0 * at)
    return tone * np.hanning(len(at)) + 0.01 * draw.standard_normal(len(at))


# ---------------------------------------------------------------------- what is recorded


def digest(data: bytes) -> str:
    """Hash bits."""
    return hashlib.sha256(data).hexdigest()[:16]


def _lines(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # it is being written
            found.append(json.loads(line))
    return found


def _logged(run: Path) -> int:
    return max((line["step"] for line in _lines(run) if line["kind"] == "step"), default=0)


def trained(run: Path) -> Figures:
    """The figures of a run: its steps and epochs in their order, and the tensors of its last checkpoint."""
    found: Figures = {}
    for line in _lines(run):
        if line["kind"] in ("step", "epoch", "test"):
            place = " ".join(f"{name} {line[name]}" for name in ("epoch", "step") if name in line)
            found.update({f"{line['kind']}: {place}: {name}": value for name, value in line.items()
                          if name in FIGURES
                          or (name.startswith(("valid_", "test_")) and not name.endswith("real_time_factor"))})
    if not any(label.startswith("step: ") for label in found):
        raise Failed(f"{run / 'metrics.jsonl'} has no step")
    checkpoints = sorted(run.glob("save/CKPT*/CKPT.yaml"), key=lambda path: path.stat().st_mtime_ns)
    for path in sorted(checkpoints[-1].parent.iterdir()):
        found.update({f"weights: {path.name}: {name}": value for name, value in _tensors(path)})
    if not any(label.startswith("weights: ") for label in found):
        raise Failed(f"{checkpoints[-1].parent} has no tensors")
    return found


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
    """Each tensor in a file by its name: type, shape and hash."""
    import torch
    from safetensors.torch import load_file

    with contextlib.suppress(Exception):  # text, or numbers alone
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=False)
        yield from ((name, f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]} {digest(_bits(value))}")
                    for name, value in _flat(state) if isinstance(value, torch.Tensor))


def _bits(tensor: Any) -> bytes:  # torch's
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _flat(state: object, name: str = "") -> Iterator[tuple[str, object]]:
    children: Iterable[tuple[object, object]] = ()
    if isinstance(state, Mapping):
        children = state.items()
    elif isinstance(state, (list, tuple)):
        children = enumerate(state)
    else:
        yield name, state
    for key, value in children:
        yield from _flat(value, f"{name}.{key}" if name else str(key))


# ---------------------------------------------------------------------- scenarios


def _training(name: str, *words: str, ranks: int = 1) -> Callable[[Place], Figures]:
    return lambda place: place.train(name, *words, "--data_folder", "data", ranks=ranks)


def _resumed(place: Place) -> Figures:
    words = *FLAGSHIP, "--data_folder", "data"
    place.killed("resumed", *words, step=7)
    return place.train("resumed", *words)


def _pretrained(name: str, *words: str) -> Callable[[Place], Figures]:
    def scenario(place: Place) -> Figures:
        _ = place.encoder
        return place.train(name, *words, *RECOGNISER, *ENCODER, "--data_folder", "data")

    return scenario


def _voice(place: Place) -> Figures:
    return place.train("voice", *VOICE, "--codec", place.codec(), "--recogniser", place.recogniser(), "--data_folder",
                       "data")


def _script(place: Place) -> Figures:
    (place.folder / "script.py").write_text(SCRIPT)
    place.run("script.py", "script")
    return trained(place.folder / "script")


def _bundle(place: Place) -> Figures:
    import numpy as np
    import onnxruntime
    import soundfile

    bundle = place.recogniser()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    signals = [soundfile.read(place.folder / "data" / f"test{i}.wav", dtype="float32")[0] for i in range(3)]
    lengths = np.array([len(signal) for signal in signals])
    batch = np.stack([np.pad(signal, (0, max(lengths) - len(signal))) for signal in signals])
    found: Figures = {}
    for name in ("model.onnx", "model.int8.onnx"):
        session = onnxruntime.InferenceSession(bundle / name, options)
        outputs = session.run(["log_probs", "frames"], {"signals": batch, "lengths": lengths})
        found |= {f"{name}: {what}": f"{[*array.shape]} {digest(array.tobytes())}"
                  for what, array in zip(("log_probs", "frames"), outputs, strict=True)}
    for more in ((), ("--beam", 4), ("--model", "int8"), ("--chunk-seconds", 0.5)):
        out = place.run("-m", "sbkit", "transcribe", bundle, "data/test.csv", "--format", "json", "--threads", 1, *more)
        found |= {f"transcribe {' '.join(map(str, more))}: {each['id']}": each
                  for each in map(json.loads, out.splitlines())}
    return found


def _findings(place: Place) -> Figures:
    home, out = place.tree / "tests" / "recipe" / "broken", place.folder / "findings"
    out.mkdir()
    order = []
    for path in sorted(home.glob("*.yaml")):
        given = [line.removeprefix("# given: ") for line in path.read_text(encoding="utf-8").splitlines()
                 if line.startswith("# given: ")]
        order.append(" ".join([path.name, str(out / f"{path.stem}.json"), *given]))
    (out / "order.txt").write_text("\n".join(order) + "\n")
    place.run("-c", CHECKING, out / "order.txt", cwd=home)
    found: Figures = {}
    for path in sorted(out.glob("*.json")):
        report = json.loads(path.read_text())
        for number, each in enumerate([*report["errors"], *report["warnings"]], 1):
            found[f"{path.stem}: {number}"] = [each[name] for name in ("severity", "code", "file", "line", "key")]
    return found


def _server(place: Place) -> Figures:
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = place.command("-m", "sbkit", "serve", f"ours={place.recogniser()}", "--port", port, "--threads", 1,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until = time.monotonic() + 120
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                if serving.poll() is not None or time.monotonic() > until:
                    raise Failed("the server doesn't answer")
                time.sleep(0.2)
            return _answers(client, place.folder / "data" / "test2.wav") | _live(port, place.folder / "data")
    finally:
        serving.terminate()
        serving.wait()


def _answers(client: Any, clip: Path) -> Figures:  # httpx's
    audio = {"file": ("a.wav", clip.read_bytes())}
    found: Figures = {"models": [each["id"] for each in client.get("/v1/models").json()["data"]]}

    def ask(what: str, form: dict[str, Any], files: Mapping[str, Any] = audio) -> None:
        answer = client.post("/v1/audio/transcriptions", data=form, files=files)
        kind = answer.headers["content-type"].split(";")[0]
        body = answer.json() if kind == "application/json" else answer.text
        if isinstance(body, dict) and "error" in body:
            body = {name: body["error"][name] for name in ("type", "param", "code")}
        found[what] = [answer.status_code, kind, body]

    for kind in ("json", "text", "srt", "vtt", "verbose_json"):
        ask(kind, {"model": "ours", "response_format": kind})
    ask("words", {"model": "ours", "response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]})
    ask("stream", {"model": "ours", "stream": "true"})
    ask("no such model", {"model": "theirs"})
    ask("no such format", {"model": "ours", "response_format": "docx"})
    ask("no audio", {"model": "ours"}, {"file": ("a.wav", b"RIFF")})
    ask("no file", {"model": "ours"}, {"other": ("a.wav", b"")})
    for path in ("/nowhere", "/v1/audio/transcriptions"):
        answer = client.get(path)
        found[f"GET {path}"] = [answer.status_code, answer.json()["error"]["code"]]
    return found


def _live(port: int, data: Path) -> Figures:
    import soundfile
    from websockets.sync.client import connect

    with connect(f"ws://127.0.0.1:{port}/v1/audio/live") as session:
        session.send(json.dumps({"type": "start", "model": "ours", "sample_rate": RATE}))
        for i in range(SPLITS["test"]):
            session.send(soundfile.read(data / f"test{i}.wav", dtype="int16")[0].tobytes() + bytes(2 * RATE))
        session.send(json.dumps({"type": "stop"}))
        messages = [json.loads(message) for message in session]
    lasting = [each for each in messages if each["type"] != "partial"]  # how many of those come is up to the clock
    return {f"live: {number}": each for number, each in enumerate(lasting, 1)}


SCENARIOS: dict[str, Callable[[Place], Figures]] = {
    "fp32": _training("fp32", *FLAGSHIP),
    "bf16": _training("bf16", *FLAGSHIP, "--precision", "bf16"),
    "ranks": _training("ranks", *FLAGSHIP, ranks=2),
    "joint": _training("joint", *FLAGSHIP, "--ctc_weight", "0.3", "--dropout", "0.1"),
    "consistency": _training("consistency", *FLAGSHIP, "--consistency", "0.2"),
    "ema": _training("ema", *FLAGSHIP, "--ema_decay", "0.9"),
    "pieces": _training("pieces", *FLAGSHIP, "--token_type", "unigram", "--output_neurons", "18"),
    "resumed": _resumed,
    "streaming": _training("streaming", "hparams/streaming.yaml", *RECOGNISER, *CONFORMER),
    "ssl": _pretrained("ssl", "hparams/finetune.yaml", "--freeze.encoder", "2"),
    "lora": _pretrained("lora", "recipes/CommonVoice/ASR/CTC/hparams/lora.yaml"),
    "codec": _training("codec-run", *CODEC),
    "enhancer": _training("enhancer", *ENHANCER),
    "voice": _voice,
    "script": _script,
    "bundle": _bundle,
    "findings": _findings,
    "server": _server,
}


# ---------------------------------------------------------------------- the two commands


def machine(tree: Path) -> dict[str, str]:
    """What the figures depend on besides the code."""
    import torch

    processor = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                      if line.startswith("model name")), "") if Path("/proc/cpuinfo").is_file() else ""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=tree, capture_output=True, text=True)
    return {"commit": commit.stdout.strip(), "torch": torch.__version__, "python": platform.python_version(),
            "processor": processor or platform.processor()}


def tried(names: Iterable[str], tree: Path, keep: Path | None) -> Iterator[tuple[str, Figures]]:
    """Run scenarios; yields the name and the figures of each. One that fails has the figure ``failed``."""
    folder = keep or Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        place = Place(folder, tree)
        for name in names:
            began = time.monotonic()
            try:
                figures = json.loads(json.dumps(SCENARIOS[name](place)))
            except Exception as error:  # the other scenarios are worth their minutes all the same
                figures = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{name}: {len(figures)} figures in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            yield name, figures
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def differences(before: Figures, now: Figures) -> list[str]:
    """A line for each kind of figure that differs: the first one, and how many there are."""
    lines: list[str] = []
    kinds = dict.fromkeys(label.split(": ")[0] for label in (*before, *now))
    for kind in kinds:
        labels = [label for label in dict.fromkeys((*before, *now)) if label.split(": ")[0] == kind]
        wrong = [label for label in labels if label not in before or label not in now or before[label] != now[label]]
        if wrong:
            was, found = (figures.get(wrong[0], "nothing") for figures in (before, now))
            lines.append(f"{wrong[0]} is {found}, and was {was}"
                         + (f" (so {len(wrong)} of {len(labels)} such figures)" if len(wrong) > 1 else ""))
    return lines


def main(words: list[str] | None = None) -> int:
    """Record or compare; returns 1 if anything differs or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout to run")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in this new folder")
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in SCENARIOS]:
        parser.error(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    before = json.loads(given.file.read_text()) if given.command == "compare" else {}
    names = given.names or [*(before.get("scenarios") or SCENARIOS)]
    wrong = False
    made: dict[str, Any] = {"machine": machine(given.tree), "scenarios": {}}
    if before:
        for what, was in before["machine"].items():
            if what != "commit" and made["machine"][what] != was:
                print(f"recorded with another {what}: {was}; here it is {made['machine'][what]}", file=sys.stderr)
    for name, figures in tried(names, given.tree, given.keep):
        made["scenarios"][name] = figures
        told = [figures["failed"]] if "failed" in figures else []
        if before:
            told = told or differences(before["scenarios"].get(name, {}), figures)
            print("\n".join([f"{name}: {line}" for line in told] or [f"{name}: equal"]), flush=True)
        elif told:
            print(f"{name}: {told[0]}", file=sys.stderr)
        wrong |= bool(told)
    if not before:
        given.file.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
