# Type `make` to see what there is. Every target installs by itself what it needs.

# What to run on, how many processes, and with which changes to conf/:
ARGS ?=
ifneq ($(origin NP),undefined)
  ifeq ($(shell echo ' $(NP) ' | grep -Ex '( *[1-9][0-9]*)+ *'),)
    $(error NP=$(NP): give a number of processes, as NP=2)
  endif
endif
# ARGS may have several lines: the shell of a recipe would run each as a command of its own.
define NEWLINE


endef
ifneq ($(findstring $(NEWLINE),$(ARGS)),)
  override ARGS := $(subst $(NEWLINE), ,$(ARGS))
  export ARGS
endif
# make would take $HOME for $(H)OME, and the shell what follows a semicolon for a command.
ifneq ($(findstring $$,$(subst $$$$,,$(value ARGS))),)
  $(error ARGS has a $$, which make would take: ARGS="..." has your shell fill a variable in; for Hydra, within single quotes, it is '$$$${seed}')
endif
ifneq ($(filter %;,$(ARGS)),)
  $(error ARGS=$(ARGS): write changes with blanks between, not semicolons)
endif
ifeq ($(origin HOSTS)$(HOSTS),command line)
  $(error HOSTS=: give hosts, as HOSTS=node1:4,node2:4)
endif
HOSTS_ARE := $(firstword $(origin HOSTS))
# A list may be written with blanks after its commas.
COMMA := ,
ifdef HOSTS
  override HOSTS := $(subst $(COMMA) ,$(COMMA),$(HOSTS))
endif
ifneq ($(or $(word 2,$(HOSTS)),$(findstring ;,$(HOSTS)),$(findstring &,$(HOSTS)),$(findstring |,$(HOSTS))),)
  $(error HOSTS=$(HOSTS): write name:slots, with commas between, as node1:4,node2:4)
endif
# Sizes and hosts of make bench: as given, before they get their defaults.
SIZES := $(if $(NP),--np $(NP)) $(if $(HOSTFILE),--hostfile "$(HOSTFILE)") $(if $(HOSTS),-H $(HOSTS))
ONE_SIZE = $(if $(word 2,$(NP)),$(error NP="$(NP)": give one number of processes; several are for make bench))
ifdef HOSTFILE
  WHERE = $(ONE_SIZE) $(if $(NP),-np $(NP)) --hostfile "$(HOSTFILE)" $(if $(HOSTS),-H $(HOSTS))
else
  WHERE = $(ONE_SIZE)-np $(NP) -H $(HOSTS)
ifdef HOSTS
  NP ?= $(shell echo '$(HOSTS)' | tr ',' '\n' | awk -F: '{n += $$2 ? $$2 : 1} END {print n}')
else
  # Two processes, but on a host with a single GPU, or where one is visible, one: a rank needs its own.
  # nvidia-smi lists the parts of a GPU (MIG) below it, of which a process sees one.
  VISIBLE = listed=$${CUDA_VISIBLE_DEVICES-$$(seq -s, 99)}; echo "$$listed" | tr , '\n' | grep -c '^[^-]'
ifndef NP
  # Asked once, and not by who looks or stops: it takes seconds, or for ever where a driver hangs.
  NP = $(eval NP := $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep ^GPU | head -n $$($(VISIBLE)) | wc -l)),1,2))$(NP)
endif
  HOSTS = localhost:$(NP)
endif
endif

# Seconds that ranks get for a checkpoint when told to stop:
STOP = $(if $(STOP_SECONDS), --stop-seconds $(STOP_SECONDS))

# Variables of these names in the environment mean other things there.
OURS := ENV RUN RANK AT KILL DRY JSON MODE REPEATS STEPS EPOCHS WARMUP NETWORK OLD NEW ALLREDUCE TRIALS METRIC BATCH NAME DIR CKPT FORMAT
$(foreach name,$(OURS),$(if $(filter environment,$(origin $(name))),$(eval $(name) :=)$(eval unexport $(name))))

# KILL=0 is no.
$(foreach name,ENV KILL DRY JSON FOLLOW MPI,$(if $(filter 0 no false,$($(name))),$(eval override $(name) :=)))

