#!/bin/sh
# Cargo's RUSTC_WORKSPACE_WRAPPER for `cargo xtask gpu-pack`: tests that look for fixtures below `env!("CARGO_MANIFEST_DIR")`
# look below the folder they run in, so that they find what travels with them, and `env!("CARGO_TARGET_TMPDIR")` is its `tmp`,
# which run.sh makes.
if [ "$CARGO_MANIFEST_DIR" = "$TERRACE_PACK_ROOT" ]; then
    CARGO_MANIFEST_DIR=.
else
    CARGO_MANIFEST_DIR=${CARGO_MANIFEST_DIR#"$TERRACE_PACK_ROOT"/}
fi
export CARGO_MANIFEST_DIR
if [ -n "${CARGO_TARGET_TMPDIR:-}" ]; then
    export CARGO_TARGET_TMPDIR=tmp
fi
exec "$@"
