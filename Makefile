# Every target makes .venv by itself: Python 3.11 or later, make and git are all a fresh clone needs.
# Stamps in .venv say what it holds; nothing is installed again while the locks are unchanged.

PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
UNIT := not (engine or ray or prefect or cloud or browser or gpu or slow)
# Two workers, each file in one of them, so that what a file shares is started once; long files first.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
BIN := .venv/bin
# The console scripts that tests start (ray, prefect, moto_server, s5cmd) come from .venv.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
ARGS ?=

# Nothing that we start reports home.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export RAY_USAGE_STATS_ENABLED := 0
# A dozen processes import the same libraries; without byte code each takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check bench format engine lock clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    the whole product on this machine, with real parts'
	@echo 'make test    all tests; ARGS="-k name" is handed to pytest'
	@echo 'make check   format, lint, spelling, types, layers and unit tests, in under a minute'
	@echo 'make bench   the numbers that the README and the ADRs quote; QUICK=1 tries it, ONLY="publish resume" selects'
	@echo 'make format  put the code in the shape that check asks for'
	@echo 'make lock    write requirements/*.txt anew; ARGS=--upgrade lifts the pins'
	@echo 'make clean   remove all that these commands made, .venv too'

# --- commands ---------------------------------------------------------------------------------------------------------

demo: .venv/.base
	@$(try_engine); $(RUN) -m tests.real.demo $(ARGS)

# In CI a run without the engine would look green and show little, so there it fails unless it is asked for.
test: .venv/.base
	@$(try_engine); \
	if [ "$$engine" = no ] && [ "$${CI:-}" = true ] && [ "$${LLM_PREFETCH_ALLOW_NO_ENGINE:-}" != 1 ]; then \
		echo 'test: in CI the engine must be there; LLM_PREFETCH_ALLOW_NO_ENGINE=1 allows its absence' >&2; exit 1; fi; \
	if [ "$$engine" = no ]; then set -- -m 'not engine'; else set --; fi; \
	$(RUN) -m pytest $(TWO) "$$@" $(ARGS)

check: .venv/.base
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@echo 'pytest -n 4 -m "$(UNIT)"'; $(RUN) -m pytest -q -n 4 -m "$(UNIT)" $(ARGS)

# Half an hour and 16 GB of disk; ARGS=--write puts the tables and the plot into docs.
bench: .venv/.base
	@$(RUN) -m tests.bench $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(ARGS)

format: .venv/.base
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

engine: .venv/.engine

lock: .venv/.uv
	requirements/lock.sh $(ARGS)

clean:
	rm -rf .venv .demo .bench build dist *.egg-info .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environment ------------------------------------------------------------------------------------------------------

# Sets $engine to yes or no; where it is no, one line says why and the run goes on without.
define try_engine
if $(MAKE) --no-print-directory --question .venv/.engine 2>/dev/null; then engine=yes; \
else \
	echo 'installing the engine, vLLM for CPUs (the first time up to 1 GB is fetched)'; \
	if $(MAKE) --no-print-directory --silent .venv/.engine >.venv/engine.log 2>&1; then engine=yes; \
	else engine=no; echo "going on without the engine, which cannot be installed:" \
		"$$(grep -v '^make' .venv/engine.log | tail -n 6 | tr -s '[:space:]' ' ')" >&2; fi; \
fi
endef

# The installer: pip puts uv in .venv.
.venv/.uv: requirements/uv.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or later is needed; name it with make PYTHON=...' >&2; exit 1; }
	@echo 'making .venv with $(PYTHON)'
	@"$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

# Everything but the engine. Takes the engine out, so its stamp, older now, no longer counts.
.venv/.locked: requirements/base.txt .venv/.uv
	@echo 'installing requirements/base.txt'
	@requirements/sync.sh base
	@touch $@

# The project itself, editable: done anew when its metadata changes.
.venv/.base: pyproject.toml .venv/.locked requirements/sync.sh
	@requirements/sync.sh project
	@touch $@

# Everything, the engine too.
.venv/.engine: requirements/engine.txt .venv/.locked | .venv/.base
	@requirements/sync.sh engine
	@touch $@
