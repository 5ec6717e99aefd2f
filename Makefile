# Two commands on a fresh machine: `make demo` and `make test`. They set up what they need.
#
# Python 3.11 or later, 25 GB of disk and a package index are all they want; no GPU.
# SGLang hosts go into virtual environments under $(BCG_DSA_CACHE), outside this checkout, and are reused.

PYTHON ?= python3
BCG_DSA_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sglang-bcg-dsa
DEMO_HOST ?= 0.5.23
TEST_HOSTS ?= 0.5.16 0.5.23
REFUSED_HOST ?= 0.5.12

# A process that cannot be killed must not hang the whole run.
LIMIT ?= timeout --kill-after=30

.PHONY: help demo test lint clean-cache
.NOTPARALLEL:

help:
	@echo "make demo   rehearse the real SGLang $(DEMO_HOST) server on this CPU (first time: 4 min to install, then 2 min)"
	@echo "make test   the whole suite on SGLang $(TEST_HOSTS) (first time: 8 min to install, then 18 min)"
	@echo "make lint   ruff and mypy"

demo:
	@echo "Rehearsal on SGLang $(DEMO_HOST): about 4 minutes to install the first time, 2 minutes to run."
	@PYTHON="$(PYTHON)" BCG_DSA_CACHE="$(BCG_DSA_CACHE)" tests/host.sh $(DEMO_HOST)
	@"$(BCG_DSA_CACHE)/host-$(DEMO_HOST)/bin/sglang-bcg-dsa" doctor
	@"$(BCG_DSA_CACHE)/host-$(DEMO_HOST)/bin/sglang-bcg-dsa" rehearse --ranks 2 --requests 24

test:
	@echo "Suite on SGLang $(TEST_HOSTS): about 8 minutes to install the first time, 18 minutes to run."
	@PYTHON="$(PYTHON)" BCG_DSA_CACHE="$(BCG_DSA_CACHE)" tests/host.sh --source-only $(REFUSED_HOST)
	@set -e; for host in $(TEST_HOSTS); do \
		PYTHON="$(PYTHON)" BCG_DSA_CACHE="$(BCG_DSA_CACHE)" tests/host.sh $$host; \
	done
	@$(MAKE) --no-print-directory lint
	@set -e; for host in $(TEST_HOSTS); do \
		echo "== SGLang $$host"; \
		BCG_DSA_TEST_OLD_HOST="$(BCG_DSA_CACHE)/source-$(REFUSED_HOST)" $(LIMIT) 1500 \
			"$(BCG_DSA_CACHE)/host-$$host/bin/python" -m pytest $(PYTEST_ARGS); \
	done

lint:
	@PYTHON="$(PYTHON)" BCG_DSA_CACHE="$(BCG_DSA_CACHE)" tests/host.sh $(DEMO_HOST)
	@"$(BCG_DSA_CACHE)/host-$(DEMO_HOST)/bin/ruff" check --config tests/ruff.toml .
	@"$(BCG_DSA_CACHE)/host-$(DEMO_HOST)/bin/mypy"

clean-cache:
	rm -rf "$(BCG_DSA_CACHE)"
