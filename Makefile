# Sets up, tests and shows polylane. `make demo` and `make test` need nothing but Python >= 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Which torch, and other exact versions: `make test CONSTRAINTS=FILE` takes others.
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

DEMO := examples/digits.py --workers 4 --plan data=2,pipeline=2
EPOCHS ?= 4
ZOO := $(VENV)-zoo
KERNELS := $(VENV)/.kernels
CHAOS_PLANS := data=2 pipeline=2 data=2,pipeline=2 tensor=2 data=2,shard=parameters data=2,servers=2 data=2,every=3 \
	data=2,servers=1,staleness=2 pipeline=2,schedule=pipedream
FAULTS ?= 200
LAUNCHERS := --launcher own --launcher torchrun
WORKERS := tests/equivalence tests/runtime tests/planner tests/auto tests/script tests/distributed

.DEFAULT_GOAL := help
.PHONY: help package install quick test test-workers test-alone test-all mutants fuzz check docs pictures demo bench bench-choosing \
	bench-tensor bench-balance bench-planner bench-scale bench-published bench-transport bench-hosts bench-sync bench-sharded bench-memory bench-memory-limit bench-zero-bubble bench-gpipe bench-staleness bench-lengths \
	bench-checkpoints bench-audit bench-prepared bench-recordings bench-scripts bench-observing bench-batches trainings zoo gpu gpus chaos clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Set up .venv with polylane and all that its tests, docs and examples need

