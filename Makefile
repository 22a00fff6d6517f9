# Two commands do all the set-up: make demo, make test. Both use the active virtual environment,
# or make .venv. A second call installs nothing: the stamp is newer than setup.cfg.
PYTHON ?= python3
VENV   := $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),.venv)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.sbkit-installed$(subst /,_,$(CURDIR))
OUT    ?= results/demo
SPEECH ?= results/demo-speech
# Tests wait for processes, ports and disks a third of their time, so there are more of them at once than cores.
TESTERS ?= $(shell $(PYTHON) -c 'import os; n = os.cpu_count() or 1; print(min(2 * n, n + 4))')

# Python keeps what it compiles, whatever the shell says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-speech test test-fast test-long messages tried lint format docs pictures dist bench gpu clean

help:
	@echo "make demo       synthesise speech, train a recogniser on it, score it, use it (minutes, no GPU)"
	@echo "make demo-speech  the same, and a voice: a codec, a voice that speaks through it, a server, and transcripts"
	@echo "make test       all that protects, in minutes (make test-fast: without training, kills, several processes)"
	@echo "make test-long  endurance: sieges, thousands of mutations, kills at every disk operation, the image's build"
	@echo "make messages   writes the words of all messages in tests/messages/ anew, for a reviewer to read"
	@echo "make tried      tries thousands of hostile files, kills and faults, and counts them in SECURITY.md"
	@echo "make lint       ruff, and mypy: the types of all of sbkit/ and tools/"
	@echo "make docs       the documentation as a site, in site/; first the pages that are made from the code"
	@echo "make pictures   the README's pictures, from the run of make demo and a headless Chromium"
	@echo "make dist       a wheel, in dist/"
	@echo "make bench      speed against stock SpeechBrain in the same run"
	@echo "make gpu        what works on this machine's GPUs, and how fast: 20 minutes, gpu-report.md"

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf .venv; echo "python3 cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "sbkit needs Python 3.10 to 3.13; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "installing into $(VENV): PyTorch, SpeechBrain and what they need, some gigabytes and minutes the first time"
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/sbkit train hparams/ctc.yaml --output_folder $(OUT)
	$(BIN)/sbkit export $(OUT) --to $(OUT)/bundle --force
	@$(BIN)/python tools/demo_end.py $(OUT)

# Only what is missing is made, so a second call goes on where the first one was stopped.
$(OUT)/bundle/config.json:
	$(MAKE) demo OUT=$(OUT)

demo-speech: $(STAMP) $(OUT)/bundle/config.json
	$(BIN)/sbkit train hparams/codec.yaml --output_folder $(SPEECH)/codec \
	  --recogniser $(OUT)/bundle
	$(BIN)/sbkit export $(SPEECH)/codec --to $(SPEECH)/codec/bundle --force
	$(BIN)/sbkit train hparams/tts.yaml --output_folder $(SPEECH)/voice \
	  --codec $(SPEECH)/codec/bundle --recogniser $(OUT)/bundle
	$(BIN)/sbkit export $(SPEECH)/voice --to $(SPEECH)/voice/bundle --force
	$(BIN)/python tools/demo_speech_end.py $(SPEECH)/voice $(SPEECH)/voice/bundle $(OUT)/bundle

test test-fast test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(TESTERS) -m '$(TESTS)'

test: TESTS = not long
test-fast: TESTS = not slow and not long
test-long: TESTS = long

messages: $(STAMP)
	rm -rf tests/messages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --workers $(TESTERS) --rewrite-messages -m 'not long'

tried: $(STAMP)
	rm -f tried.jsonl
	SBKIT_TRIED=$(CURDIR)/tried.jsonl SBKIT_HOSTILE_FILES=2000 SBKIT_KILLS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  --workers $(TESTERS) tests/integration/test_killed_commands.py tests/test_hostile_files.py tests/serve/test_fuzz.py tests/serve/test_no_memory.py \
	  tests/integration/test_kill_resume.py tests/train/checkpoint/test_checkpoint_writing.py tests/data/test_publish.py
	$(BIN)/python tests/tried.py tried.jsonl
	rm tried.jsonl

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .

docs: $(STAMP)
	$(BIN)/python tools/keys_page.py
	$(BIN)/python tools/findings_page.py
	$(BIN)/python -m mkdocs build --strict

pictures: $(STAMP) $(OUT)/bundle/config.json
	$(BIN)/python -m tools.pictures $(OUT)

# Without network: it needs setuptools, and none of what sbkit needs.
dist:
	$(PYTHON) -m pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .

bench: $(STAMP)
	$(BIN)/python -m tools.bench.train
	$(BIN)/python -m tools.bench.decode
	$(BIN)/python -m tools.bench.score

gpu: $(STAMP)
	$(BIN)/python -m tools.gpu

clean:
	rm -rf results gpu-report* build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache
