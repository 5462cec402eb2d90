#!/usr/bin/env bash
# Checks that two builds of kiln train to the same bits: every loss, gradient norm and validation loss of 20 steps,
# under every strategy at 1, 2 and 3 ranks, as threads and as processes, in f32 and bf16, and of a run that the second
# build resumes from a checkpoint of the first.
#
#     benches/same-bits.sh OLD NEW            two binaries; about eight minutes on two cores
#     CONFIGS=debug benches/same-bits.sh OLD NEW
#
# Prints a line per run; exits with 1 if one differs. Needs python3.
set -uo pipefail
[ $# = 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
old=$(realpath "$1") new=$(realpath "$2")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# Compares the metrics of two runs.
compare() {
    python3 - "$work/$2/metrics.jsonl" "$work/$3/metrics.jsonl" <<'PYTHON' || same=DIFFERENT
import json, sys
keys = ("step", "loss", "grad_norm", "val_loss")
logged = [[[line.get(key) for key in keys] for line in map(json.loads, open(path))] for path in sys.argv[1:]]
sys.exit(0 if logged[0] == logged[1] and len(logged[0]) > 0 else 1)
PYTHON
    printf '%-60s %s\n' "$1" "${same:=same}"
    [ "$same" = same ] || failed=1
    unset same
}

# train BINARY OUT CONFIG RANKS threads|processes [ARGUMENTS]
train() {
    local binary=$1 out=$work/$2 config=configs/$3.toml ranks=$4 as=$5
    shift 5
    if [ "$as" = threads ]; then
        "$binary" train "$config" --out "$out" --ranks "$ranks" "$@" >/dev/null 2>"$out.log"
    else
        "$binary" launch --nproc-per-node "$ranks" -- train "$config" --out "$out" "$@" >/dev/null 2>"$out.log"
    fi || { tail -3 "$out.log" >&2; failed=1; }
}

for config in ${CONFIGS:-debug quickstart 10m moe}; do
    for ranks in 1 2 3; do
        for strategy in FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD; do
            for precision in f32 bf16; do
                for as in threads processes; do
                    arguments=(--set train.steps=20 --set optim.warmup_steps=2 --set log.every=1
                        --set eval.samples=2 --set train.global_batch=6 --set train.micro_batch=1
                        --set "shard.strategy=$strategy" --set "precision.compute=$precision"
                        --set device.backend=cpu --set device.threads=2 --set device.peak_tflops=1
                        --set "data.path=$work/data-$config")
                    case $config in
                    quickstart) arguments+=(--set data.seq_len=64) ;;
                    debug) ;;
                    *) arguments+=(--set 'data.text=["builtin:arithmetic"]' --set data.seq_len=32 --set model.layers=2) ;;
                    esac
                    if [ $strategy = HYBRID_SHARD ]; then
                        arguments+=(--set "shard.shard_size=$([ "$ranks" = 2 ] && echo 1 || echo "$ranks")")
                    fi
                    name="$config, $ranks ranks, $strategy, $precision, $as"
                    train "$old" old $config $ranks $as "${arguments[@]}"
                    train "$new" new $config $ranks $as "${arguments[@]}"
                    compare "$name" old new
                    rm -rf "$work/old" "$work/new"
                    if [ "$config $as" = "debug threads" ]; then
                        train "$old" old $config $ranks $as "${arguments[@]}" --set checkpoint.every=10 --set checkpoint.keep=0
                        cp -r "$work/old" "$work/new"
                        train "$old" old $config $ranks $as "${arguments[@]}" --resume "$work/old/checkpoints/fsdp_cpt10"
                        train "$new" new $config $ranks $as "${arguments[@]}" --resume "$work/new/checkpoints/fsdp_cpt10"
                        compare "$name, resumed" old new
                        rm -rf "$work/old" "$work/new"
                    fi
                done
            done
        done
    done
done
exit $failed
