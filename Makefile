# From a clean clone: `make export`, then `make generate PROMPT="..."`. `make help` lists the targets.
#
# Variables to set on the command line (the environment does not set them):
#   MODEL      what to export: a .gguf file, a Hugging Face folder or hub id, path/to/file.py:function
#   PRECISION  fp32, fp16, bf16, int8, int4 or gguf          TARGET  cpu or cuda
#   OUT        the bundle's folder                            PROMPT  what `make generate` asks
#   PYTHON     a Python >= 3.11 that makes .venv              WORKERS test processes
#   RESULTS    the table that `make bench...` writes; a picture and the data come beside it
#   OPTIONS    more options of the benchmark, for example "--max-others 1" on a machine that is never quiet

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON = python3
WORKERS = 2
OPTIONS =
PRECISION = int8
TARGET = cpu
PROMPT = What is the capital of France?

SMOLLM2 := build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := build/downloads/all-MiniLM-L6-v2
MODEL = $(SMOLLM2)

# The default name carries whatever differs from the defaults: model.gguf is build/model, file.py:function build/file-function.
name := $(subst .py:,-,$(patsubst %.gguf,%,$(notdir $(MODEL:%/=%))))
name := $(if $(filter $(SMOLLM2),$(MODEL)),smollm2-135m-instruct,$(name))
name := $(name)$(if $(filter-out int8,$(PRECISION)),-$(PRECISION))$(if $(filter-out cpu,$(TARGET)),-$(TARGET))
OUT = build/$(name)

RESULTS = build/$@-$(notdir $(out)).md

bin := .venv/bin
installed := .venv/.installed
genai := build/genai/.installed
out := $(OUT:%/=%)
quote = '$(subst ','\'',$(1))'

# The bundle at OUT, and what it was made from: three lines that `make export` writes beside it.
bundle := $(wildcard $(out)/manifest.json)
settings := $(out).settings
recorded := $(shell cat $(call quote,$(settings)) 2> /dev/null)
held := $(shell head -n 1 $(call quote,$(settings)) 2> /dev/null)

# Two models may have one default OUT (a/model and b/model): the second does not replace the first unless OUT says so.
taken :=
ifneq ($(origin OUT),command line)
ifneq ($(held:%/=%),$(MODEL:%/=%))
taken := $(if $(bundle),$(out) holds a bundle of $(or $(held),unknown origin) and not of $(MODEL): name another OUT (or this OUT to replace it))
endif
endif

# What `generate`, `verify` and `bench` need first: nothing when there is a bundle, unless it is known to be another model's.
missing := $(if $(and $(bundle),$(if $(and $(taken),$(held)),,yes)),$(installed),$(out)/manifest.json)

ifneq ($(words $(OUT)),1)
$(error OUT is "$(OUT)"; make needs one path without spaces, use `graphport export` for others)
endif

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r target text; do \
		printf '  make %-13s %s\n' "$$target" "$$text"; done

.PHONY: setup
setup: $(installed) ## create .venv with the exact versions of constraints.txt

# pip up to 25.2 applies PIP_CONSTRAINT to the build environment too, later ones PIP_BUILD_CONSTRAINT.
$(installed): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "graphport needs Python >= 3.11; %s is %d.%d.%d. Set PYTHON, for example: make PYTHON=python3.12 setup" % (sys.executable, v[0], v[1], v[2]))'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(bin)/python -m pip --disable-pip-version-check install --editable '.[dev]'
	@touch $@

.PHONY: fetch
fetch: $(SMOLLM2) $(MINILM) $(genai) ## download what the tests need: two models (190 MB), onnxruntime-genai in build/genai

$(SMOLLM2): examples/fetch_smollm2.py | $(installed)
	@$(bin)/python $< $@

$(MINILM): examples/fetch_minilm.py | $(installed)
	@$(bin)/python $< $@

# A runtime that bundles are also written for: the tests ask it for the same tokens.
$(genai): tests/requirements_genai.txt | $(installed)
	$(PYTHON) -m venv build/genai
	build/genai/bin/python -m pip --disable-pip-version-check install --requirement $<
	@touch $@

.PHONY: export
export: $(out)/manifest.json ## export MODEL to the bundle OUT and verify it; prints what fused and the parity figures
	@echo 'bundle: $(out)'
	@echo $(if $(exported),'(graphport is $(bin)/graphport)',$(call quote,$(next)))

# The command names the next step itself; make does when there was nothing to export.
next = next:   make generate$(if $(filter command line,$(origin OUT) $(origin MODEL) $(origin PRECISION) $(origin TARGET)), OUT=$(out)) PROMPT="What is the capital of France?"

