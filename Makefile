# make demo   install into .venv and run the two commands
# make test   the same .venv with the test extras; lint and the whole suite, a process a core (OpenMP's threads would
#             only wait for one another)
# make gpu-checks   what the suite leaves out while the solvers stay as they are. Without a GPU: the GPU's kernels in a
#             simulator, their races, instruction budgets, models of streams, and how Numba compiles those for a CPU
# make test-all   make test and make gpu-checks
# make faults the fault suite with many more cases, then ten minutes of random kills (SECONDS=600 SEED=0)
# make fuzz   ten minutes of spoilt stores, runs, exports, records and servers (SECONDS=600 SEED=0)
# make mutants   200 changes of single lines, each against the tests of its module: 95 % must be noticed (COUNT=200 SEED=0);
#             about an hour on two cores; resumes after an interruption
# make bounds the tests of what runs compiled by Numba, with the bounds of every array checked
# make lint   ruff, mypy, and the words of tests/words.txt, which are never right
# make docs   the site of docs/ in build/site; `python -m http.server -d build/site` shows it, with its search
# make notebooks   runs docs/tutorials at full size (half an hour on quiet cores) and stores their outputs in them
# make screenshots   the pictures of pages in docs/figures, by a headless browser (MLSM_BROWSER=...); after make demo
# make release-check   build sdist and wheel of what is committed, install the wheel into an empty environment, and use it
#             there: the two commands of the README, small, and the notebooks at full size

PYTHON ?= python3
BIN := .venv/bin
# not compiled: most files of the packages are never imported, and Python compiles the others when they are
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

demo: .venv/installed
	$(BIN)/python cli.py encode-lsp --layer 10
	$(BIN)/python cli.py train-student

test: .venv/installed-test lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder

gpu-checks: .venv/installed-test
	mkdir -p build
	MLSM_GPU_CHECKS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs $(GPU_CHECKS) > build/gpu-checks.log \
	  || { cat build/gpu-checks.log; exit 1; }
	grep ^SKIPPED build/gpu-checks.log | $(BIN)/python tests/pipeline/solvers/kernels_changed.py

GPU_CHECKS := $(foreach name,instruction_budgets streams kernels_changed cd_cuda races compiled,tests/pipeline/solvers/test_$(name).py)

test-all: test gpu-checks

faults: .venv/installed-test
	HF_HUB_OFFLINE=1 MLSM_FAULT_CASES=1000 $(BIN)/python -m pytest tests/faults
	$(BIN)/python tests/faults/soak.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

fuzz: .venv/installed-test
	$(BIN)/python tests/faults/fuzz.py --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

mutants: .venv/installed-test
	$(BIN)/python tests/mutants.py --count $(or $(COUNT),200) --seed $(or $(SEED),0)

BOUNDED := tests/pipeline/solvers tests/pipeline/test_dictionary.py tests/pipeline/test_learner.py tests/pipeline/test_lsp.py \
  tests/evaluation/inspection tests/evaluation/studies/word_senses

bounds: .venv/installed-test
	NUMBA_BOUNDSCHECK=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist loadfile $(BOUNDED)

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/codespell

docs: .venv/installed
	$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# One after the other in one directory, as four use the same store.
NOTEBOOKS := own-corpus look-at-lsps custom-loop own-vectors choose-layer compare-objectives

notebooks: export MPLBACKEND = agg
notebooks: export PYTHONPATH = $(CURDIR)
notebooks: .venv/installed-test
	rm -rf build/notebooks && mkdir -p build/notebooks
	cd build/notebooks && for name in $(NOTEBOOKS); do \
	  echo $$name && $(abspath $(BIN))/python $(CURDIR)/tests/run_notebook.py $(CURDIR)/docs/tutorials/$$name.ipynb $$name.ipynb || exit 1; done
	cp build/notebooks/*.ipynb docs/tutorials/

screenshots: .venv/installed-test
	$(BIN)/python docs/screenshots.py

RELEASE := $(or $(TMPDIR),/tmp)/mlsm-release-check

# Outside of the checkout, so that nothing but what was installed can be imported. The wheel is built from the sdist.
release-check: export PYTHONPATH =
release-check: export HF_HUB_OFFLINE = 1
release-check: export MPLBACKEND = agg
release-check:
	rm -rf $(RELEASE)
	mkdir -p $(RELEASE)/source $(RELEASE)/notebooks
	git archive HEAD | tar -x -C $(RELEASE)/source
	$(PYTHON) -m venv $(RELEASE)/build
	$(RELEASE)/build/bin/pip install --quiet --disable-pip-version-check build
	$(RELEASE)/build/bin/python -m build --outdir $(RELEASE)/dist $(RELEASE)/source
	tar -tzf $(RELEASE)/dist/mlsm_pretrain-*.tar.gz > $(RELEASE)/sdist.txt
	for name in CHANGELOG.md LICENSE Makefile README.md cli.py constraints.txt docs/commands.md docs/tutorials/own-corpus.ipynb; do \
	  grep -q "^mlsm_pretrain-[^/]*/$$name$$" $(RELEASE)/sdist.txt || { echo "the sdist lacks $$name"; exit 1; }; done
	$(PYTHON) -m venv $(RELEASE)/empty
	cd $(RELEASE) && empty/bin/pip install --quiet --disable-pip-version-check --constraint source/constraints.txt torch
	cd $(RELEASE) && empty/bin/pip install --quiet --disable-pip-version-check --constraint source/constraints.txt \
	  "$$(ls dist/mlsm_pretrain-*.whl)[eval]"
	cd $(RELEASE) && empty/bin/mlsm doctor && empty/bin/mlsm docs && empty/bin/mlsm docs corpora > corpora.txt
	cd $(RELEASE) && empty/bin/mlsm encode-lsp --layer 10 --max-tokens 20000 --k 64
	cd $(RELEASE) && empty/bin/mlsm train-student --max-steps 5 --encoder bert-1x32
	cd $(RELEASE)/notebooks && for notebook in ../source/docs/tutorials/*.ipynb; do \
	  echo "$$notebook" && ../empty/bin/python ../source/tests/run_notebook.py "$$notebook" || exit 1; done

# torch first and pinned: an unpinned one may pull gigabytes of GPU packages
.venv/installed: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("mlsm needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[encode]"
	touch $@

.venv/installed-test: .venv/installed
	$(PIP) --editable ".[test]"
	touch $@

.PHONY: demo test test-all gpu-checks faults fuzz mutants bounds lint docs notebooks screenshots release-check
