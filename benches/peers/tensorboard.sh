#!/bin/sh
# Checks that TensorBoard reads the values that Kiln wrote.
#
#     benches/peers/tensorboard.sh
#
# Creates an environment with TensorBoard in target/tensorboard and trains tiny runs there. Resumes them from the last
# checkpoint, from an earlier one and after a kill, and compares every value with metrics.jsonl, and histograms with
# the weights of checkpoints. Ends with PASS or FAIL. KILN names the binary (default target/release/kiln, from
# `cargo build --release`), PYTHON the interpreter of the environment (default python3, 3.11 or newer).
set -eu

case "${1:-}" in
-h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/../.."
kiln=$(realpath -m "${KILN:-${CARGO_TARGET_DIR:-target}/release/kiln}")
[ -x "$kiln" ] || { echo "$kiln is not built: cargo build --release" >&2; exit 2; }
venv=target/tensorboard/venv
if ! "$venv/bin/python" -c 'import tensorboard, numpy' 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
        tensorboard==2.21.0 numpy==2.4.6 setuptools==80.9.0
fi
exec "$venv/bin/python" benches/peers/event_files.py "$kiln" target/tensorboard/runs
