#!/usr/bin/env bash
# Draws a flame graph of training steps on the CPU: the time of each function.
#
#     benches/flamegraph.sh [OUT.svg] [-- arguments of `kiln-bench step`]
#
# Samples some steps of preset 10m with perf and draws them with inferno (cargo install inferno). Uses the existing
# release build and unwinds stacks from its tables. That makes samples large, so keep the runs short.
# Needs perf and a kernel that lets you sample your own processes (kernel.perf_event_paranoid at most 2).
set -euo pipefail
cd "$(dirname "$0")/.."
out=flamegraph.svg
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    out=$1
    shift
fi
[ "${1:-}" != -- ] || shift
command -v perf >/dev/null || { echo "perf is not installed: apt-get install linux-perf" >&2; exit 2; }
for tool in inferno-collapse-perf inferno-flamegraph; do
    command -v "$tool" >/dev/null || { echo "$tool is not installed: cargo install inferno" >&2; exit 2; }
done

bench=${CARGO_TARGET_DIR:-target}/release/kiln-bench
[ -x "$bench" ] || { echo "$bench is not built: cargo build --release --workspace" >&2; exit 2; }
samples=$(mktemp -d)
trap 'rm -rf "$samples"' EXIT
perf record --quiet --call-graph dwarf,16384 --freq 199 --output "$samples/perf.data" -- \
    "$bench" step --config configs/10m.toml --steps 10 --warmup 2 \
    --set train.global_batch=4 --set train.micro_batch=4 "$@"
perf script --no-inline --input "$samples/perf.data" 2>/dev/null |
    inferno-collapse-perf |
    inferno-flamegraph --title "kiln-bench step $*" >"$out"
echo "$out"