# Before anything is installed: make takes model.lr=0.1 and DRY_RUN=1 for variables of its own, which
# nothing reads.
KNOWN := ARGS NP HOSTS HOSTFILE PYTHON STOP_SECONDS STRATEGY LAUNCHER FOLLOW MPI INSTALL $(OURS)
ENVIRONMENT := WHEELS FORWARD PRELOAD HOROVOD_% NCCL_% GLOO_% UCX_% CUDA_% OMP_% MKL_% OPENBLAS_% TORCH% \
  PYTORCH_% PL_% HYDRA_% PIP_% CXX SHELL MAKEFLAGS __BASH_MAKE_COMPLETION__
ifeq ($(MAKELEVEL),0) # another Makefile hands on its own
$(foreach name,$(filter-out $(KNOWN) $(ENVIRONMENT),$(.VARIABLES)),\
  $(if $(filter command,$(firstword $(origin $(name)))),\
    $(error $(name)=$($(name)): no variable of this Makefile, see make help; changes to conf/ go into \
      ARGS="key=value ...", variables for the environment before make)))
endif
ifneq ($(filter train launch sweep profile,$(MAKECMDGOALS)),)
  $(if $(filter command,$(firstword $(origin STRATEGY))),$(error STRATEGY=$(STRATEGY): it belongs to make bench; here write ARGS="strategy=$(STRATEGY)"))
endif
ifneq ($(filter command,$(origin LAUNCHER)),)
  $(if $(filter-out mpi,$(LAUNCHER)),$(error LAUNCHER=$(LAUNCHER): there is mpi; leave it out for our own))
  $(if $(filter-out train sweep,$(MAKECMDGOALS)),$(error LAUNCHER=$(LAUNCHER): it is of make train and make sweep))
endif
ifneq ($(filter export,$(MAKECMDGOALS)),)
  $(if $(CKPT),,$(error CKPT=: give a checkpoint, as CKPT=logs/.../checkpoints/last.ckpt))
endif
$(if $(filter bench-step,$(MAKECMDGOALS)),$(ONE_SIZE))
# What each takes of CHECKED; make would hand on nothing else, without a word.
CHECKED := NP HOSTS HOSTFILE STRATEGY MODE REPEATS STEPS EPOCHS WARMUP NETWORK BATCH RUN ALLREDUCE OLD NEW TRIALS METRIC ARGS
TAKES_train := NP HOSTS HOSTFILE LAUNCHER STOP_SECONDS
TAKES_launch := NP HOSTS HOSTFILE AT STOP_SECONDS
TAKES_sweep := NP HOSTS HOSTFILE TRIALS METRIC MODE LAUNCHER STOP_SECONDS
TAKES_profile := NP HOSTS HOSTFILE STEPS
TAKES_predict := RUN ALLREDUCE NETWORK NP
TAKES_bench-check := OLD NEW
TAKES_bench-readme := nothing
TAKES_bench := NP HOSTS HOSTFILE STRATEGY MODE REPEATS STEPS EPOCHS WARMUP NETWORK
TAKES_bench-step := $(if $(filter override,$(origin HOSTS)),HOSTS,NP) REPEATS
TAKES_bench-step-slow := REPEATS
TAKES_bench-overheads := NP REPEATS
TAKES_bench-allreduce := NP HOSTS HOSTFILE NETWORK
TAKES_bench-split := BATCH STEPS REPEATS
TAKES_bench-start := NP REPEATS
TAKES_bench-losses := NP STEPS
NO_ARGS := bench-check bench-readme
# What one of several goals takes is not lost: make bench bench-readme NP="1 2".
TAKEN := $(foreach goal,$(MAKECMDGOALS),$(TAKES_$(goal))) $(if $(filter-out $(NO_ARGS),$(MAKECMDGOALS)),ARGS) \
  $(if $(filter hello doctor sync,$(MAKECMDGOALS)),NP HOSTS HOSTFILE) $(if $(filter logs stop,$(MAKECMDGOALS)),RUN)
GIVEN = $(filter command override,$(if $(filter HOSTS,$(1)),$(HOSTS_ARE),$(firstword $(origin $(1)))))
$(foreach goal,$(MAKECMDGOALS),$(if $(TAKES_$(goal)),\
  $(foreach name,$(filter-out $(TAKEN),$(CHECKED)),$(if $(call GIVEN,$(name)),\
    $(error $(name)=$($(name)): make $(goal) takes $(TAKES_$(goal))$(if $(filter $(NO_ARGS),$(goal)),, and ARGS))))))
ifneq ($(filter bench-check,$(MAKECMDGOALS)),)
  $(if $(and $(OLD),$(NEW)),,$(error OLD=$(OLD) NEW=$(NEW): give two files of benchmarks/results/))
