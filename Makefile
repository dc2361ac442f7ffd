# Every target installs what it needs first, into .venv and into a cache outside the tree.
# Needs: Linux on x86-64 or arm64, Python >= 3.11 with venv, and Go >= 1.26 for `make test`; `make e2e` needs root and
# Debian's packages too.

PYTHON ?= python3
CACHE := $(or $(TIDEGATE_CACHE),$(HOME)/.cache/tidegate)

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
COMPILE := $(BIN)/python tools/compiled_core/build --cache $(CACHE)/compiled
SUITE ?= text2sql
SUITES := $(filter-out __init__,$(basename $(notdir $(wildcard sim/tidegate_sim/suites/*.py))))
FIGURES ?= faults.json
# These tests share no server, so they run on all cores. They run the sources, as the engine does; the tests of the core run
# the compiled core too, and the other tests the compiled core alone. Those start servers, among them vLLM's engine with 4 GB for
# each process, so two processes run them, file by file.
PURE_TESTS := tests/contracts tests/policy tests/sim

PROMISE_TESTS := $(addprefix tests/gateway/,test_bad_input.py test_bad_input_fields.py test_engine_trouble.py test_watchdog.py \
  test_background_loops.py test_admission.py test_connection_bounds.py test_store_bounds.py test_store_lists.py \
  test_pool_clock.py test_log_lines.py test_authentication.py test_web_tokens.py test_port_encryption.py test_rpc.py \
  test_slo_metrics.py test_hang_up.py test_http2_bounds.py test_costly_bodies.py test_large_bodies.py \
  test_unread_answers.py test_call_ends.py test_store_outbox.py test_settings_reload.py test_tls_records.py \
  test_parsing_work.py) $(addprefix tests/operator/,test_operator.py test_rollout.py test_watches.py test_controller.py \
  test_pool_status.py test_steering_alone.py test_crd.py test_reconcile.py test_pool_secret.py test_reinstall.py \
  test_lease.py test_operator_log.py test_trouble_in_time.py test_upgrade.py test_rollback.py test_default_resources.py \
  test_store_status.py test_canary_under_load.py test_crd_style.py test_scaling_alone.py test_canary_alone.py \
  test_watch_cache.py test_api_server_answers.py)

.PHONY: help client install compiled up test lint e2e bench bench-gateway bench-engine bench-operator bench-real docs lock proto kubernetes clean faults page-image steering-demo dashboard-images vllm-tests

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

up: $(VENV)/.installed-$(if $(filter vllm%,$(ENGINES)),all,up) ## the whole system on this machine: gateway, Valkey, engines (ENGINES=vllm for real ones)
	@$(BIN)/tidegate up $(if $(ENGINES),--engines "$(ENGINES)") $(UP)

client: $(VENV)/.installed-client ## the OpenAI SDK, for the client helper and the examples

install: $(VENV)/.installed-all compiled kubernetes ## everything: Python environment with vLLM (CPU), compiled core, Kubernetes binaries

test: $(VENV)/.installed-all kubernetes lint ## all tests that need no root; TESTS=tests/gateway runs a part of them
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	TIDEGATE_INTERPRETED=1 $(BIN)/python -m pytest -n auto --dist worksteal $(PURE_TESTS)
	$(COMPILE)
	$(BIN)/python -m pytest -n auto --dist worksteal tests/policy
	TIDEGATE_INTERPRETED=1 $(BIN)/python -m pytest tests/engine
	$(BIN)/python -m pytest -n 2 --dist loadfile $(filter-out $(PURE_TESTS) tests/engine %__pycache__,$(wildcard tests/*))
endif

faults: install ## all fault tests, with floods, slow clients, a soak of SOAK_MINUTES=30 and new random examples: each figure beside its goal
	TIDEGATE_INTERPRETED=1 $(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile random $(PURE_TESTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PROMISE_TESTS)
	TIDEGATE_FAULTS=$(FIGURES) $(BIN)/python -m pytest tests/faults tests/operator/test_idle_pools.py \
	  tests/operator/test_edits_and_streams.py tests/operator/test_api_server_faults.py \
	  tests/operator/test_labelled_objects.py tests/engine/test_long_engine_queue.py

lint: $(VENV)/.installed-all ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tools/kubernetes $(BIN)/mypy --strict -p localkube
	$(BIN)/lint-imports

compiled: $(VENV)/.installed-all ## compile the decision core and modules of the gateway again after an edit: less CPU for each call
	$(COMPILE)

kubernetes: ## the Kubernetes binaries that tests use, from Go modules (once, ten minutes)
	tools/kubernetes/build

e2e: $(VENV)/.installed-all kubernetes ## helm install on a real node (root), or on the cluster of KUBECONFIG
	$(BIN)/python tools/kubernetes/e2e

bench: suite-exists $(VENV)/.installed-all ## virtual-time evaluation: SUITE=text2sql
	$(BIN)/tidegate bench $(SUITE)

.PHONY: suite-exists
suite-exists:
	$(if $(filter $(firstword $(SUITE)),$(SUITES)),,$(error SUITE=$(SUITE) is no suite; known are $(SUITES)))

bench-gateway: compiled ## CPU time of the gateway per request: ENVIRONMENTS='old=DIR/.venv new=.venv'
	$(BIN)/python benchmarks/gateway_cpu $(addprefix --environment ,$(ENVIRONMENTS))
	$(BIN)/python benchmarks/dispatch_decision

bench-engine: $(VENV)/.installed-all ## CPU time that our scheduler adds to vLLM's: BENCH_ENGINE='--running 256 --waiting 2000'
	TIDEGATE_INTERPRETED=1 $(BIN)/python benchmarks/engine $(BENCH_ENGINE)

bench-operator: $(VENV)/.installed-all kubernetes ## time, CPU, memory and requests of the operator with 100 pools: BENCH_OPERATOR='--pools 20'
	$(BIN)/python benchmarks/operator $(BENCH_OPERATOR)

bench-real: $(VENV)/.installed-all ## small cases of the suites in wall-clock time on a real vLLM engine: BENCH_REAL='--suites semantic'
	$(BIN)/python benchmarks/real_engine $(BENCH_REAL)

vllm-tests: $(VENV)/.installed-all ## vLLM's own tests of its scheduler, on its classes and on ours: VLLM_TESTS='--select priority' (20 minutes)
	$(BIN)/python tools/vllm_tests/run $(VLLM_TESTS)

steering-demo: $(VENV)/.installed-up ## shifts the load on `tidegate up` and prints each switch of the policy with its reason (6 minutes)
	$(BIN)/python tools/steering/demonstrate

page-image: $(VENV)/.installed-all ## docs/images/page.png: a picture of the page under load (needs Debian's package chromium)
	$(BIN)/python tools/page/screenshot

dashboard-images: $(VENV)/.installed-all ## docs/images/dashboard-*.png: the dashboards with data (needs Debian's package prometheus)
	$(BIN)/python tools/monitoring/picture

proto: $(VENV)/.installed-all ## regenerate the gRPC stubs
	$(BIN)/python proto/generate

docs: $(VENV)/.installed-all ## make the reference pages in docs/ from the code
	$(BIN)/python tools/reference/generate
	$(BIN)/python tools/monitoring/generate

lock: $(UV) ## resolve dependencies again
	$(UV) pip compile -q pyproject.toml --extra up --extra weights --extra tracing --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --custom-compile-command 'make lock' -o requirements/up.txt
	$(UV) pip compile -q pyproject.toml --extra up --extra weights --extra operator --extra tracing --extra bench --extra client \
	  --extra engine-cpu --extra demo-model --group dev --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  -c requirements/up.txt --custom-compile-command 'make lock' -o requirements/all.txt
	$(UV) pip compile -q pyproject.toml --extra client --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url -c requirements/all.txt --custom-compile-command 'make lock' -o requirements/client.txt
	$(UV) pip compile -q pyproject.toml --extra operator --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url -c requirements/up.txt --custom-compile-command 'make lock' -o operator/requirements.txt
	printf 'mypy\nsetuptools\n' | $(UV) pip compile -q - --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url -c requirements/all.txt --custom-compile-command 'make lock' -o tools/compiled_core/requirements.txt

clean: ## remove all that was made, caches included
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	rm -rf $(addprefix $(CACHE)/,compiled e2e-model e2e-weights e2e.lock images kubernetes models vllm-tests)
	rmdir $(CACHE) 2> /dev/null || true
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tidegate needs Python 3.11 or later; name one by PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/uv.txt

$(VENV)/.installed-%: requirements/%.txt pyproject.toml | $(UV)
	$(UV) pip install -q --python $(BIN)/python --require-hashes -r $<
	$(UV) pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@
