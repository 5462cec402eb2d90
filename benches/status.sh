#!/usr/bin/env bash
# Measures the CPU time of one `kiln status`: in the run's four processes and in the command itself. Prints its share of
# the run's cores at one call a second, and compares it with the CPU time of `kiln --version`, which starts the same
# program in the same minute. The bound is 3.6 starts, which were 0.5 % of two cores on the machine where it was set.
# The share itself is not bounded, since it grows on slow or busy machines.
#
#     benches/status.sh [LOOKS]
#     benches/status.sh --paired [MINUTES]
#
# One rank of the run hangs on purpose, so that the processes use no CPU time for training. Needs the binary
# (cargo build --release).
#
# With --paired, measures the effect on step times instead: calls `kiln status` on a run of 10m every second for six
# seconds, leaves the run alone for six, and so on. Prints the median ratio of the mean step times of neighbouring
# windows. Nothing else may run on the machine.
set -euo pipefail
cd "$(dirname "$0")/.."
kiln=$(realpath -m "${CARGO_TARGET_DIR:-target}/release/kiln")
looks=${1:-200}
[ -x "$kiln" ] || { echo "$kiln is not built: cargo build --release" >&2; exit 2; }
out=$(mktemp -d)

if [ "${1:-}" = --paired ]; then
    window=6
    "$kiln" train configs/10m.toml --ranks 2 --out "$out/run" --set data.path="$out/data" --set 'data.text=["docs"]' \
        --set train.steps=1000000 --set log.every=1 --set eval.every=0 --set checkpoint.every=0 \
        --set train.global_batch=4 --set train.micro_batch=2 --set sample.prompt= >"$out/log" 2>&1 &
    run=$!
    trap 'kill -KILL $run; wait 2>/dev/null; rm -rf "$out"' EXIT
    until grep -q "^step  *10/" "$out/log"; do
        kill -0 $run || { cat "$out/log" >&2; exit 1; }
        sleep 0.5
    done
    end=$((SECONDS + 60 * ${2:-10}))
    while [ $SECONDS -lt $end ]; do
        if [ $(($(date +%s) / window % 2)) = 0 ]; then
            "$kiln" status "$out/run" >"$out/look" || { cat "$out/look" "$out/log" >&2; exit 1; }
        fi
        sleep 1
    done
    # A step counts for the window that contains all of it. Each window is compared with the window before it.
    sed -n 's/.*"step":\([0-9]*\),.*"step_s":\([0-9.e-]*\).*"time":\([0-9.e]*\).*/\1 \2 \3/p' "$out/run/metrics.jsonl" |
        awk -v window=$window '
            $1 > 5 && int(($3 - $2) / window) == int($3 / window) { sum[int($3 / window)] += $2; steps[int($3 / window)]++ }
            END {
                for (at in sum) if (at - 1 in sum && steps[at] > 3 && steps[at - 1] > 3) {
                    ratio = sum[at] / steps[at] / (sum[at - 1] / steps[at - 1])
                    print at % 2 == 0 ? ratio : 1 / ratio
                }
            }' | sort -g | awk '{ ratio[NR] = $1 } END {
                printf "step time asked every second / not asked: median %.4f of %d pairs, middle half %.4f to %.4f\n",
                    ratio[int((NR + 1) / 2)], NR, ratio[int((NR + 3) / 4)], ratio[int((3 * NR + 3) / 4)]
                exit NR < 20 || ratio[int((NR + 1) / 2)] > 1.005 }'
    exit
fi

"$kiln" launch --nproc-per-node 4 -- train configs/debug.toml --out "$out/run" --set data.path="$out/data" \
    --set train.micro_batch=1 --set train.steps=1000000 --set device.threads=1 --set comm.timeout_s=100000 \
    --fault slow=100000@backward:60:2 >"$out/log" 2>&1 &
launcher=$!
trap 'kill -KILL $launcher; wait 2>/dev/null; rm -rf "$out"' EXIT
until [[ $("$kiln" status "$out/run" 2>/dev/null) == *suspicion:* ]]; do
    kill -0 $launcher || { cat "$out/log" >&2; exit 1; }
    sleep 0.5
done

# Prints the clock ticks of CPU time that the ranks have used.
ranks() {
    for file in "$out"/run/debug/rank_*.json; do
        pid=$(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$file")
        # The process name before the fields contains no blank.
        cut -d' ' -f14,15 "/proc/$pid/stat"
    done | awk '{ ticks += $1 + $2 } END { print ticks }'
}

# Prints the milliseconds of CPU time that commands have used, from the output of `times`.
commands() {
    tail -1 "$1" | tr 'ms' '  ' | awk '{ printf "%d\n", ($1 * 60 + $2 + $3 * 60 + $4) * 1000 }'
}

start() { for _ in $(seq "$looks"); do "$kiln" --version >/dev/null; done; }
look() { for _ in $(seq "$looks"); do "$kiln" status "$out/run" >/dev/null || [ $? -eq 1 ]; done; }

# Alternates between both, so that they run under the same load.
rounds=5 looks=$(((looks + 4) / 5)) look_ms=0 start_ms=0
ticks_before=$(ranks)
for _ in $(seq $rounds); do
    times >"$out/0"; start; times >"$out/1"; look; times >"$out/2"
    start_ms=$((start_ms + $(commands "$out/1") - $(commands "$out/0")))
    look_ms=$((look_ms + $(commands "$out/2") - $(commands "$out/1")))
done
awk -v ticks=$(($(ranks) - ticks_before)) -v hertz="$(getconf CLK_TCK)" -v look=$look_ms -v start=$start_ms \
    -v looks=$((rounds * looks)) -v cores="$(nproc)" 'BEGIN {
    ranks = ticks * 1000 / hertz / looks; look /= looks; start /= looks
    cores = cores < 4 ? cores : 4
    printf "a look: %.2f ms of four processes, %.2f ms of the command; %.2f %% of %d cores, once a second\n", \
        ranks, look, (ranks + look) / (cores * 10), cores
    printf "a start of the program: %.2f ms; a look takes %.2f starts, at most 3.6\n", start, (ranks + look) / start
    exit (ranks + look) / start > 3.6
}' || { echo "a look takes too long" >&2; exit 1; }
