# Sets up, tests and shows polylane. `make demo` and `make test` need nothing but Python >= 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

DEMO := examples/digits.py --workers 4 --plan data=2,pipeline=2
EPOCHS ?= 4
ZOO := $(VENV)-zoo
CHAOS_PLANS := data=2 pipeline=2 data=2,pipeline=2 tensor=2 data=2,shard=parameters data=2,servers=2 data=2,every=3 \
	data=2,servers=1,staleness=2 pipeline=2,schedule=pipedream
FAULTS ?= 200
LAUNCHERS := --launcher own --launcher torchrun
WORKERS := tests/equivalence tests/runtime tests/planner tests/auto

.PHONY: install test test-workers test-alone test-all mutants fuzz check docs demo bench bench-tensor bench-balance bench-planner bench-scale bench-published \
	bench-transport bench-sync bench-sharded bench-memory bench-memory-limit bench-zero-bubble bench-gpipe bench-staleness bench-lengths \
	bench-checkpoints bench-audit bench-prepared bench-recordings bench-scripts bench-observing bench-batches trainings zoo gpu chaos clean

install: $(INSTALLED)

# The stamp is written last: an installation that was interrupted runs again.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
		sys.exit("polylane needs Python 3.11 or newer, and $(PYTHON) is %s: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" % v)'
	@test -x $(BIN)/pip || { echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing torch: 200 MB to download, or 3 GB where it comes with CUDA"
	@$(PIP) -r constraints.txt
	@echo "Installing polylane and what it needs: 60 MB"
	@$(PIP) -c constraints.txt -e .
	@echo "Installing what its tests and examples need: 70 MB"
	@$(PIP) -c constraints.txt -e '.[test]'
	@touch $@
	@echo "Done: everything is in $(VENV)"

check: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# Lint and types beside two halves of the tests, of about equal length: most of what starts workers, with the planner, and
# the rest. All three at a time, so that neither half begins later than the other.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory -j 3 -O check test-workers test-alone

test-workers: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider $(WORKERS)

test-alone: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider tests $(addprefix --ignore=,$(WORKERS))

test-all: check
	@$(BIN)/python -m pytest

# Deliberate bugs, one at a time: `verify` and the tests must notice each. `make mutants ARGS="--only dropped-send"`.
mutants: $(INSTALLED)
	@$(BIN)/python -m tests.mutants --jobs 2 $(ARGS)

# Wrong input by the thousand: each must end well, or in one sentence, within bounds. Others: `make fuzz ARGS="--seed 2"`.
fuzz: $(INSTALLED)
	@$(BIN)/python -m tests.fuzzing --inputs 1000 $(ARGS)

# The site of docs/, from the pages and the code; every warning is an error.
docs: $(INSTALLED)
	@$(BIN)/python -m tests.docs.generated_pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict
	@echo "The documentation: $(CURDIR)/run/site/index.html"

demo: $(INSTALLED)
	@$(BIN)/polylane train $(DEMO) --epochs $(EPOCHS) --run run/digits
	@$(BIN)/polylane verify $(DEMO) --steps 3
	@echo "The swimlanes of the run: $(CURDIR)/run/digits/swimlane.html"

# Each measures for minutes; `make bench ARGS=--quick` only shows that it works.
bench: $(INSTALLED)
	@$(BIN)/python -m benchmarks $(ARGS)
	@$(BIN)/python -m benchmarks.speed.utilization $(ARGS)

bench-tensor: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.tensor $(ARGS)

bench-balance: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.balance $(ARGS)

bench-transport: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.transport $(ARGS)

bench-sync: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.sync $(ARGS)

bench-sharded: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.sharded $(ARGS)

# Bytes that schedules keep alive; the picture of docs/results/benchmarks.md too.
bench-memory: $(INSTALLED)
	@$(BIN)/python -m benchmarks.memory.laws --plot docs/images/memory-laws.svg $(ARGS)

# Trains by a plan that `polylane plan --memory` found, where one device runs out of memory.
bench-memory-limit: $(INSTALLED)
	@$(BIN)/python -m benchmarks.memory.limit $(ARGS)

bench-zero-bubble: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.zero_bubble $(ARGS)

bench-gpipe: $(INSTALLED)
	@$(BIN)/python -m benchmarks.speed.gpipe $(ARGS)

bench-staleness: $(INSTALLED)
	@$(BIN)/python -m benchmarks.learning.staleness $(ARGS)

# Time to a loss by batch, and what the gradient noise scale says of it.
bench-batches: $(INSTALLED)
	@$(BIN)/python -m benchmarks.learning.batches $(ARGS)

# What a step costs on a length of text that is new, of an encoder of transformers.
bench-lengths: $(INSTALLED)
	@$(BIN)/python -m benchmarks.overhead.lengths $(ARGS)

# What a checkpoint costs the training that it is taken of.
bench-checkpoints: $(INSTALLED)
	@$(BIN)/python -m benchmarks.overhead.checkpoints $(ARGS)

# What the columns of observed steps cost: blocks of steps with them and without, in turns.
bench-observing: $(INSTALLED)
	@$(BIN)/python -m benchmarks.overhead.observing $(ARGS)

# What audits cost a training: a thousand steps with them and without, in turns.
bench-audit: $(INSTALLED)
	@$(BIN)/python -m benchmarks.overhead.audit $(ARGS)

# A prepared script's steps beside a plain loop's, and beside a Job's.
bench-prepared: $(INSTALLED)
	@$(BIN)/python -m benchmarks.overhead.prepared $(ARGS)

bench-planner: $(INSTALLED)
	@$(BIN)/python -m benchmarks.planner $(ARGS)

bench-scale: $(INSTALLED)
	@$(BIN)/python -m benchmarks.planner.scale $(ARGS)

# Measurements that others published, as files of a folder: `make bench-published FOLDER=measured`, or one of them, or
# any with such columns: `make bench-published FILE=other.csv`. With ARGS=--choose, FSDP's rows are not told how they ran.
bench-published: $(INSTALLED)
	@$(BIN)/python -m benchmarks.published $(FILE) $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

# Training scripts of others, plain and prepared: `make bench-scripts EXAMPLES=checkout ACCELERATE=checkout`.
bench-scripts: $(INSTALLED)
	@$(BIN)/python -m benchmarks.scripts $(EXAMPLES) $(ACCELERATE) $(ARGS)

# Hangs that others recorded, with the ranks at which they injected a fault: `make bench-recordings FOLDER=fr_traces`.
bench-recordings: $(INSTALLED)
	@$(BIN)/python -m benchmarks.published.flight_recordings $(FOLDER) $(ARGS)

# Every training of tests/equivalence/trainings by every plan, against a plain loop on one device
# (docs/explanation/exactness.md). Some of them: `make trainings ONLY="weighted_mean hf_causal"`.
trainings: $(INSTALLED)
	@$(BIN)/python -m tests.equivalence.same_numbers --told $(if $(ONLY),--only $(ONLY))

# Models of other packages, by seven plans each, held by verify against one device: docs/results/models.md. Some of them:
# `make zoo ARGS="--only GPT-2"`. Their packages go into an environment of their own, which sees polylane's.
zoo: $(ZOO)/.installed
	@$(ZOO)/bin/python -m benchmarks.zoo $(ARGS)

$(ZOO)/.installed: $(INSTALLED)
	@echo "Installing the packages of the zoo: 250 MB"
	@$(BIN)/python -m venv --clear $(ZOO)
	@$(ZOO)/bin/python benchmarks/zoo/set_up.py $(VENV)
	@$(ZOO)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[zoo]'
	@touch $@

# What a machine with a GPU can show: equality, plans on one device, memory, spans, speed; tables on the screen and in
# run/gpu. `make gpu INSTALL=no PYTHON=/path/to/python` takes a Python that has torch and what polylane needs already.
gpu: $(if $(filter no,$(INSTALL)),,$(INSTALLED))
	@PYTHONPATH=src $(if $(filter no,$(INSTALL)),$(PYTHON),$(BIN)/python) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(ARGS)

# Two hundred faults at random moments of trainings, by nine plans, over both transports, under both launchers: hours on
# a busy machine of two cores. Others: `make chaos FAULTS=40 ARGS="--seed 8 --only kill"`.
chaos: $(INSTALLED)
	@$(BIN)/python -m tests.chaos tests/support/recipes/small_network.py $(addprefix --plan ,$(CHAOS_PLANS)) --batch 16 $(LAUNCHERS) --seed 7 --faults $(FAULTS) $(ARGS)

# Everything that is made; the virtual environment too.
clean:
	@rm -rf $(VENV) $(ZOO) build dist run src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
