# Type `make` to see what there is. Every target installs by itself what it needs.

# In the environment, variables of these names belong to other programs.
OURS := ENV RUN RANK AT KILL DRY JSON MODE REPEATS STEPS EPOCHS WARMUP NETWORK MODEL OLD NEW ALLREDUCE TRIALS METRIC BATCH NAME DIR CKPT FORMAT MPI FOLLOW PYTHON STRATEGY LAUNCHER STOP_SECONDS
$(foreach name,$(OURS),$(if $(filter environment,$(origin $(name))),$(eval $(name) :=)$(eval unexport $(name))))

# KILL=0 means no.
$(foreach name,ENV KILL DRY JSON FOLLOW MPI,$(if $(filter 0 no false,$($(name))),$(eval override $(name) :=)))

# `python -m cluster...` needs this folder on its path, and the docstrings that it shows.
unexport PYTHONSAFEPATH PYTHONOPTIMIZE

# ARGS, changes to conf/, may have several lines: the shell of a recipe would run each as a command.
define NEWLINE


endef
ifneq ($(findstring $(NEWLINE),$(ARGS)),)
  override ARGS := $(subst $(NEWLINE), ,$(ARGS))
  export ARGS
endif

# For what needs no environment, which 3.9 can run: the python3 of a login node may be older.
ANY_PYTHON := $(shell for p in $(PYTHON) python3 .venv/bin/python python3.13 python3.12 python3.11 python3.10; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 && echo "$$p" && break; done)
ifeq ($(ANY_PYTHON),)
  $(error no Python of 3.9 or newer runs here; the environment needs 3.10 to 3.13: install one, or name it with PYTHON=)
endif

# torch asks who we are: in a container that may be a user without a name.
ifeq ($(USER)$(LOGNAME),)
  export USER := $(firstword $(shell id -un 2>/dev/null || id -u))
endif

# Where processes run, by NP, HOSTS and HOSTFILE; or what is wrong with the variables given.
WHERE := $(shell PYTHONSAFEPATH= $(ANY_PYTHON) -m cluster.variables '$(subst ','\'',$(MAKEOVERRIDES))' $(MAKELEVEL) '$(MAKECMDGOALS)')
ifneq ($(filter-out 0,$(.SHELLSTATUS)),)
  $(error the variables could not be checked)
endif
ifeq ($(firstword $(WHERE)),error:)
  $(error $(subst error: ,,$(WHERE)))
endif

# Seconds that ranks get for a checkpoint when told to stop:
STOP = $(if $(STOP_SECONDS), --stop-seconds $(STOP_SECONDS))

# Into which environment: .venv here, or that of the interpreter PYTHON.
ifeq ($(PYTHON),)
  override PYTHON := .venv/bin/python
  BIN := .venv/bin
  INSTALL := $(ANY_PYTHON) -m cluster.install
else
  BIN := $(patsubst %/,%,$(dir $(shell command -v $(PYTHON))))
  INSTALL := $(ANY_PYTHON) -m cluster.install --python $(PYTHON)
endif
MPI_FLAG := $(if $(MPI),--mpi)

# The command of a training, without its changes:
JOB = $(PYTHON) -m cluster.$(if $(filter mpi,$(LAUNCHER)),mpirun,horovodrun$(STOP)) $(WHERE) $(PYTHON) template.py

.DEFAULT_GOAL := help
.PHONY: help install environment dev-environment installed train sweep hello doctor sync launch status logs stop \
        profile new test test-slow test-gpu test-mutations check bench bench-check bench-readme \
        bench-step bench-step-slow bench-overheads bench-allreduce predict predict-proof \
        bench-losses bench-split bench-start export tensorboard clean

help: ## show this
	@echo 'make TARGET [NP=2] [HOSTS=node1:4,node2:4 | HOSTFILE=hosts.yaml] [ARGS="key=value ..."] [PYTHON=.venv/bin/python]'
	@awk -F ':.*## ' '/^#@ / {printf "\n%s\n", substr($$0, 4)} /^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

