"""Stop signals: what the first and the second do, in one process, its workers and under torchrun."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sbkit.errors import SbkitError
from sbkit.train import signals
from sbkit.train.signals import Stopped, StopSignals


class Acted(Exception):
    """What a run raises once it has seen to the signal."""


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS, ids=lambda s: s.name)
def test_a_signal_is_noted_and_nothing_else_happens(signum, capfd):
    before = signal.getsignal(signum)
    with pytest.raises(Acted), StopSignals() as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signum)
        time.sleep(0.05)
        assert stop.signum == signum
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert stop.signum == signum  # the first one counts
        raise Acted
    assert signal.getsignal(signum) == before
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{signum.name}: saving a checkpoint")
    assert ("press Ctrl-C again" in lines[0]) == (signum == signal.SIGINT), "nobody pressed it for the others"


def test_outside_a_run_signals_do_what_they_did():
    with StopSignals():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_under_nohup_the_end_of_the_terminal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for context in (StopSignals(), signals.end_by_signals()):
            with context:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.05)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_unhandled_signal_is_not_lost():
    """It came when the last epoch was over: what follows must not run on as if there had been none."""
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stopped, match="stopped by SIGUSR1 after the end of training; run the same") as stopped:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.02)
    assert stopped.value.code == 138 and signal.getsignal(signal.SIGUSR1) == before


def test_it_can_be_entered_again_and_leaves_no_thread():
    for _ in range(3):
        with pytest.raises(Stopped), StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
            assert stop.signum == signal.SIGTERM
    assert not [thread for thread in threading.enumerate() if thread.name == "stop-signals"]


def test_it_can_be_left_while_a_forked_worker_lives():
    with StopSignals():
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert not [thread for thread in threading.enumerate() if thread.name == "stop-signals"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_signal_to_a_forked_process_is_none_to_its_parent(capfd):
    with StopSignals() as stop:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.05)
        assert stop.signum is None and capfd.readouterr().err == ""


def test_in_a_thread_a_warning_says_that_signals_are_not_caught(caplog):
    def run():
        with StopSignals() as stop:
            assert stop.signum is None

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "can't be caught" in caplog.text


def test_what_ends_a_run_is_a_plain_line_and_a_code():
    error = Stopped.by(signal.SIGTERM, "step 120", "save/CKPT+x")
    assert isinstance(error, SbkitError) and isinstance(error, SystemExit)
    assert str(error) == ("stopped by SIGTERM after step 120, checkpoint saved at save/CKPT+x; "
                          "run the same command to resume")
    assert error.code == error.exit_code == 143
    unsaved = Stopped.by(signal.SIGINT, "step 1", None)
    assert unsaved.code == 130
    assert str(unsaved) == ("stopped by SIGINT after step 1, and nothing is saved, because there is no checkpointer; "
                            "run the same command to begin again")
    assert Stopped.by(signal.SIGUSR1, "step 1", None).code == 138
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.code == 143


ROOT = Path(__file__).parents[2]


class Script:
    """A Python script in a process of its own, and of its own process group."""

    def __init__(self, text, *command):
        command = command or (sys.executable, "-c")
        self.process = subprocess.Popen(
            [*command, textwrap.dedent(text)] if command[-1] == "-c" else command, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self):
        self.started()
        return self

    def started(self):
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def send(self, signum):
        self.process.send_signal(signum)

    def send_all(self, signum):
        os.killpg(self.process.pid, signum)

    def end(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def __exit__(self, *error):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


LOOP = """
    import sys, time
    from sbkit.train.signals import Stopped, StopSignals
    with StopSignals() as stop:
        print("ready", flush=True)
        for step in range(6000):
            time.sleep(0.01)
            if stop.signum:
                raise Stopped.by(stop.signum, 7, "here")
