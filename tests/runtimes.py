"""Stand-ins for ONNX Runtimes that were asked for CUDA: one that has it, and all the ways in which one hasn't.

Each computes on the CPU, as nothing else is here; what they differ in is what they say about it, and when.
"""

import types

import onnxruntime

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_Real = onnxruntime.InferenceSession


class OnCuda(_Real):
    """A card and all that belongs to it: the session says what it took, with the options given and its own defaults.

    As ONNX Runtime does, it falls back in silence where it may.
    """

    asked = ()
    ignored = ()  # options that this version doesn't know

    def __init__(self, path, options, providers, enable_fallback=1):
        type(self).asked = self._asked = providers
        self._falls_back = enable_fallback != 0
        self._there = [each if isinstance(each, str) else each[0] for each in providers]
        if self.on_cuda:
            self._open()
        super().__init__(path, options, providers=[CPU], enable_fallback=enable_fallback)

    @property
    def on_cuda(self):
        return self._there[0] == CUDA

    def _open(self):
        """What happens to CUDA while the session is made."""

    def get_providers(self):
        return self._there

    def get_provider_options(self):
        given = {name: value for name, value in self._asked[0][1].items() if name not in self.ignored}
        return {CUDA: {"use_tf32": "1", **given}, CPU: {}}

    def get_provider_graph_assignment_info(self):
        def part(name, nodes):
            return types.SimpleNamespace(ep_name=name, get_nodes=lambda: [None] * nodes)

        return [part(CUDA, 5), part(CPU, 1), part(CUDA, 3)] if self.on_cuda else [part(CPU, 9)]

    def _drop(self, why):
        if not self._falls_back:
            raise RuntimeError(why)
        self._there = [CPU]


class WithoutLibraries(OnCuda):
    """CUDA or cuDNN is missing: a line in the log, and a session on the CPU, whatever is said about falling back."""

    def _open(self):
        self._there = [CPU]


class OldDriver(OnCuda):
    """CUDA's first call fails, and the constructor tries again on the CPU, unless it must not."""

    def _open(self):
        self._drop("CUDA failure 35: driver is too old\nand more")


class FailsToRun(OnCuda):
    """The session is made, but its first kernel fails, and ``run`` tries again on the CPU, unless it must not."""

    def run(self, *args):
        if self.on_cuda:
            self._drop("CUDNN_STATUS_EXECUTION_FAILED\nand more")
        return super().run(*args)


class FallsBackWhenRun(OnCuda):
    """The first run goes to the CPU, whatever is said about falling back."""

    def run(self, *args):
        self._there = [CPU]
        return super().run(*args)


class OtherCard(OnCuda):
    """The session runs on another card than the one asked for."""

    def get_provider_options(self):
        found = super().get_provider_options()
        found[CUDA]["device_id"] = "7"
        return found


class NothingToDo(OnCuda):
    """The session has CUDA, first on its list, and runs all operators on the CPU."""

    def get_provider_graph_assignment_info(self):
        return [types.SimpleNamespace(ep_name=CPU, get_nodes=lambda: [None] * 9)]


class Silent(OnCuda):
    """An older version, which doesn't tell who runs which operator."""

    get_provider_graph_assignment_info = property()  # hasattr says no


#: Those whose CUDA can't be used, and what is said of it and a file.
BROKEN = {
    WithoutLibraries: "onnxruntime fell back to CPUExecutionProvider",
    OldDriver: "{file} can't be opened on the GPU: CUDA failure 35: driver is too old",
    FailsToRun: "a test inference of {file} failed on the GPU: CUDNN_STATUS_EXECUTION_FAILED",
    FallsBackWhenRun: "onnxruntime fell back to CPUExecutionProvider",
    OtherCard: "onnxruntime chose cuda:7",
    NothingToDo: "onnxruntime runs all operators of {file} on CPUExecutionProvider",
}


def use(monkeypatch, session):
    """Let ONNX Runtime list CUDA and make such sessions; returns a list that grows when its libraries are loaded."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    preloaded = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: preloaded.append(1), raising=False)
    return preloaded


def install(folder, *names, version="1.23.0"):
    """Write what pip leaves of packages that share the folder ``onnxruntime``; returns the folder they are in."""
    for name in names:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "top_level.txt").write_text("onnxruntime\n")
    return folder
