# The environment lives outside the checkout (scripts/setup_env.sh says where) and is linked as .venv/.
PYTHON ?= python3
RUN = .venv/bin/python
RUFF = PYTHON=$(PYTHON) bash scripts/setup_env.sh lint

.PHONY: help env env-docs env-full demo test test-fast test-heavy test-gpu lint format notebooks docs docs-serve docs-demo zoo \
	lock clean clean-env

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: ## set up the core, train and export environment
	@PYTHON=$(PYTHON) bash scripts/setup_env.sh demo

env-docs: ## the same, and what builds the site
	@PYTHON=$(PYTHON) bash scripts/setup_env.sh docs

env-full: ## set up everything, mmcv's operators included (about 15 minutes the first time)
	@PYTHON=$(PYTHON) bash scripts/setup_env.sh full

demo: env ## train on handwritten digits, evaluate, fuse, export to ONNX; print one table
	$(RUN) -m wbmm demo

test: env-full ## the whole test suite
	bash scripts/run_tests.sh

test-fast: env ## operators, layers, models and files: about 3 minutes, without the mm packages
	bash scripts/run_tests.sh fast

test-heavy: env-full ## the checks that take long: training to an accuracy, many kills, compiling
	bash scripts/run_tests.sh heavy

test-gpu: env-full ## tests and benchmarks for an NVIDIA GPU; writes gpu_check.txt
	bash scripts/gpu_check.sh

notebooks: env-full ## run the notebooks and keep their outputs
	$(RUN) scripts/run_notebooks.py

docs-demo: env ## build the page that runs in a browser into build/site/demo; needs npm
	$(RUN) scripts/build_demo.py

docs: env-docs ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

docs-serve: env-docs ## show the site on this machine, rebuilt as you write
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

zoo: env ## write the cards and tables of models/ from wbmm/zoo.yaml
	$(RUN) tools/make_zoo.py

lint: ## style and formatting; needs ruff alone
	@ruff=$$($(RUFF)) && "$$ruff" check . && "$$ruff" format --check .

format: ## let ruff rewrite the tree
	@ruff=$$($(RUFF)) && "$$ruff" check --fix . && "$$ruff" format .

lock: ## refresh requirements.txt and its hashes from setup.py and the package index
	@test -x $(RUN) || { echo "make lock needs .venv/: run 'make env' before you edit requirements.txt" >&2; exit 1; }
	$(RUN) scripts/lock.py

clean: ## remove what a build leaves in the checkout; runs/ and work_dirs/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-env: clean ## remove the cached environments as well
	bash scripts/setup_env.sh remove