"""


DEAF = """
    import threading
    from sbkit.train.signals import StopSignals
    with StopSignals():
        print("ready", flush=True)
        {waits}
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["import time\n        while True: time.sleep(0.01)",
                                   "import ctypes\n        ctypes.CDLL(None).pause()\n"
                                   "        while True: ctypes.CDLL(None).pause()"], ids=["python", "in C"])
def test_the_second_ctrl_c_leaves_at_once_even_while_c_code_waits(waits):
    with Script(DEAF.format(waits=waits)) as script:
        script.send(signal.SIGINT)
        time.sleep(signals.ECHO_SECONDS + 0.3)
        assert script.process.poll() is None
        script.send(signal.SIGINT)
        start = time.monotonic()
        returned, _, err = script.end()
    assert returned == 130 and time.monotonic() - start < 5
    assert "press Ctrl-C again to stop at once" in err


@pytest.mark.slow
def test_the_same_ctrl_c_twice_is_one():
    """From the terminal, and at once again from the launcher."""
    later = "\n    from sbkit.train import signals\n    signals.ECHO_SECONDS = 5  # on a busy machine\n"
    with Script(later + LOOP.replace("raise", "time.sleep(1); print('in order'); raise")) as script:
        script.send(signal.SIGINT)
        time.sleep(0.1)
        script.send(signal.SIGINT)
        returned, out, _ = script.end()
    assert returned == 130 and out == "in order\n"


#: Forks scripts whose imports are done, each in a group of its own, and says how they end: as any script does, as it
#: is Python itself that ends them.
FORKS = """
    import json, os, sys, tools.gpu.preload
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            os.setsid()
            for stream, path in enumerate(asked[1:], 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
            exec(asked[0])
            break
"""
SCRIPT = """
    import time, torch, warnings
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # where there is one core
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 100_000
        def __getitem__(self, i):
            time.sleep(0.005)
            return torch.ones(1)
    import sbkit
    from speechbrain.utils.checkpoints import Checkpointer
    class Tiny(sbkit.Brain):
        def compute_forward(self, batch, stage): return self.modules.layer(batch)
        def compute_objectives(self, output, batch, stage): return output.square().mean()
        def on_fit_batch_end(self, *args):
            if self.step == 3:
                print("ready", flush=True)
    layer = torch.nn.Linear(1, 1)
    kept = Checkpointer({!r}, {{"layer": layer}})
    options = {{"noprogressbar": True, "device": "cpu"}}
    brain = Tiny({{"layer": layer}}, torch.optim.SGD, run_opts=options, checkpointer=kept)
    brain.fit(range(2), Slow(), train_loader_kwargs={})
"""


