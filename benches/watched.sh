#!/usr/bin/env bash
# Checks that monitoring costs a run at most 0.5 % of a step of 10m:
#
# - the additional instructions of a step that writes TensorBoard files and a line of metrics in every step, counted by
#   valgrind, compared with the same run with a line of metrics every ten steps;
# - the CPU time of the threads that serve the page while a page is open, as a share of all cores.
#
#     benches/watched.sh
#
# Takes 45 minutes while builds run: valgrind counts a step of 10m. Needs valgrind, curl and the binaries
# (cargo build --release --workspace).
set -euo pipefail
cd "$(dirname "$0")/.."
unset KILN_HTTP_TOKEN
kiln=$(realpath -m "${CARGO_TARGET_DIR:-target}/release/kiln")
bench=${CARGO_TARGET_DIR:-target}/release/kiln-bench
for command in valgrind curl; do
    command -v $command >/dev/null || { echo "$command is not installed: apt-get install $command" >&2; exit 2; }
done
for binary in "$kiln" "$bench"; do
    [ -x "$binary" ] || { echo "$binary is not built: cargo build --release --workspace" >&2; exit 2; }
done
out=$(mktemp -d)
run=
trap '[ -z "$run" ] || kill -KILL $run; wait 2>/dev/null; rm -rf "$out"' EXIT

# Prints the number of instructions of a command.
count() {
    valgrind --tool=callgrind --callgrind-out-file="$out/calls" --log-file="$out/log" "$@" >"$out/report" 2>&1 ||
        { cat "$out/log" "$out/report" >&2; exit 1; }
    sed -n 's/^summary: //p' "$out/calls"
}

# A small run of $1 steps; the rest are settings.
train() {
    local steps=$1
    shift
    rm -rf "$out/run"
    count "$kiln" train configs/debug.toml --ranks 1 --out "$out/run" --set data.path="$out/data" \
        --set train.steps="$steps" --set train.global_batch=1 --set train.micro_batch=1 --set checkpoint.every=0 \
        --set eval.samples=1 --set sample.prompt= --set device.backend=cpu --set device.threads=1 \
        --set device.peak_tflops=1 --set optim.warmup_steps=1 "$@"
}

# 256 of the 8,192 tokens of a step of 10m. The passes of the other tokens take as many instructions.
step() {
    count "$bench" step --json --ranks 1 --config configs/10m.toml --steps "$1" --warmup 1 \
        --set train.global_batch=1 --set train.micro_batch=1 --set device.backend=cpu --set device.threads=1 \
        --set device.peak_tflops=1
}

"$kiln" train configs/debug.toml --ranks 1 --out "$out/prepared" --set data.path="$out/data" --set train.steps=1 \
    >"$out/log" 2>&1 || { cat "$out/log" >&2; exit 1; }
plain=$(($(train 41 --set log.every=10) - $(train 11 --set log.every=10)))
shown=$(($(train 41 --set log.every=1 --set log.tensorboard=true) - $(train 11 --set log.every=1 --set log.tensorboard=true)))
whole=$((32 * ($(step 2) - $(step 1))))
more=$(((shown - plain) / 30))

# Starts a run of 10m with a page and sends the page's requests every second for half a minute.
"$kiln" train configs/10m.toml --ranks 2 --out "$out/open" --set data.path="$out/text" --set 'data.text=["docs"]' \
    --set train.steps=100000 --set log.every=1 --set log.http=127.0.0.1:0 >"$out/log" 2>&1 &
run=$!
until grep -q "^step  *3/" "$out/log"; do
    kill -0 $run || { cat "$out/log" >&2; exit 1; }
    sleep 0.5
done
page=$(sed -n 's/^this run is at //p' "$out/log")

# Prints the nanoseconds of CPU time of the threads that serve the page.
served() {
    for thread in /proc/$run/task/*; do
        case $(cat "$thread/comm" 2>/dev/null) in
        kiln-page* | kiln-debug*) cut -d' ' -f1 "$thread/schedstat" 2>/dev/null ;;
        esac
    done | awk '{ sum += $1 } END { printf "%d", sum }'
}

ask() {
    curl -sSf --max-time 5 -o /dev/null "$page$1"
}

seconds=30
ask "api/runs"
before=$(served)
for _ in $(seq $seconds); do
    for path in api/runs "api/series?run=open&key=loss&points=1500" "api/series?run=open&key=val_loss&points=1500" \
        "api/look?run=open" "api/timeline?run=open" "api/events?run=open"; do
        ask "$path"
    done
    sleep 1
done
after=$(served)
awk -v more="$more" -v whole="$whole" -v ns=$((after - before)) -v seconds=$seconds -v cores="$(nproc)" 'BEGIN {
    instructions = more / whole * 100
    page = ns / 1e9 / seconds / cores * 100
    printf "TensorBoard and a line in every step: %d instructions more, %.4f %% of a step of 10m (%.0f)\n", \
        more, instructions, whole
    printf "a page that is open: %.2f ms of CPU time a second, %.3f %% of %d cores\n", ns / 1e6 / seconds, page, cores
    printf "together %.3f %%\n", instructions + page
    exit instructions + page > 0.5
}' || { echo "monitoring costs more than 0.5 %" >&2; exit 1; }
