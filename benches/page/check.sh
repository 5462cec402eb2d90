#!/usr/bin/env bash
# Checks the web page of runs in a headless Chromium, and /metrics with promtool: benches/page/check.sh [FOR-SCREENSHOTS]
#
# Creates made-up runs, one with a million steps and 64 ranks (300 MB in a temporary folder). Saves screenshots of all
# views to the given folder, if any. Needs chromium, python3 and promtool (Debian: chromium, python3, prometheus).
set -euo pipefail
cd "$(dirname "$0")/../.."
for program in chromium python3 promtool; do
    command -v "$program" >/dev/null || { echo "$program is missing"; exit 2; }
done
cargo build --release -p kiln-observe --example page
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')
python3 benches/page/check.py "$target/release/examples/page" "$work/runs" "$@"
