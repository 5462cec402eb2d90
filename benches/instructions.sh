#!/usr/bin/env bash
# Counts the instructions of a training step on the CPU with valgrind and compares them with the recorded number.
# This detects slow-downs that timings on a noisy machine would hide.
#
#     benches/instructions.sh             compare; fails at a difference of more than 5 %
#     benches/instructions.sh --record    record the current number
#
# One rank, one thread, a small model. valgrind does not support AVX-512, so the AVX2 kernels are counted: the number
# is the same on any x86-64 machine. Needs valgrind and kiln-bench (cargo build --release --workspace).
set -euo pipefail
cd "$(dirname "$0")/.."
record=benches/instructions.txt
bench=${CARGO_TARGET_DIR:-target}/release/kiln-bench
command -v valgrind >/dev/null || { echo "valgrind is not installed: apt-get install valgrind" >&2; exit 2; }
[ -x "$bench" ] || { echo "$bench is not built: cargo build --release --workspace" >&2; exit 2; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# Prints the number of instructions of a run with $1 steps.
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

# The work before and after the steps is the same in both runs and cancels out.
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
    echo "a difference of more than 5 %. If intended, run benches/instructions.sh --record and commit it with the reason" >&2
    exit 1
fi
