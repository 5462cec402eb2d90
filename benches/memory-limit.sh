#!/usr/bin/env bash
# Starts runs of 90m in a control group of 2 GiB. 12 that do not fit must be refused before their first step, and run
# with the first setting that the refusal suggests. 5 that are configured with more memory must end with a message that
# lists the owners of memory, and must not be killed by the kernel. Needs root, for the group.
#
#     sudo benches/memory-limit.sh
set -euo pipefail
cd "$(dirname "$0")/.."
kiln=$PWD/target/release/kiln
[ -x "$kiln" ] || { echo "build it first: cargo build --release"; exit 1; }
limit=$((2 << 30))
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    group=/sys/fs/cgroup/kiln-memory-limit
    mkdir -p "$group"
    echo "$limit" >"$group/memory.max"
    [ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
else
    group=/sys/fs/cgroup/memory/kiln-memory-limit
    mkdir -p "$group"
    echo "$limit" >"$group/memory.limit_in_bytes"
    [ ! -e "$group/memory.memsw.limit_in_bytes" ] || echo "$limit" >"$group/memory.memsw.limit_in_bytes"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"; rmdir "$group" 2>/dev/null || true' EXIT
inside() { bash -c 'echo $$ >"$0/cgroup.procs"; exec "$@"' "$group" "$kiln" "$@"; }

"$kiln" data prepare --input README.md docs --out "$work/data" --vocab-size 512 >/dev/null
cat >"$work/run.toml" <<TOML
[model]
preset = "90m"
[data]
path = "$work/data"
vocab_size = 512
seq_len = 256
[train]
steps = 2
global_batch = 16
micro_batch = 8
ranks = 2
[optim]
lr = 1e-3
warmup_steps = 1
TOML
failed=0
train() { rm -rf "$work/out"; inside train "$work/run.toml" --out "$work/out" "$@" >"$work/said" 2>&1; }
refused() {
    code=0
    train "$@" || code=$?
    mend=$(sed -n 's/^  \(--set .*\): takes .*/\1/p' "$work/said" | head -1)
    if [ "$code" != 2 ] || [ -z "$mend" ]; then
        echo "NOT REFUSED ($code)  $*"
        cat "$work/said"
        failed=1
        return
    fi
    code=0
    # shellcheck disable=SC2086
    train "$@" $mend || code=$?
    if [ "$code" = 0 ]; then
        echo "refused, and runs with $mend  |  $*"
    else
        echo "REFUSED, BUT DOES NOT RUN ($code) with $mend  |  $*"
        cat "$work/said"
        failed=1
    fi
}
ends_with_owners() {
    code=0
    train --set device.memory=64GiB "$@" || code=$?
    if [ "$code" = 1 ] && grep -q "^error: out of memory: rank" "$work/said" && grep -q "optimizer state" "$work/said"; then
        echo "ends with the owners  |  $*"
    else
        echo "ENDS WITHOUT THE OWNERS ($code)  |  $*"
        cat "$work/said"
        failed=1
    fi
}
set_() { for setting; do printf -- '--set %s ' "$setting"; done; }
# shellcheck disable=SC2046
{
    refused
    refused $(set_ train.micro_batch=4 data.seq_len=512)
    refused $(set_ shard.strategy=SHARD_GRAD_OP)
    refused $(set_ shard.strategy=NO_SHARD train.micro_batch=2 train.global_batch=4)
    refused $(set_ shard.strategy=NO_SHARD train.micro_batch=4 train.global_batch=8 shard.recompute=block)
    refused $(set_ train.micro_batch=2 train.global_batch=8 data.seq_len=512)
    refused $(set_ train.micro_batch=4 train.global_batch=32)
    refused $(set_ data.seq_len=1024 train.micro_batch=2 train.global_batch=4)
    refused $(set_ model.layers=20 train.micro_batch=4 train.global_batch=8)
    refused $(set_ train.ranks=4 train.micro_batch=4)
    refused $(set_ train.ranks=1 train.micro_batch=16)
    refused $(set_ precision.compute=bf16 train.micro_batch=16 train.global_batch=32)
    ends_with_owners
    ends_with_owners $(set_ shard.strategy=NO_SHARD)
    ends_with_owners $(set_ shard.strategy=SHARD_GRAD_OP)
    ends_with_owners $(set_ data.seq_len=512 train.micro_batch=4)
    ends_with_owners $(set_ train.ranks=1 train.micro_batch=16)
}
[ "$failed" = 0 ] && echo PASS || { echo FAIL; exit 1; }
