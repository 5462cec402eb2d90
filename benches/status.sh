#!/usr/bin/env bash
# What a look with `kiln status` takes from a run: CPU time of the run's four processes and of the command itself,
# held against 0.5 % of the time of the cores that the run has when it is asked once a second.
#
#     benches/status.sh [LOOKS]
#     benches/status.sh --paired [PAIRS]
#
# One rank of the run hangs on purpose, so that the processes take no time of their own. Needs the binary
# (cargo build --release).
#
# With --paired, the other way around: runs of 10m that nobody asks alternate with runs that are asked every second,
# and the median over all pairs of the ratio of their median step times is told. For a machine that does nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
kiln=$(realpath -m "${CARGO_TARGET_DIR:-target}/release/kiln")
looks=${1:-200}
[ -x "$kiln" ] || { echo "$kiln is not built: cargo build --release" >&2; exit 2; }
out=$(mktemp -d)

if [ "${1:-}" = --paired ]; then
    trap 'rm -rf "$out"' EXIT
    # The median time of a step of 10m on two ranks; $1 names the run, $2 whether it is asked.
    median_step() {
        "$kiln" train configs/10m.toml --ranks 2 --out "$out/$1" --set data.path="$out/data" \
            --set 'data.text=["docs"]' --set train.steps=60 --set log.every=1 --set eval.samples=8 \
            --set optim.warmup_steps=5 --set train.global_batch=8 --set sample.prompt= >"$out/log" 2>&1 &
        local run=$!
        if [ "$2" = asked ]; then
            while kill -0 $run 2>/dev/null; do
                "$kiln" status "$out/$1" >/dev/null 2>&1 || true
                sleep 1
            done
        fi
        wait $run || { cat "$out/log" >&2; exit 1; }
        sed -n 's/.*"step_s":\([0-9.e-]*\).*/\1/p' "$out/$1/metrics.jsonl" | tail -n +6 | sort -g |
            awk '{ step[NR] = $1 } END { print step[int((NR + 1) / 2)] }'
        rm -rf "${out:?}/$1"
    }
    median_step warm alone >/dev/null
    for pair in $(seq "${2:-15}"); do
        # Whoever comes first changes from pair to pair.
        if [ $((pair % 2)) = 0 ]; then
            alone=$(median_step alone alone) asked=$(median_step asked asked)
        else
            asked=$(median_step asked asked) alone=$(median_step alone alone)
        fi
        awk -v a="$asked" -v b="$alone" 'BEGIN { printf "%.5f\n", a / b }' | tee -a "$out/ratios" >&2
    done
    sort -g "$out/ratios" | awk '{ ratio[NR] = $1 } END {
        printf "step time asked every second / not asked: median %.4f of %d pairs, middle half %.4f to %.4f\n",
            ratio[int((NR + 1) / 2)], NR, ratio[int((NR + 3) / 4)], ratio[int((3 * NR + 3) / 4)]
        exit ratio[int((NR + 1) / 2)] > 1.005 }'
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

# Clock ticks of CPU time that the ranks have taken.
ranks() {
    for file in "$out"/run/debug/rank_*.json; do
        pid=$(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$file")
        # The name before the fields has no blank in it.
        cut -d' ' -f14,15 "/proc/$pid/stat"
    done | awk '{ ticks += $1 + $2 } END { print ticks }'
}

# Milliseconds of CPU time that commands have taken, by what `times` has written.
commands() {
    tail -1 "$1" | tr 'ms' '  ' | awk '{ printf "%d\n", ($1 * 60 + $2 + $3 * 60 + $4) * 1000 }'
}

before=$(ranks)
times >"$out/before"
for _ in $(seq "$looks"); do "$kiln" status "$out/run" >/dev/null || [ $? -eq 1 ]; done
times >"$out/after"
after=$(ranks) commands_before=$(commands "$out/before") commands_after=$(commands "$out/after")
awk -v ticks=$((after - before)) -v hertz="$(getconf CLK_TCK)" -v command=$((commands_after - commands_before)) \
    -v looks="$looks" -v cores="$(nproc)" 'BEGIN {
    ranks = ticks * 1000 / hertz / looks; command = command / looks
    cores = cores < 4 ? cores : 4
    share = (ranks + command) / (cores * 1000) * 100
    printf "a look: %.2f ms of four processes, %.2f ms of the command; %.2f %% of %d cores, once a second\n", \
        ranks, command, share, cores
    exit share > 0.5
}' || { echo "that is more than 0.5 %" >&2; exit 1; }
