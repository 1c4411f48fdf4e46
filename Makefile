# Two commands do everything on a fresh machine with Python 3.11: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLUSTER_TESTS := tests/test_cluster.py tests/test_cluster_faults.py tests/test_cluster_jobs.py
EXTRAS := atari,box2d,envpool,plot,ray,report,scaling,sweep,video,dev

.PHONY: train test test-quick test-cluster test-learns setup check fmt bench clean

train: setup            ## train the default job, evaluate it, say where the results are
	$(BIN)/bestiary train tmaze
	$(BIN)/bestiary eval runs/latest

test: check test-quick test-cluster test-learns  ## lint, types and every test

test-quick: setup       ## tests without a cluster; none trains for more than ten seconds
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=15 -m "not long" $(CLUSTER_TESTS:%=--ignore %)

test-cluster: setup     ## tests with Ray processes: two files at once, the tests of a file in order
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=5 $(CLUSTER_TESTS)

test-learns: setup      ## the learning tests that take more than ten seconds
	$(BIN)/python -m pytest -n auto -m long --durations=0 tests

setup: $(VENV)/.setup-done

$(VENV)/.setup-done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

check: setup            ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/bestiary bench impala-atari
	$(BIN)/bestiary bench cores
	$(BIN)/bestiary bench envs
	$(BIN)/bestiary bench findings
	$(BIN)/bestiary bench replay
	$(BIN)/bestiary bench apex-atari
	$(BIN)/bestiary bench r2d2-atari
	$(BIN)/bestiary bench cluster

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