endif

# Into which environment: .venv here, or that of the interpreter PYTHON.
ifeq ($(PYTHON),)
  override PYTHON := .venv/bin/python
  BIN := .venv/bin
  INSTALL := python3 -m cluster.install
else
  BIN := $(patsubst %/,%,$(dir $(shell command -v $(PYTHON))))
  INSTALL := $(PYTHON) -m cluster.install --python $(PYTHON)
endif
MPI_FLAG := $(if $(MPI),--mpi)

# A training, but for its changes:
JOB = $(PYTHON) -m cluster.$(if $(filter mpi,$(LAUNCHER)),mpirun,horovodrun$(STOP)) $(WHERE) $(PYTHON) template.py

.DEFAULT_GOAL := help
.PHONY: help install environment dev-environment train sweep hello doctor sync launch status logs stop \
        profile new test test-slow test-gpu test-mutations check bench bench-check bench-readme \
        bench-step bench-step-slow bench-overheads bench-allreduce predict predict-proof \
        bench-losses bench-split bench-start export tensorboard clean

help: ## show this
	@echo 'make TARGET [NP=2] [HOSTS=node1:4,node2:4 | HOSTFILE=hosts.yaml] [ARGS="key=value ..."] [PYTHON=.venv/bin/python]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: environment ## make .venv and build Horovod, once; MPI=1 with MPI too
	@echo 'Ready: $(PYTHON)'

environment:
	@$(INSTALL) $(MPI_FLAG)

dev-environment:
	@$(INSTALL) $(MPI_FLAG) --dev

train: environment ## train: NP processes on HOSTS, changed by ARGS (ARGS="model.lr=0.01"); STOP_SECONDS=8, LAUNCHER=mpi
	@$(PYTHON) -m runs.config $(ARGS)
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@printf '%s\n' '$(subst ','\'',$(JOB) $(ARGS))'
	@exec $(JOB) $(ARGS)

# ARGS by the environment: a shell would read model.lr=interval(1e-4,1e-1) as its own.
sweep: environment ## train with each of several values: make sweep ARGS="model.lr=0.1,0.01"; TRIALS=20 (more go on), METRIC=, MODE=max
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@$(PYTHON) -m runs.sweep --arguments "$$ARGS" --trials "$(TRIALS)" --metric "$(METRIC)" --mode "$(MODE)" -- $(JOB)

hello: environment ## see that Horovod works: each rank, messages between two, an all-reduce
	@$(PYTHON) -m cluster.horovodrun $(WHERE) $(PYTHON) -m cluster.exchange

doctor: environment ## find what keeps HOSTS from training together, and how to fix it; JSON=1
	@$(PYTHON) -m cluster.doctor $(WHERE) $(if $(JSON),--json)

sync: environment ## copy the code to HOSTS, delete there what is deleted here; ENV=1 the environment too; DRY=1 only look
	@$(PYTHON) -m cluster.sync $(WHERE) $(if $(ENV),--env) $(if $(DRY),--dry-run)

launch: environment ## train on HOSTS in the background; AT=02:00 starts it then
	@$(PYTHON) -m runs.config $(ARGS)
	@$(PYTHON) -m cluster.jobs launch $(if $(AT),--at "$(AT)")$(STOP) $(WHERE) $(PYTHON) template.py $(ARGS)

status: ## list launched runs
	@$(PYTHON) -m cluster.jobs status $(if $(JSON),--json)

logs: ## show what a run printed; RUN=, RANK=0, FOLLOW=1
	@$(PYTHON) -m cluster.jobs logs $(if $(RUN),"$(RUN)") $(if $(RANK),--rank $(RANK)) $(if $(FOLLOW),--follow)

stop: ## end a run on all hosts, after a checkpoint; RUN=, KILL=1 without one
	@$(PYTHON) -m cluster.jobs stop $(if $(RUN),"$(RUN)") $(if $(KILL),--kill)

profile: dev-environment ## trace STEPS=10 steps on all ranks: one timeline, a table, a picture
	@$(PYTHON) -m benchmarks.profiling $(WHERE) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

new: ## start a project of your own in ../NAME, a copy without our results; or in DIR=/data/mine
	@python3 new.py "$(NAME)" "$(DIR)"

test: dev-environment ## run the tests; some of them: make test ARGS="-k strategy"
	@$(PYTHON) -m pytest $(ARGS)

