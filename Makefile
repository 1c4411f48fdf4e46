# Two commands do everything on a fresh machine with Python 3.11: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := atari,box2d,envpool,plot,ray,report,scaling,sweep,video,dev

.PHONY: train test test-quick test-cluster test-learns setup check fmt bench clean

train: setup            ## train the default job, evaluate it, say where the results are
	$(BIN)/bestiary train tmaze
	$(BIN)/bestiary eval runs/latest

test: check test-quick test-cluster test-learns  ## lint, types and every test

test-quick: setup       ## tests without a cluster; none trains for more than ten seconds
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=15 -m "not long" --ignore tests/test_cluster.py --ignore tests/test_cluster_jobs.py

test-cluster: setup     ## tests with Ray processes, one file after the other
	$(BIN)/python -m pytest --durations=5 tests/test_cluster.py
	$(BIN)/python -m pytest --durations=5 tests/test_cluster_jobs.py

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
