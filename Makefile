# Everything a newcomer runs. `make demo` and `make test` set up the environment by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: demo calibrations frontier test test-all compat lint bench reproduce gpu-evidence docs front-page tiny clean

# torch comes first and alone: with it in place nothing later asks for another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# A set of pyproject.toml's extras on top of it: each command installs what it needs and no more.
$(STAMP)-%: $(STAMP)
	$(PIP) -e '.[$*]'
	touch $@

demo: $(STAMP)
	$(BIN)/heart demo --out heart-demo

test: $(STAMP)-test
	$(BIN)/python -m pytest tests -m "not slow" -n auto --dist loadfile

# With the slow tests, all random examples, and real libraries where `make test` has stand-ins (Ray, cache-dit, quanto, peft, a browser).
test-all: $(STAMP)-test-all
	HEART_THOROUGH=1 $(BIN)/python -m pytest tests -n auto --dist loadfile

# Python 3.11 to 3.14 as far as they are installed, each with the oldest and the newest torch and diffusers that we promise.
compat:
	sh tools/compat.sh

lint: $(STAMP)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Ratios are compared with benchmarks/results; `make bench STORE=--store` keeps the new ones.
bench: $(STAMP)
	$(BIN)/python benchmarks/attention.py $(STORE)
	$(BIN)/python benchmarks/predict.py $(STORE)
	$(BIN)/python benchmarks/end_to_end.py $(STORE)
	$(BIN)/python benchmarks/overhead.py $(STORE)

# The calibrations of the embedded model that ship: where one is missing it is made; a stopped one goes on. With other weights
# remove them all first. FILE-paper.heart.json are by the paper's protocol.
SHIPPED := src/heart_attention/tiny/calibrations
PAPER := $(SHIPPED)/xattention-paper.heart.json $(SHIPPED)/svg2-paper.heart.json
JOINT := $(SHIPPED)/xattention.heart.json $(SHIPPED)/svg2.heart.json $(SHIPPED)/heart.heart.json $(SHIPPED)/student.heart.json
HUNYUAN := $(patsubst %,$(SHIPPED)/hunyuan-%.heart.json,xattention-paper svg2-paper xattention svg2 heart)
POINTS := --points default --contexts 6 --held-out-contexts 6 --rounds 1
$(SHIPPED)/xattention-paper.heart.json: OPTIONS := --method probes --backbone xattention --steps 25
$(SHIPPED)/svg2-paper.heart.json: OPTIONS := --method probes --backbone svg2 --steps 25
$(SHIPPED)/xattention.heart.json: OPTIONS := --backbone xattention --steps 25 --contexts 6
$(SHIPPED)/svg2.heart.json: OPTIONS := --backbone svg2 --steps 25 --contexts 6
$(SHIPPED)/heart.heart.json: OPTIONS := $(POINTS) --phases 4 --budget time=0.30
$(SHIPPED)/student.heart.json: OPTIONS := --points default --contexts 8 --held-out-contexts 8 --rounds 1 --model tiny-student --steps 8 --guidance 1 --budget time=0.48
$(SHIPPED)/hunyuan-xattention-paper.heart.json: OPTIONS := --model tiny-hunyuan --method probes --backbone xattention --steps 25
$(SHIPPED)/hunyuan-svg2-paper.heart.json: OPTIONS := --model tiny-hunyuan --method probes --backbone svg2 --steps 25
$(SHIPPED)/hunyuan-xattention.heart.json: OPTIONS := --model tiny-hunyuan --backbone xattention --steps 25 --contexts 6
$(SHIPPED)/hunyuan-svg2.heart.json: OPTIONS := --model tiny-hunyuan --backbone svg2 --steps 25 --contexts 6
$(SHIPPED)/hunyuan-heart.heart.json: OPTIONS := --model tiny-hunyuan $(POINTS) --phases 4 --budget time=0.30
$(PAPER) $(JOINT) $(HUNYUAN): | $(STAMP)
	$(BIN)/heart calibrate $(OPTIONS) --work runs/$(notdir $@).work --out $@
calibrations: $(PAPER) $(JOINT) $(HUNYUAN)

# The paper's tables and figures on the embedded model; a stopped run goes on. What was timed while the machine was busy is
# marked; `make reproduce RETIME=--retime` on an idle one makes that part again.
PROMPTS ?= 4
ROWS := dense,xattention,xattention+tmr,xattention+ebc,xattention+heart,xattention+joint,svg2,svg2+tmr,svg2+ebc,svg2+heart,svg2+joint
reproduce: $(STAMP)-plots $(PAPER) $(HUNYUAN)
	$(BIN)/heart fetch-weights lpips
	$(BIN)/heart compare --limit $(PROMPTS) --out runs/compare --docs docs/reproduction.md $(RETIME) --methods $(ROWS)
	$(BIN)/heart report runs/compare
	$(BIN)/heart compare --model tiny-hunyuan --limit $(PROMPTS) --out runs/compare-hunyuan --docs docs/reproduction.md $(RETIME) \
	--methods $(ROWS)
	$(BIN)/heart ablate all --quick --steps 25 --seeds 0,1 --out runs/ablate --docs docs/reproduction.md $(RETIME)
	$(BIN)/heart study all --out runs/study --docs docs/reproduction.md

# Speed against quality of HEART and its rivals on prompts that no calibration has seen, and the README's picture of it. Videos
# do not depend on what else the machine does; `make frontier TIMES=--times-only` on an idle one measures the times again.
FRONT := xattention@0.9,xattention+joint,svg2+joint,ear+tmr@0.3,ear+tmr@0.5,pisa+tmr@0.1,pisa+tmr@0.2,heart@0.25,heart@0.30,heart@0.47
frontier: $(STAMP)-plots
	$(BIN)/heart fetch-weights lpips
	$(BIN)/heart frontier --prompts benchmarks/unseen.txt --limit $(PROMPTS) --steps 50 --timed 2 --velocity 2 $(TIMES) \
	--methods $(FRONT) --out runs/frontier --plot docs/images/front.svg

gpu-evidence: $(STAMP)-test
	$(BIN)/python benchmarks/gpu_evidence.py --write docs/gpu-evidence.md

# The README's pictures and table. The front and the table are of FIGURES, the demo's or another results folder.
FIGURES ?= heart-demo
front-page: demo
	$(BIN)/heart report heart-demo --animation docs/images/demo.webp
	$(BIN)/heart report $(FIGURES) --plot docs/images/front.svg
	$(BIN)/python tools/front_page.py $(FIGURES)

# Strict: a link, anchor or picture that leads nowhere fails the build (not with --quiet: it hides warnings from the count).
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tiny: $(STAMP)-test
	$(BIN)/python -m tools.train_tiny

clean:
	rm -rf $(VENV) build dist site *.egg-info
