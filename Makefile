# Plain cargo does the work; these are the commands that people and CI type.
.PHONY: run test check bench bench-micro smoke profile
.DEFAULT_GOAL := run

TARGET := $(or $(CARGO_TARGET_DIR),target)
# One line to go by when Rust is not there (or only installed, and not on the PATH of this shell).
NEED_CARGO := command -v cargo >/dev/null || { echo "Rust is missing: install it with  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh  and open a new shell (needs 1.95 or newer)" >&2; exit 1; }

# A private Postgres, RabbitMQ and server, with two requests to paste. Ctrl-C stops everything and keeps the data.
run:
	@$(NEED_CARGO)
	cargo build --release --bin daybook
	@exec $(TARGET)/release/daybook dev

# Adds up cargo's result lines while passing everything on. A run that broke without a count (it did not compile, a test binary
# crashed, nothing ran, it was interrupted before it said its status) is one failure: the last line never looks better than the run was.
SUM := BEGIN { status = "unknown" } \
	/^test result:/ { passed += $$4; failed += $$6 } \
	/^@status / { status = $$2; next } \
	{ print; fflush() } \
	END { \
		if (failed == 0 && (status != "0" || passed == 0)) failed = 1; \
		printf "%d passed, %d failed\n", passed, failed; \
		exit failed > 0 \
	}

# All tests against one private Postgres and two private brokers, which are made for the run and stopped after it.
test:
	@$(NEED_CARGO)
	@{ status=0; \
		{ cargo build --bin daybook && cargo test --workspace --no-run && \
		$(TARGET)/debug/daybook services run -- cargo test --workspace --no-fail-fast; } 2>&1 || status=$$?; \
		echo "@status $$status"; } | (trap '' INT TERM; awk '$(SUM)')

# What CI holds besides the tests.
check:
	@$(NEED_CARGO)
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps

# What the ledger costs, beside plain SQL on the same private servers; they are durable, as a real one is. SCENARIO=name runs one at
# its full length; without it the standard set takes less than a quarter of an hour. Built as the image is, which takes longer.
BENCH_DIR := .daybook/bench
MEASURED := cargo build --profile dist --workspace
MEASURE = exec $(TARGET)/dist/daybook services run --durable $(1) --dir $(BENCH_DIR) -- $(TARGET)/dist/daybook-loadtest $(2) --program $(TARGET)/dist/daybook

bench:
	@$(NEED_CARGO)
	$(MEASURED)
	@$(call MEASURE,,bench $(SCENARIO))

# The shortest look, in about a minute; writes nothing into the tree.
smoke:
	@$(NEED_CARGO)
	$(MEASURED)
	@$(call MEASURE,,bench smoke --short --report $(TARGET)/smoke)

# Where the time goes at saturation: processor time by program, a flame graph and the dearest statements, in loadtest/report/.
profile:
	@$(NEED_CARGO)
	$(MEASURED)
	@$(call MEASURE,--statement-statistics,profile)

# What each part of an event's pure path takes, in time. What it takes in instructions is held by CI (.ci/instructions).
bench-micro:
	@$(NEED_CARGO)
	cargo bench -p daybook-loadtest --bench micro
