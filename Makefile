# The usual tasks; each works on a fresh clone.
.PHONY: check test bench docs
# as scripts/test.sh has it: another list would install again
export EXTRAS = plot,hf,dev

check:  ## style and types
	bash -c 'source scripts/env.sh && "$$PYTHON" -m ruff format --check . && "$$PYTHON" -m ruff check . && "$$PYTHON" -m mypy'

test:  ## check, then all tests
	bash scripts/test.sh

bench:  ## every claim against its peer, in one run each; results in benchmarks/results/
	bash -c 'source scripts/env.sh && "$$PYTHON" -m benchmarks'

docs:  ## the site, in build/site
	bash -c 'source scripts/env.sh && NO_MKDOCS_2_WARNING=1 "$$PYTHON" -m mkdocs build --strict'