#@ Train

install: environment ## make .venv and build Horovod, once; MPI=1: with MPI too
	@echo 'Ready: $(PYTHON)'

environment:
	@$(INSTALL) $(MPI_FLAG)

dev-environment:
	@$(INSTALL) $(MPI_FLAG) --dev

installed:
	@$(PYTHON) -c 'import psutil' 2> /dev/null || { echo 'error: $(PYTHON): nothing is installed; make install does it' >&2; exit 2; }

train: environment ## train with NP processes on HOSTS; ARGS="model.lr=0.01" changes settings; STOP_SECONDS=8, LAUNCHER=mpi
	@$(PYTHON) -m runs.config $(ARGS)
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@printf '%s\n' '$(subst ','\'',$(JOB) $(ARGS))'
	@exec $(JOB) $(ARGS)

# ARGS by the environment: a shell would read model.lr=interval(1e-4,1e-1) as its own.
sweep: environment ## try several values: ARGS="model.lr=0.1,0.01"; or search: TRIALS=20, METRIC=test/acc, MODE=max
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@$(PYTHON) -m runs.sweep --arguments "$$ARGS" --trials "$(TRIALS)" --metric "$(METRIC)" --mode "$(MODE)" -- $(JOB)

tensorboard: environment ## show the curves of all runs in the browser
	@$(PYTHON) -m tensorboard.main --logdir logs $(ARGS)

export: environment ## write the trained model of CKPT= as one file that needs only torch; FORMAT=onnx: for ONNX
	@$(PYTHON) -m runs.export $(if $(FORMAT),--format $(FORMAT)) "$(CKPT)"

new: ## start a project of your own, a copy without our results: NAME=my_project, DIR=/data/mine
	@$(ANY_PYTHON) new.py "$(NAME)" "$(DIR)"

#@ On several hosts

hello: environment ## test Horovod: its ranks, messages between two of them, an all-reduce
	@$(PYTHON) -m cluster.horovodrun $(WHERE) $(PYTHON) -m cluster.exchange

doctor: environment ## find what keeps HOSTS from training together, and how to fix it; JSON=1
	@$(PYTHON) -m cluster.doctor $(WHERE) $(if $(JSON),--json)

sync: environment ## copy the code to HOSTS, and delete there what is not here; ENV=1: the environment too; DRY=1: only show
	@$(PYTHON) -m cluster.sync $(WHERE) $(if $(ENV),--env) $(if $(DRY),--dry-run)

launch: environment ## train on HOSTS in the background; AT=02:00: at that time
	@$(PYTHON) -m runs.config $(ARGS)
	@$(PYTHON) -m cluster.jobs launch $(if $(AT),--at "$(AT)")$(STOP) $(WHERE) $(PYTHON) template.py $(ARGS)

status: installed ## list launched runs; JSON=1
	@$(PYTHON) -m cluster.jobs status $(if $(JSON),--json)

logs: installed ## show what a launched run has printed; RUN=, RANK=0, FOLLOW=1
	@$(PYTHON) -m cluster.jobs logs $(if $(RUN),"$(RUN)") $(if $(RANK),--rank $(RANK)) $(if $(FOLLOW),--follow)

stop: installed ## end a launched run on all its hosts, with a checkpoint; RUN=; KILL=1: without one
	@$(PYTHON) -m cluster.jobs stop $(if $(RUN),"$(RUN)") $(if $(KILL),--kill)

#@ Measure

bench: dev-environment ## how training scales: NP="1 2 4", STRATEGY="horovod ddp", MODE=weak|strong|both, REPEATS=5, STEPS= or EPOCHS=, WARMUP=
	@$(PYTHON) -m benchmarks.scaling $(if $(NP),--np $(NP)) $(if $(HOSTS),-H "$(HOSTS)") \
	  $(if $(HOSTFILE),--hostfile "$(HOSTFILE)") $(if $(STRATEGY),--strategy $(STRATEGY)) \
	  $(if $(MODE),--mode $(MODE)) $(if $(REPEATS),--repeats $(REPEATS)) $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(WARMUP),--warmup $(WARMUP)) \
	  $(if $(NETWORK),--network "$(NETWORK)") -- $(ARGS)

