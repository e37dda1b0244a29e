# JAX=version tests against that jax in an environment of its own; PYTHON=path names the interpreter to build with.
JAX ?=
PYTHON ?=
ARGS ?=
ENV := $(if $(JAX),.venv-jax-$(JAX),.venv)
BIN := $(ENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c $(ENV)/constraints.txt
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help .venv demo test lint pitfalls clean

help: ## list the targets
	@sed -n 's/^\([.a-z]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-14s %s\n' "$$target" "$$text"; done
	@echo "JAX=0.12.0.1 runs any of them on that jax, in .venv-jax-0.12.0.1; ARGS='-k name' goes to pytest or the demo"

.venv: $(ENV)/.stamp ## build the environment, where pyproject.toml or constraints.txt changed since the last time

# An environment cannot be moved, so it is built in place and counts as built only once the stamp is there.
# Of pip's many lines those on large files are shown and, after an error, all.
$(ENV)/.stamp: pyproject.toml constraints.txt
	@python=$$(sh scripts/find_python.sh) || exit 2; \
	echo "Building $(ENV) with $$python; this takes a few minutes"; \
	rm -rf $(ENV); \
	trap 'rm -rf $(ENV); exit 130' INT TERM; \
	"$$python" -m venv $(ENV) && \
	sed -e '' $(if $(JAX),-e '/^jax==/s/=.*/==$(JAX)/' -e '/^jaxlib==/d') constraints.txt > $(ENV)/constraints.txt && \
	{ \
		$(PIP) -q setuptools && $(PIP) --no-build-isolation -e '.[dev]' && touch $@; \
	} 2>&1 | sed -u -e '/^ERROR/,$$b' -e '/ MB)/!d'; \
	test -e $@ || { rm -rf $(ENV); echo "error: $(ENV) could not be built" >&2; exit 2; }

demo: .venv ## train and sample a toy model
	@$(BIN)/dsv41 demo $(ARGS)

test: .venv ## run the tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: .venv ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

pitfalls: .venv ## list which tests cover which kind of defect
	@$(BIN)/python -m pytest -q --pitfalls

clean: ## remove environments and caches
	rm -rf .venv .venv-jax-* .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
