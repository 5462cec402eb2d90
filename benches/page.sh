#!/usr/bin/env bash
# Checks the web page of runs and a report in a headless Chromium against the files of made-up runs:
#
#     benches/page.sh [FOR-SCREENSHOTS]
#
# Writes 1, 8 and 20 runs, among them a killed one, one with NaN and one of a single step. Compares the last values, the
# values under the mouse and the CSV of charts with metrics.jsonl, and checks that the marks of axes are distinct and round
# and that all views fit 1280, 1920 and 390 pixels, light and dark. Their screenshots go to the folder, if one is given.
# benches/page/check.sh checks the rest: a run of a million steps, strangers, and /metrics.
#
# Needs python3 and chromium, which it installs as root.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
shots=${1:+$(realpath -m "$1")}
cd "$(dirname "$0")/.."
command -v python3 >/dev/null || { echo "python3 is missing" >&2; exit 2; }
if ! command -v chromium >/dev/null; then
    [ "$(id -u)" = 0 ] || { echo "chromium is missing: apt-get install chromium" >&2; exit 2; }
    apt-get install -y --no-install-recommends chromium >&2
fi
cargo build -p kiln-observe --example page
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')
python3 benches/page/values.py "$target/debug/examples/page" "$work" ${shots:+"$shots"}