test-slow: dev-environment ## train laptop-sized jobs to their expected results (16 minutes)
	@$(PYTHON) -m pytest -m slow $(ARGS)

test-gpu: dev-environment ## the strategy, a job and the benchmark of a step on the GPUs of this host
	@$(PYTHON) -m pytest -m gpu tests/test_gpu.py $(ARGS)

test-mutations: dev-environment ## break the code in many places and see tests fail (an hour)
	@$(PYTHON) tests/mutations.py $(ARGS)

check: dev-environment ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: dev-environment ## how training scales: NP="1 2 4" STRATEGY="horovod ddp" MODE=weak|strong|both; REPEATS=5, STEPS= or EPOCHS=, WARMUP=
	@$(PYTHON) -m benchmarks.scaling $(SIZES) $(if $(STRATEGY),--strategy $(STRATEGY)) \
	  $(if $(MODE),--mode $(MODE)) $(if $(REPEATS),--repeats $(REPEATS)) $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(EPOCHS),--epochs $(EPOCHS)) $(if $(WARMUP),--warmup $(WARMUP)) \
	  $(if $(NETWORK),--network "$(NETWORK)") -- $(ARGS)

bench-check: environment ## fail if one result of make bench is slower than another: OLD=, NEW=
	@$(PYTHON) -m benchmarks.check $(OLD) $(NEW)

bench-readme: dev-environment ## write the README's table from the newest result of make bench
	@$(PYTHON) -m benchmarks.scaling_report --readme

bench-step: environment ## time a step beside DDP and raw loops; ARGS="--models resnet18"
	@$(PYTHON) -m benchmarks.step --hosts $(or $(HOSTS),localhost:$(or $(NP),2)) $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

bench-step-slow: environment ## the same over 500 Mbit/s between 2 hosts made of this one (root)
	@$(PYTHON) cluster/testbed.py --rate 500mbit -- \
	  $(PYTHON) -m benchmarks.step --hosts node1:1,node2:1 --network 500mbit \
	  $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

bench-overheads: environment ## what launcher, collectives and log collection cost on 2 to 32 ranks
	@$(PYTHON) -m benchmarks.overheads $(if $(filter command environment,$(origin NP)),--ranks $(NP)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) $(ARGS)

bench-allreduce: dev-environment ## all-reduce bandwidth between HOSTS by size; NETWORK=25gbit names it
	@$(PYTHON) -m cluster.doctor --quick $(WHERE)
	@$(PYTHON) -m benchmarks.allreduce $(WHERE) $(if $(NETWORK),--network "$(NETWORK)") $(ARGS)

predict: dev-environment ## step time on up to 4,096 ranks; RUN=, ALLREDUCE=, NP="2 8", NETWORK="rate=25gbit latency=20us"
	@$(PYTHON) -m benchmarks.predict $(if $(RUN),--run "$(RUN)") $(if $(ALLREDUCE),--allreduce "$(ALLREDUCE)") \
	  $(if $(NETWORK),--network "$(NETWORK)") $(if $(filter command environment,$(origin NP)),--ranks "$(NP)") $(ARGS)

predict-proof: dev-environment ## check predictions against measurements, on hosts made of this one (root)
	@$(PYTHON) -m benchmarks.predict_proof $(ARGS)

bench-split: environment ## when splitting a network over two devices pays: a table; BATCH=128
	@$(PYTHON) -m benchmarks.split $(if $(BATCH),--batch $(BATCH)) $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) -- $(ARGS)

bench-start: environment ## time from launch to first step, beside plain horovodrun; NP="2 4 8"
	@$(PYTHON) -m benchmarks.start $(if $(filter command environment,$(origin NP)),--np $(NP)) \
	  $(if $(REPEATS),--repeats $(REPEATS)) -- $(ARGS)

bench-losses: dev-environment ## losses of one process, Horovod and DDP at the same global batch; NP="2 4"
	@$(PYTHON) -m benchmarks.losses $(if $(filter command environment,$(origin NP)),--np $(NP)) \
	  $(if $(STEPS),--steps $(STEPS)) -- $(ARGS)

export: environment ## write a trained model beside CKPT= as one file that needs torch alone; FORMAT=pt2|onnx
	@$(PYTHON) -m runs.export $(if $(FORMAT),--format $(FORMAT)) "$(CKPT)"

tensorboard: environment ## show the curves of all runs in the browser
	@$(BIN)/tensorboard --logdir logs $(ARGS)

clean: ## remove caches (not logs, data or .venv)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
