#!/usr/bin/env bash
# Instructions of a training step on the CPU, counted by valgrind, held against the recorded number: a
# slow-down that a noisy machine hides from a clock shows here.
#
#     benches/instructions.sh             compare: fails beyond 5 % more or less
#     benches/instructions.sh --record    record the number of today
#
# One rank, one thread, a small model. valgrind knows no AVX-512, so the kernels of machines with AVX2 are
# counted, on any x86-64 machine the same. Needs valgrind and kiln-bench (cargo build --release --workspace).
set -euo pipefail
cd "$(dirname "$0")/.."
record=benches/instructions.txt
bench=${CARGO_TARGET_DIR:-target}/release/kiln-bench
command -v valgrind >/dev/null || { echo "valgrind is not installed: apt-get install valgrind" >&2; exit 2; }
[ -x "$bench" ] || { echo "$bench is not built: cargo build --release --workspace" >&2; exit 2; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Instructions of a run with $1 steps.
count() {
    valgrind --tool=callgrind --callgrind-out-file="$out/calls" --log-file="$out/log" \
        "$bench" step --json --ranks 1 --config configs/10m.toml --steps "$1" --warmup 1 \
        --set model.layers=2 --set model.d_model=128 --set model.heads=2 --set model.kv_heads=2 \
        --set model.d_ff=344 --set data.vocab_size=1024 --set data.seq_len=64 \
        --set train.global_batch=1 --set train.micro_batch=1 \
        --set device.backend=cpu --set device.threads=1 --set device.peak_tflops=1 \
        --set shard.strategy=FULL_SHARD >"$out/report" || { cat "$out/log" >&2; exit 1; }
    sed -n 's/^summary: //p' "$out/calls"
}

# What both runs do before and after the steps cancels out.
few=$(count 1) many=$(count 3)
step=$(((many - few) / 2))
if [ "${1:-}" = --record ]; then
    echo "$step" >"$record"
    echo "recorded $step instructions per step in $record"
    exit
fi
recorded=$(cat "$record")
echo "$step instructions per step, recorded $recorded"
if [ $((step * 100)) -gt $((recorded * 105)) ] || [ $((step * 100)) -lt $((recorded * 95)) ]; then
    echo "that is more than 5 % apart. If it is meant, say why in the commit and run: benches/instructions.sh --record" >&2
    exit 1
fi
