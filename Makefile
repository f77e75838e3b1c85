# The environment lives outside the checkout (scripts/setup_env.sh says where) and is linked as .venv/.
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: help env env-full demo test test-heavy lint format clean clean-env

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: ## set up the core, train and export environment
	@PYTHON=$(PYTHON) bash scripts/setup_env.sh demo

env-full: ## set up everything, mmcv's operators included (about 15 minutes the first time)
	@PYTHON=$(PYTHON) bash scripts/setup_env.sh full

demo: env ## train on handwritten digits, evaluate, fuse, export to ONNX; print one table
	$(RUN) -m wbmm demo

test: env-full ## the whole test suite
	$(RUN) -m pytest -m "not heavy"

test-heavy: env-full ## the checks that take long: training to an accuracy, many kills, compiling
	$(RUN) -m pytest -m heavy

lint: env-full ## style and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: env-full ## let ruff rewrite the tree
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove what a build leaves in the checkout; runs/ and work_dirs/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: clean ## remove the cached environments as well
	bash scripts/setup_env.sh remove
