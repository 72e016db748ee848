# Developer commands; each one calls the tool that does the work. `make setup test` on a fresh clone is the way in.
PYTHON ?= python3
PY := .venv/bin/python
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)
NATIVE := CMakeLists.txt $(shell find plugins/cpu -type f)

.PHONY: setup lint format test test-install test-targets test-long test-clients test-fleet test-mutants demo bench-cpu bench-gpu bench-kv bench-kv-gpu bench-serve-gpu proto clean

setup: .venv/.setup  ## virtual environment with everything, in .venv
.venv/.setup: pyproject.toml $(NATIVE)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv  # also one left without pip, where python3-venv was absent
	@echo "Installing 3 GB of packages into .venv; this takes minutes."
	$(PY) -m pip install -q --upgrade "pip>=25.1"
	$(PY) -m pip install -q -e ".[all]" "$(TORCH)" --group dev
	@$(PY) -m wicore_trt.plugins.cpu_library && touch $@  # pip hides what the build says

lint: setup  ## style, imports, types
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup
	$(PY) -m ruff check --fix . && $(PY) -m ruff format .

# Twice as many as the smallest machine has cores: tests wait for servers, time limits and disks.
WORKERS ?= 4
test: setup  ## the whole suite, minutes; WORKERS: how many processes share it, of a gigabyte each
	OMP_NUM_THREADS=1 $(PY) -m pytest -rs -n $(WORKERS) --dist worksteal

test-install: setup  ## the CPU kernels by each compiler that is here, and an install whose compiler fails; two minutes
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m pytest -m "long or not long" -rs tests/cpu_kernels/test_compilers.py tests/project/test_packaging.py

test-targets: setup  ## compiles all GPU kernels for sm80 to sm120; no GPU needed, minutes
	$(PY) -m pytest -m long tests/engine/test_triton_backend.py tests/gpu_kernels/test_dependent_launch.py tests/gpu_kernels/test_step_aot.py \
	  tests/gpu_kernels/test_page_masses.py tests/gpu_kernels/test_page_code_kernel.py

test-long: setup  ## soak and fault tests with long profiles
	OMP_NUM_THREADS=1 $(PY) -m pytest -rs -m long --hypothesis-profile exploring

CLIENTS := .venv-clients/.setup .venv-clients-litellm/.setup .venv-clients-lm-eval/.setup tests/clients/node/node_modules/.setup
test-clients: setup $(CLIENTS)  ## the clients of docs/serving.md against Gemma 3 270M; minutes, and 2 GB of packages
	$(PY) -m pytest -m "long or not long" -rs tests/clients

.venv-client%/.setup: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install -q --group client$*
	touch $@

tests/clients/node/node_modules/.setup: tests/clients/node/package-lock.json
	cd tests/clients/node && npm ci --no-audit --no-fund && touch node_modules/.setup

FLEET := .venv-fleet-smg/.setup .venv-fleet-dynamo/.setup
test-fleet: setup $(FLEET)  ## two workers behind SMG and behind Dynamo, with kills; half an hour
	$(PY) -m pytest -m "long or not long" -rs -s tests/fleet

.venv-fleet-smg/.setup:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q smg && touch $@

DYNAMO := ai-dynamo-runtime msgspec pyzmq aiohttp redis "kubernetes<33" transformers zstandard "pydantic<=2.13.5" smg-grpc-proto uvloop
.venv-fleet-dynamo/.setup:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(DYNAMO)
	$(@D)/bin/python -m pip install -q --no-deps ai-dynamo -e . && touch $@

test-mutants: setup  ## breaks the KV cache, the scheduler and the core in some 80 ways; each must be caught, an hour at most
	$(PY) tests/mutants/run.py

demo: setup  ## fetch Gemma 3 270M, build, serve, ask
	$(PY) examples/demo.py

bench-cpu: setup  ## ARGS="--llama-site DIR" measures llama.cpp beside Q4_0, DIR the site-packages that have llama-cpp-python
	$(PY) -m benchmarks.cpu.decode
	$(PY) -m benchmarks.cpu.q4_0 $(ARGS)

bench-gpu: setup  ## needs a GPU; VLLM_SITE and VBENCH measure vLLM beside us, ARGS="--help" lists the rest
	$(PY) -m benchmarks.gpu.run --vllm-site "$(VLLM_SITE)" --vbench "$(VBENCH)" $(ARGS)

bench-kv: setup
	$(PY) -m benchmarks.kv.sessions

bench-kv-gpu: setup  ## needs a GPU of 80 GiB or more; ARGS="--vllm-site DIR --peer-scripts DIR" runs vLLM too
	$(PY) -m benchmarks.kv.on_gpu $(ARGS)

bench-serve-gpu: setup  ## needs a GPU; ARGS="ENGINE --vllm-site DIR --peer-scripts DIR" runs vLLM too
	$(PY) -m benchmarks.serve.on_gpu $(ARGS)

proto: setup  ## generated gRPC code from the .proto file
	$(PY) tests/serve/generate_proto.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