# The stamp is written last: an installation that was interrupted runs again.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or \
		sys.exit("polylane needs Python 3.11 or newer, and $(PYTHON) is %s: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" % v)'
	@test -x $(BIN)/pip || { echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing torch: 200 MB to download, or 3 GB where it comes with CUDA"
	@$(PIP) -r $(CONSTRAINTS)
	@echo "Installing polylane and what it needs: 60 MB"
	@$(PIP) -c $(CONSTRAINTS) -e .
	@echo "Installing what its tests and examples need: 70 MB"
	@$(PIP) -c $(CONSTRAINTS) -e '.[test]'
	@touch $@
	@echo "Done: everything is in $(VENV)"

check: $(INSTALLED) ## Lint and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

quick: $(INSTALLED) ## In a minute, what guards the files that differ from main; ARGS="--seconds 120 BASE"
	@$(BIN)/python -m tests.support.quick $(ARGS)

# Lint and types beside two halves of the tests, of about equal length: most of what starts workers, with the planner, and
# the rest. All three at a time, so that neither half begins later than the other.
test: $(INSTALLED) ## Lint, types and all tests that are not slow
	@$(MAKE) --no-print-directory -j 3 -O check test-workers test-alone

test-workers: $(INSTALLED) ## The half of the tests that starts most workers
	@$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider $(WORKERS)

test-alone: $(INSTALLED) ## The other half
	@$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider tests $(addprefix --ignore=,$(WORKERS))

test-all: check $(KERNELS) ## All tests, the slow ones too
	@$(BIN)/python -m pytest

$(KERNELS): $(INSTALLED)
	@echo "Installing Triton, whose interpreter runs the kernels of GPUs, and Ray: 390 MB"
	@$(PIP) -c $(CONSTRAINTS) -e '.[kernels,ray]'
	@touch $@

mutants: $(INSTALLED) ## Plant bugs, one at a time, which verify and the tests must notice (an hour); ARGS="--only dropped-send"
	@$(BIN)/python -m tests.mutants --jobs 2 $(ARGS)

fuzz: $(INSTALLED) ## A thousand wrong inputs, each of which must end well or in one sentence; ARGS="--seed 2"
	@$(BIN)/python -m tests.fuzzing --inputs 1000 $(ARGS)

docs: $(INSTALLED) ## Build the documentation as a site into run/site
	@$(BIN)/python -m tests.docs.generated_pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The documentation: $(CURDIR)/run/site/index.html"

package: $(INSTALLED) ## Build the wheel and the source archive into dist, and train from the wheel in an empty environment
	@rm -rf dist build/empty
	@$(BIN)/python -m build --outdir dist
	@$(PYTHON) -m venv build/empty
	@build/empty/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) dist/*.whl
	@cp examples/gpt.py build && cd build && empty/bin/polylane train gpt.py --set layers=2 --workers 2 --plan pipeline=2 --steps 5 --run trained

# Those of `lanes` are the same on any machine. ARGS=all predicts and measures the others again, too.
pictures: $(INSTALLED) ## Draw the pictures that commands in docs/ draw; ARGS=all the predicted and measured ones too
	@$(BIN)/python -m tests.docs.pictures $(ARGS)
	@$(if $(filter all,$(ARGS)),$(BIN)/python -m benchmarks.speed.sync --lanes docs/images/swimlanes)

demo: $(INSTALLED) ## Train a small ResNet on four workers, and prove it equal to one
	@$(BIN)/polylane train $(DEMO) --epochs $(EPOCHS) --run run/digits
	@$(BIN)/polylane verify $(DEMO) --steps 3
	@echo "The page of the run: $(CURDIR)/run/digits/report.html"

bench: $(INSTALLED) ## Two workers against one, two threads and torch's own, and utilization; ARGS=--quick for any bench
	@$(BIN)/python -m benchmarks $(ARGS)
	@$(BIN)/python -m benchmarks.speed.utilization $(ARGS)

bench-choosing: $(INSTALLED) ## Ways to split a model of many weights and one of much computing
	@$(BIN)/python -m benchmarks.speed.choosing $(ARGS)

bench-tensor: $(INSTALLED) ## Operators split over two workers, beside DTensor
	@$(BIN)/python -m benchmarks.speed.tensor $(ARGS)

bench-balance: $(INSTALLED) ## Stages of unequal cost
	@$(BIN)/python -m benchmarks.speed.balance $(ARGS)

bench-transport: $(INSTALLED) ## Shared memory against gloo
	@$(BIN)/python -m benchmarks.speed.transport $(ARGS)

bench-hosts: $(INSTALLED) ## What pays between two hosts over a slow link; needs root
	@$(BIN)/python -m benchmarks.speed.hosts $(ARGS)

bench-sync: $(INSTALLED) ## Every way in which replicas agree
	@$(BIN)/python -m benchmarks.speed.sync $(ARGS)

bench-sharded: $(INSTALLED) ## Sharded replicas beside DDP and FSDP2
	@$(BIN)/python -m benchmarks.speed.sharded $(ARGS)

bench-memory: $(INSTALLED) ## Bytes that schedules keep alive, and their picture
	@$(BIN)/python -m benchmarks.memory.laws --plot docs/images/memory-laws.svg $(ARGS)

bench-memory-limit: $(INSTALLED) ## A plan trains where one device runs out of memory
	@$(BIN)/python -m benchmarks.memory.limit $(ARGS)

bench-zero-bubble: $(INSTALLED) ## Zero-bubble schedules beside torch's
	@$(BIN)/python -m benchmarks.speed.zero_bubble $(ARGS)

bench-gpipe: $(INSTALLED) ## Pipelines beside torchgpipe
	@$(BIN)/python -m benchmarks.speed.gpipe $(ARGS)

bench-staleness: $(INSTALLED) ## How stale weights learn
	@$(BIN)/python -m benchmarks.learning.staleness $(ARGS)

bench-batches: $(INSTALLED) ## Time to a loss by batch, beside what the gradient noise scale says
	@$(BIN)/python -m benchmarks.learning.batches $(ARGS)

bench-lengths: $(INSTALLED) ## Steps on a length of text that is new
	@$(BIN)/python -m benchmarks.overhead.lengths $(ARGS)

bench-checkpoints: $(INSTALLED) ## What a checkpoint costs its training
	@$(BIN)/python -m benchmarks.overhead.checkpoints $(ARGS)

bench-observing: $(INSTALLED) ## What the columns of observed steps cost
	@$(BIN)/python -m benchmarks.overhead.observing $(ARGS)

bench-audit: $(INSTALLED) ## What audits cost
	@$(BIN)/python -m benchmarks.overhead.audit $(ARGS)

bench-prepared: $(INSTALLED) ## Prepared scripts beside plain loops and a Job
	@$(BIN)/python -m benchmarks.overhead.prepared $(ARGS)

bench-planner: $(INSTALLED) ## Predicted beside measured steps on this machine
	@$(BIN)/python -m benchmarks.planner $(ARGS)

bench-scale: $(INSTALLED) ## How long planning takes as models and clusters grow
	@$(BIN)/python -m benchmarks.planner.scale $(ARGS)

bench-published: $(INSTALLED) ## Predictions beside published measurements; FOLDER=measured or FILE=rows.csv, ARGS=--choose
	@$(BIN)/python -m benchmarks.published $(FILE) $(if $(FOLDER),--folder $(FOLDER)) $(ARGS)

bench-scripts: $(INSTALLED) ## Scripts of others, plain and prepared; EXAMPLES=checkout ACCELERATE=checkout
	@$(BIN)/python -m benchmarks.scripts $(EXAMPLES) $(ACCELERATE) $(ARGS)

bench-recordings: $(INSTALLED) ## Hangs that others recorded; FOLDER=fr_traces
	@$(BIN)/python -m benchmarks.published.flight_recordings $(FOLDER) $(ARGS)

trainings: $(INSTALLED) ## Every training of the tests by every plan, against a plain loop; ONLY="weighted_mean hf_causal"
	@$(BIN)/python -m tests.equivalence.same_numbers --told $(if $(ONLY),--only $(ONLY))

zoo: $(ZOO)/.installed ## Models of other packages by seven plans each, into docs/results/models.md; ARGS="--only GPT-2"
	@$(ZOO)/bin/python -m benchmarks.zoo $(ARGS)

$(ZOO)/.installed: $(INSTALLED)
	@echo "Installing the packages of the zoo: 250 MB"
	@$(BIN)/python -m venv --clear $(ZOO)
	@$(ZOO)/bin/python benchmarks/zoo/set_up.py $(VENV)
	@$(ZOO)/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[zoo]'
	@touch $@

gpu: $(if $(filter no,$(INSTALL)),,$(INSTALLED)) ## What a machine with a GPU can show; INSTALL=no PYTHON=/path/to/python to use a Python as it is
	@PYTHONPATH=src $(if $(filter no,$(INSTALL)),$(PYTHON),$(BIN)/python) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(ARGS)

gpus: $(if $(filter no,$(INSTALL)),,$(INSTALLED)) ## What a machine with several GPUs can show, in ten minutes; INSTALL=no as for gpu
	@PYTHONPATH=src $(if $(filter no,$(INSTALL)),$(PYTHON),$(BIN)/python) -m benchmarks.gpu.several $(ARGS)

chaos: $(INSTALLED) ## Faults at random moments of trainings (hours); FAULTS=40 ARGS="--seed 8 --only kill"
	@$(BIN)/python -m tests.chaos tests/support/recipes/small_network.py $(addprefix --plan ,$(CHAOS_PLANS)) --batch 16 $(LAUNCHERS) --seed 7 --faults $(FAULTS) $(ARGS)

clean: ## Remove everything that is made, .venv too
	@rm -rf $(VENV) $(ZOO) build dist run src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
