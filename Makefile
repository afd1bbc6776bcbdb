# The usual tasks; each works on a fresh clone.
.PHONY: check test bench docs

check:  ## style and types
	EXTRAS=plot,dev bash -c 'source scripts/env.sh && "$$PYTHON" -m ruff check . && "$$PYTHON" -m mypy'

test:  ## check, then all tests
	bash scripts/test.sh

bench:  ## every claim against its peer, in one run each; results in benchmarks/results/
	EXTRAS=plot,dev,hf bash -c 'source scripts/env.sh && "$$PYTHON" -m benchmarks'

docs:  ## the site, in build/site
	EXTRAS=plot,dev bash -c 'source scripts/env.sh && NO_MKDOCS_2_WARNING=1 "$$PYTHON" -m mkdocs build --strict'
