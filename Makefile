# Every command makes .venv first and keeps it in step with pyproject.toml and constraints.txt.
#
#   make run      the main job: SmolLM2-135M, baseline against skotergy; ARGS="engine=skotergy devices=2" for another
#   make test     the tests, without those that need a GPU; ARGS="-k router" for some of them
#   make check    ruff, mypy, and the rule who may import whom
#   make gate     check=ci in seconds: real engines on a tiny model for parity and for a limit on latency that a tenfold
#                 slowdown breaks, simulated ones for the exact limits
#   make gpu      the tests that need a CUDA device
#   make claims   the experiments that a CPU can judge, one after another, into reports/claims/; ARGS="E05 E10" for some
#   make clean    remove .venv and what tools left behind; runs (outputs/, multirun/) stay
#
# PYTHON names the interpreter that .venv is made from (make clean first, to change it). A torch that it already has
# and that pyproject.toml allows is kept: see tools/environment.py.

PYTHON ?= $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && exit; done; echo python3)
TOO_OLD = "Skotergy needs Python 3.11 or newer, this is %d.%d: name another with make PYTHON=DIR/python3."
BIN = .venv/bin
GATE = model=tiny_shape check=ci workload.requests_per_block=4 workload.max_new_tokens=8 measure.harness_overhead=false
READY = .venv/ready

.PHONY: run test check gate gpu claims clean

run: $(READY)
	@$(BIN)/python run.py $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

check: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_layering.py

gate: $(READY)
	@$(BIN)/python run.py $(GATE) workload.blocks=20 engine.compile=false check.p50_delta_max=null \
		check.ratio_to_baseline_max=4
	@$(BIN)/python run.py $(GATE) workload.blocks=5 engine=simulated compare=simulated +engine.prefill_ms=5 \
		+engine.token_ms=5 +compare.prefill_ms=10 +compare.token_ms=10 check.p50_delta_max=-20

gpu: $(READY)
	@$(BIN)/python -m pytest -m gpu $(ARGS)

claims: $(READY)
	-@$(BIN)/python -m skote.engines.published_environment
	@$(BIN)/python tools/claims.py $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find skote tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt tools/environment.py
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit($(TOO_OLD) % sys.version_info[:2])'
	@$(PYTHON) tools/environment.py .venv
	@touch $@