class ForkedScript:
    """A Brain that trains with these checkpoints, on a number of rows from a loader of SpeechBrain's."""

    def __init__(self, server, checkpoints, rows=100_000, **loader):
        self.server = server
        self.out, self.err = (Path(tempfile.mkstemp(dir=checkpoints.parent)[1]) for _ in range(2))
        text = SCRIPT.format(str(checkpoints), loader).replace("100_000", str(rows))
        self.pid = self._asked([textwrap.dedent(text), str(self.out), str(self.err)])

    def _asked(self, words):
        print(json.dumps(words), file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def started(self):
        until = time.monotonic() + 60
        while self.out.read_text() != "ready\n":
            assert time.monotonic() < until, self.err.read_text()
            time.sleep(0.02)
        return self

    def end(self, send=None):
        """How it ended, by a signal to it and all that it started, and what it said."""
        began = time.monotonic()
        if send:
            os.killpg(self.pid, send)
        limit = threading.Timer(60, self.kill)
        limit.start()
        code = self._asked(self.pid)
        limit.cancel()
        assert time.monotonic() - began < 10
        return code, self.err.read_text()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def forked():
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(FORKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as server:
        scripts = []

        def start(*args, **options):
            scripts.append(ForkedScript(server, *args, **options))
            return scripts[-1]

        yield start
        for script in scripts:
            script.kill()
        server.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("signum, code, persistent", [(signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)])
def test_a_script_whose_group_gets_the_signal_saves_says_so_and_ends_soon(forked, tmp_path, signum, code, persistent):
    """Its loader is SpeechBrain's, whose workers get the signal too: they live on, and none of them shouts."""
    folder = tmp_path / "save"
    script = forked(folder, num_workers=2, batch_size=2, persistent_workers=persistent)
    returned, err = script.started().end(signum)
    assert returned == code and "Traceback" not in err and "DataLoader worker" not in err
    assert err.count(f"checkpoint saved at {folder}/CKPT") == 1 and len(list(folder.glob("CKPT*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_script_that_is_done_ends_soon(forked, tmp_path, persistent):
    script = forked(tmp_path / "save", rows=20, num_workers=2, batch_size=2, persistent_workers=persistent)
    assert script.started().end()[0] == 0


@pytest.mark.slow
def test_a_second_script_with_the_same_checkpoints_is_refused_while_the_first_trains(forked, tmp_path):
    folder = tmp_path / "save"
    first, second = forked(folder).started(), forked(folder)
    code, err = second.end()
    assert code and not second.out.read_text()
    assert f"another process is training with the checkpoints in {folder}; wait until it ends" in err
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert forked(folder).started().end(signal.SIGTERM)[0] == 143


@pytest.mark.slow
@pytest.mark.parametrize("signum, to_all", [pytest.param(signal.SIGINT, True, marks=pytest.mark.long),
                                            (signal.SIGUSR1, False)],
                         ids=["to all, like Ctrl-C", "SLURM's, to torchrun"])
def test_under_torchrun(tmp_path, signum, to_all):
    """torchrun passes it on to both ranks, which have time to save."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(f"""
        import os, time
        from pathlib import Path
        from sbkit.train.signals import Stopped, StopSignals
        rank, folder = os.environ["RANK"], Path({str(tmp_path)!r})
        with StopSignals() as stop:
            (folder / f"ready{{rank}}").touch()
            while not (folder / "ready0").exists() or not (folder / "ready1").exists():
                time.sleep(0.01)
            if rank == "0":
                print("ready", flush=True)
            for step in range(6000):
                time.sleep(0.01)
                if stop.signum:
                    time.sleep(3)
                    (folder / f"saved{{rank}}").touch()
                    raise Stopped.by(stop.signum, step, "here")
    """))
    handled = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"] if signum == signal.SIGUSR1 else []
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *handled, str(path))
    with Script("", *command) as script:
        (script.send_all if to_all else script.send)(signum)
        returned, _, err = script.end()
    assert returned != 0
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists(), err


ENDS = """
    import os, signal, time
    from sbkit.train.signals import end_by_signals
    with end_by_signals():
        try:
            print("ready", flush=True)
            {waits}
        finally:
            print("tidied up", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_outside_of_training_a_signal_ends_it_in_order(signum, code):
    with Script(ENDS.format(waits="time.sleep(60)")) as script:
        script.send(signum)
        returned, out, err = script.end()
    assert (returned, out, err) == (code, "tidied up\n", "")


def test_what_is_forked_outside_of_training_ends_by_a_signal():
    with signals.end_by_signals():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"ready")
            time.sleep(60)
            os._exit(0)
        os.read(reading, 5)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_training_within_has_its_signals_to_itself():
    with pytest.raises(Stopped, match="by SIGTERM; run the same command to continue"), signals.end_by_signals():
        with pytest.raises(Acted), StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            assert stop.signum == signal.SIGTERM
            raise Acted
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)


def test_nothing_outside_of_training_takes_a_signal_for_a_mistake_and_goes_on():
    """As what counts FLOPs or makes the report does with mistakes."""
    went_on = False
    with pytest.raises(Stopped, match="stopped by SIGTERM") as stopped, signals.end_by_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except Exception:
            went_on = True
    assert not went_on and stopped.value.exit_code == 143