bench-check: environment ## fail if one result of make bench is slower than another: OLD=, NEW=
	@$(PYTHON) -m benchmarks.check $(if $(OLD),"$(OLD)") $(if $(NEW),"$(NEW)")

bench-readme: dev-environment ## write the table of the README from the newest result of make bench
	@$(PYTHON) -m benchmarks.scaling_report

bench-losses: dev-environment ## compare the losses of one process, Horovod and DDP at the same global batch; NP="2 4"
	@$(PYTHON) -m benchmarks.losses $(if $(NP),--np $(NP)) \
	  $(if $(STEPS),--steps $(STEPS)) -- $(ARGS)

profile: dev-environment ## trace STEPS=10 steps on all ranks: a timeline, a table, a picture
	@$(PYTHON) -m benchmarks.profiling $(WHERE) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

bench-allreduce: dev-environment ## measure the bandwidth of all-reduces between HOSTS; NETWORK=25gbit names it
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@$(PYTHON) -m benchmarks.allreduce $(WHERE) $(if $(NETWORK),--network "$(NETWORK)") $(ARGS)

predict: dev-environment ## predict the step time on up to 4,096 ranks; RUN=, MODEL=resnet18, ALLREDUCE=, NP="2 8", NETWORK="rate=25gbit latency=20us"
	@$(PYTHON) -m benchmarks.predict $(if $(RUN),--run "$(RUN)") $(if $(MODEL),--model "$(MODEL)") \
	  $(if $(ALLREDUCE),--allreduce "$(ALLREDUCE)") $(if $(NETWORK),--network "$(NETWORK)") $(if $(NP),--ranks $(NP)) $(ARGS)

bench-step: environment ## time a step of this strategy, DDP and raw loops; ARGS="--models resnet18"
	@$(PYTHON) -m benchmarks.step --hosts "$(or $(HOSTS),localhost:$(or $(NP),2))" $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

bench-step-slow: environment ## the same over 500 Mbit/s, between 2 hosts simulated on this one (root)
	@$(PYTHON) cluster/testbed.py --rate 500mbit -- \
	  $(PYTHON) -m benchmarks.step --hosts node1:1,node2:1 --network 500mbit \
	  $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

bench-split: environment ## find when it pays to split a network over two devices; BATCH=128
	@$(PYTHON) -m benchmarks.split $(if $(BATCH),--batch $(BATCH)) $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) -- $(ARGS)

bench-start: environment ## time the start up to the first step, compared with plain horovodrun; NP="2 4 8"
	@$(PYTHON) -m benchmarks.start $(if $(NP),--np $(NP)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) -- $(ARGS)

bench-overheads: environment ## time launcher, collectives and log collection on 2 to 32 ranks
	@$(PYTHON) -m benchmarks.overheads $(if $(NP),--ranks $(NP)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

predict-proof: dev-environment ## check predictions against measurements, on hosts simulated on this one (root)
	@$(PYTHON) -m benchmarks.predict_proof $(ARGS)

#@ Develop

check: dev-environment ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: dev-environment ## run the tests; some of them: ARGS="-k strategy"
	@$(PYTHON) -m pytest $(ARGS)

test-slow: dev-environment ## train laptop-sized jobs to their expected results, and other long tests (24 minutes)
	@$(PYTHON) -m pytest -m slow $(ARGS)

test-gpu: dev-environment ## test the strategy, a job and the benchmark of a step on the GPUs of this host
	@$(PYTHON) -m pytest -m gpu tests/test_gpu.py $(ARGS)

test-mutations: dev-environment ## break the code in many places and see tests fail (an hour)
	@$(PYTHON) tests/mutations.py $(ARGS)

clean: ## remove caches, but not logs, data or .venv
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
