# Two commands are all a new user needs: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs
RAY := $(VENV)/.ray
AS_ROOT ?=
LAYOUT ?= pp2,dp2
ARGS ?=
FUZZ_SECONDS ?= 3600
TORCH ?= 2.11.0
# Hundreds of processes import the package, and those of readme a freshly installed PyTorch. Each would compile them again if the
# environment forbids bytecode files.
export PYTHONDONTWRITEBYTECODE =
# Most modules that are installed are never imported; the others are compiled when they first are. PIP_NO_COMPILE=1 means the opposite.
export PIP_COMPILE = 0

.PHONY: setup all-of-ci train test compiled test-all test-versions clusters readme docs fuzz lint clean

setup: $(STAMP)

$(PACKAGE): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $(PACKAGE)

$(STAMP): $(PACKAGE)
	$(BIN)/pip install -q -c constraints.txt -e ".[test]"
	touch $(STAMP)

# All environments at once, by uv, which takes a tenth of pip's time; by pip where uv can't, as it reads none of pip's settings. What
# several processes would compile at once is imported.
all-of-ci:
	$(PYTHON) -m venv $(VENV)
	{ $(BIN)/pip install -q uv && $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[test,docs,ray]"; } || \
	  $(BIN)/pip install -q -c constraints.txt -e ".[test,docs,ray]"
	$(BIN)/python -c "import parallel3d.initialization, torch._dynamo"
	touch $(PACKAGE) $(STAMP) $(DOCS) $(RAY)

train: $(PACKAGE)
	$(BIN)/parallel3d --num_procs $(LAYOUT) examples/train_gpt.py --layout $(LAYOUT) $(ARGS)

# Three at a time, because tests on many processes often wait; neighbours stay together, for what they share.
test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

# What `make test` would compile in each of its processes at its start: the tests, and what they import. For a fresh checkout.
compiled: setup
	$(BIN)/python -m pytest --collect-only >/dev/null
	PYTHONPATH=tests $(BIN)/python -c "import preloaded"

test-all: setup
	$(BIN)/pip install -q -c constraints.txt -e ".[test,huggingface]"
	$(MAKE) test ARGS="--full $(ARGS)"

# All tests with another Python or PyTorch, in an environment of its own: make test-versions PYTHON=python3.13 TORCH=2.15.0
test-versions:
	$(PYTHON) -m venv --clear build/versions
	build/versions/bin/pip install -q torch==$(TORCH) -e ".[test]"
	build/versions/bin/python -m pytest -n 4 --dist worksteal $(ARGS)

# Training on two hosts, which are namespaces of this one: as root, with sshd, mpirun, munge and Slurm; skipped without. And by Ray.
clusters: $(RAY)
	$(AS_ROOT) $(BIN)/python -m pytest -n 4 tests/clustered.py tests/ray_trainer.py $(ARGS)

# README's commands, from the sdist, in an environment of their own.
readme: setup
	rm -rf build/dist build/readme
	$(BIN)/python setup.py -q sdist --dist-dir build/dist
	$(BIN)/python tools/readme.py build/dist/*.tar.gz build/readme

$(RAY): $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e ".[ray]"
	touch $(RAY)

$(DOCS): $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	touch $(DOCS)

# The site, in build/docs, with its notebooks run: python3 -m http.server -d build/docs
docs: $(DOCS)
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/opened_docs.py

# Malformed inputs, others in each round.
fuzz: setup
	end=$$(($$(date +%s) + $(FUZZ_SECONDS))); while [ $$(date +%s) -lt $$end ]; do \
	  $(BIN)/python -m pytest tests/fuzz -n 3 --hypothesis-profile long $(ARGS) || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
