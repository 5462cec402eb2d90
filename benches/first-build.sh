#!/usr/bin/env bash
# Measures a newcomer's first build: `cargo build --release` from an empty target folder, and lists the slowest crates.
# Dependencies are downloaded beforehand. Run nothing else meanwhile.
#
#     benches/first-build.sh            this tree
#     benches/first-build.sh OLD        a clone of another commit first, then this tree, and the ratio of their times
#
# A crate's time is the wall time from its start to its end, while other crates build in parallel.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
if [ $# -gt 0 ]; then set -- "$(realpath "$1")"; fi
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export CARGO_INCREMENTAL=0

# Builds the clone $1 and writes the build time in seconds to $out/seconds.
build() {
    cargo fetch --quiet --manifest-path "$1/Cargo.toml"
    local start=$EPOCHREALTIME
    (cd "$1" && CARGO_TARGET_DIR=$out/target cargo build --release --quiet --timings)
    echo "$start $EPOCHREALTIME" | awk '{printf "%.0f\n", $2 - $1}' >"$out/seconds"
    echo "$(git -C "$1" describe --always --dirty): $(cat "$out/seconds") s"
    python3 - "$out/target/cargo-timings/cargo-timing.html" <<'PYTHON'
import collections, json, re, sys
units = re.search(r"const UNIT_DATA = (\[.*?\]);\n", open(sys.argv[1]).read(), re.S).group(1)
seconds = collections.Counter()
for unit in json.loads(units):
    seconds[unit["name"]] += unit["duration"]
print("  " + ", ".join(f"{name} {time:.0f}" for name, time in seconds.most_common(12)))
PYTHON
    rm -rf "$out/target"
}

if [ $# -gt 0 ]; then
    build "$1"
    old=$(cat "$out/seconds")
    build .
    awk -v old="$old" -v new="$(cat "$out/seconds")" 'BEGIN { printf "%+.0f %%\n", (new / old - 1) * 100 }'
else
    build .
fi