# The files of MODEL: itself, those in the folder, the .py before the colon. Names that make cannot take are left out.
parts := $(wildcard $(wildcard $(MODEL) $(MODEL:%/=%)/* $(firstword $(subst .py:,.py ,$(MODEL)))))
parts := $(foreach part,$(parts),$(if $(findstring :,$(part)),,$(part)))

exported :=

# Exported again when the settings, the model or the exporter changed; only a folder that is a bundle is replaced.
# The settings are written last, so that they are those of the bundle that is there.
$(out)/manifest.json: $(parts) $(wildcard model_def/*.py export/*.py) | $(installed)
	$(if $(taken),$(error $(taken)))$(eval exported := yes)
	@$(bin)/graphport export $(call quote,$(MODEL)) $(out) --target $(TARGET) --precision $(PRECISION) \
		$(if $(bundle),--force) > /dev/null
	@printf '%s\n' $(call quote,$(MODEL)) '$(PRECISION)' '$(TARGET)' > $(settings)

ifneq ($(recorded),$(MODEL) $(PRECISION) $(TARGET))
$(out)/manifest.json: unconditional
endif

ifeq ($(MODEL),$(SMOLLM2))
$(out)/manifest.json: $(SMOLLM2)
endif

.PHONY: unconditional
unconditional:

.PHONY: generate
generate: $(missing) ## answer PROMPT with the bundle
	@printf '%s\n' "$$GRAPHPORT_PROMPT" | $(bin)/graphport generate $(out)

# The prompt travels as it is: never part of a command, never expanded (which exporting PROMPT itself would do).
generate: export GRAPHPORT_PROMPT = $(value PROMPT)
unexport PROMPT

.PHONY: verify
verify: $(missing) ## re-run the bundle's certificate on this machine
	@if [ -f $(settings) ]; then source=$$(head -n 1 $(settings)); fi; \
		$(bin)/graphport verify $(out) $${source:+--against "$$source"}

compare = @if [ -f $(settings) ]; then source=$$(head -n 1 $(settings)); else source=$(call quote,$(MODEL)); fi; \
	$(bin)/python benchmarks/compare.py "$$source" $(out) --out $(RESULTS) $(OPTIONS)

.PHONY: bench
bench: $(missing) ## time the bundle against transformers eager, in one run; writes RESULTS
	$(compare) --peers none

.PHONY: bench-peers
bench-peers: $(missing) ## the same with llama.cpp and onnxruntime-genai, installed in build/peers
	$(compare)

.PHONY: bench-growth
bench-growth: $(installed) ## decode time against context and model width; writes RESULTS
	$(bin)/python benchmarks/growth.py --out $(RESULTS) $(OPTIONS)

.PHONY: bench-engine
bench-engine: $(missing) ## time batches, drafts, cached beginnings and grammars on the bundle; writes RESULTS
	$(bin)/python benchmarks/engine.py $(out) --out $(RESULTS) $(OPTIONS)

.PHONY: bench-servers
bench-servers: $(missing) ## time the server of the bundle and llama.cpp's, which is built in build/peers; writes RESULTS
	@if [ -f $(settings) ]; then source=$$(head -n 1 $(settings)); else source=$(call quote,$(MODEL)); fi; \
		$(bin)/python benchmarks/servers.py "$$source" $(out) --out $(RESULTS) $(OPTIONS)

.PHONY: bench-soak
bench-soak: $(missing) ## ask a server of the bundle 2,000 mixed requests and verify every answer; writes RESULTS
	$(bin)/python benchmarks/soak.py $(out) --out $(RESULTS) $(OPTIONS)

.PHONY: bench-gpu
bench-gpu: $(installed) ## time a random model of 1.2 B parameters on a CUDA device; writes RESULTS
	$(bin)/python benchmarks/gpu.py --work build --out $(RESULTS) $(OPTIONS)

bench-growth bench-gpu: RESULTS = build/$@.md

# A file stays with one worker, so that what its tests share (an exported model) is made once.
pytest = OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: test
test: $(SMOLLM2) $(MINILM) $(genai) | $(installed) ## run the tests, the real model included
	$(pytest) -m "not slow and not gpu"

.PHONY: test-slow
test-slow: $(SMOLLM2) $(MINILM) $(genai) | $(installed) ## run the slow tests
	$(pytest) -m "slow and not gpu"

.PHONY: test-gpu
test-gpu: $(SMOLLM2) $(MINILM) | $(installed) ## run the tests that need a CUDA device
	$(bin)/python -m pytest -m gpu

.PHONY: lint
lint: $(installed) ## check format and lint rules (ruff)
	$(bin)/ruff format --check .
	$(bin)/ruff check .

.PHONY: types
types: $(installed) ## check types (mypy, strict)
	$(bin)/mypy
	$(bin)/mypy benchmarks/*.py

.PHONY: imports
imports: $(installed) ## check the direction of imports (import-linter)
	$(bin)/lint-imports

.PHONY: families
families: $(installed) ## write docs/families.md from the table of families
	$(bin)/python tests/families_page.py > docs/families.md.new
	mv docs/families.md.new docs/families.md

.PHONY: wheel
wheel: $(installed) ## build dist/*.tar.gz and, from it, dist/*.whl
	rm -rf dist
	$(bin)/python -m build --quiet --no-isolation
	@ls -l dist

.PHONY: clean
clean: ## remove .venv, dist, the caches and everything in build/ except build/downloads
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name downloads -exec rm -rf {} +; fi
