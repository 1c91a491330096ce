# make demo: the main job in a fresh environment.   make test: the tests.   make lint: what CI checks.
PYTHON ?= python3
DEMO_VENV := .venv-demo
VENV := .venv
DEMO_OUTPUT ?= output/demo

.PHONY: demo test lint docs families soak clean

# One thread: tiny is too small for a second to help, and threads that wait for each other are slow.
demo:
	$(PYTHON) -m venv --clear $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet -c constraints.txt .
	OMP_NUM_THREADS=1 $(DEMO_VENV)/bin/lm_eval run --model moecache --model_args policy=specmd,capacity=25% \
		--tasks moecache_offline --include_path task_configs --limit 40 --output_path $(DEMO_OUTPUT)

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -q

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The site, into output/site.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# Every model type of transformers with experts, on random weights: docs/families.md. About ten minutes.
families: $(VENV)/.installed
	TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.families --write

# Reused as long as the declared dependencies and the start-up files stay the same.
$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard startup/*)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# The outside checker of the engine and the bad inputs, for as long as one likes.
SECONDS ?= 600
soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.soak --seconds $(SECONDS)

clean:
	rm -rf $(DEMO_VENV) output/demo
