#!/usr/bin/env bash
# The disk engine's tests as an ordinary user who may lock 8 MiB. Run as root; arguments go to the test programs.
#
# `cargo test` as root runs the checks that are about being an ordinary user (aio/tests/unprivileged.rs); this runs all
# the others that way, too. What needs root says that it is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $EUID -ne 0 ]]; then
    echo "only root can become somebody else: as an ordinary user run 'cargo test -p terrace-aio'" >&2
    exit 2
fi
# Where that user can come: a path below somebody's home may be closed.
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export CARGO_TARGET_DIR="$place/target"
cargo test -p terrace-aio --lib --tests --no-run --message-format=json-render-diagnostics >"$place/build.json"
chmod 755 "$place"
chmod 1777 "$CARGO_TARGET_DIR/tmp"
mapfile -t programs < <(grep -o '"executable":"[^"]*"' "$place/build.json" | cut -d'"' -f4 | sort -u)
for program in "${programs[@]}"; do
    case "$program" in */aio-bench) continue ;; esac
    echo "$program" >&2
    (cd "$CARGO_TARGET_DIR/tmp" && prlimit --memlock=$((8 << 20)) \
        setpriv --reuid=65534 --regid=65534 --clear-groups "$program" "$@")
done
