#!/usr/bin/env bash
# Measures the host's cost of a training step: launches, bytes and microseconds per step and per block, without a GPU.
# Steps run under the stand-in for NVIDIA's driver (benches/standins), whose kernels compute nothing, so the time
# of a step is the host's.
#
#     benches/host_cost.sh                # presets 90m, 300m, 1b and 7b
#     benches/host_cost.sh 300m 1b        # some of them
#     benches/host_cost.sh --check        # preset 10m; compares launches with benches/host_cost.toml, as .ci/run does
#
# Each preset runs twice, with 2 and with 4 blocks of its width. The difference is the cost of a block, which is
# the same in every block. Traces, reports and the PTX of all kernels stay in target/host_cost/PRESET/BLOCKS,
# where benches/predict.sh reads them. STEPS is the number of timed steps (default 3).
set -euo pipefail
check=()
presets=()
for word in "$@"; do
    case $word in
    -h | --help)
        sed -n '2,13s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --check) check=(--limits benches/host_cost.toml) presets=(10m) ;;
    *) presets+=("$word") ;;
    esac
done
[ ${#presets[@]} -gt 0 ] || presets=(90m 300m 1b 7b)

cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${KILN_GPU_PROFILE:-release}
# One set of features for everything here, so that burn is built once.
build=(--profile "$profile" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)
cargo build --quiet "${build[@]}" --bin kiln-bench --bin kernels
programs=$target/$profile
benches/standins/setup.sh
out=$target/host_cost
mkdir -p "$out"
out=$(cd "$out" && pwd)

# Preset, sequences and tokens per sequence: one micro-batch of 16,384 tokens, as benches/gpu.sh measures steps.
shape() {
    case $1 in
    10m) echo 4 256 ;;
    90m) echo 32 512 ;;
    300m) echo 16 1024 ;;
    1b) echo 8 2048 ;;
    7b) echo 4 4096 ;;
    *) echo "$1: no batch is known for this preset" >&2; return 2 ;;
    esac
}
folders=()
for preset in "${presets[@]}"; do
    read -r batch seq <<<"$(shape "$preset")"
    for blocks in 2 4; do
        folder=$out/$preset/$blocks
        rm -rf "$folder"
        mkdir -p "$folder"
        folders+=("$folder")
        (
            # shellcheck source=/dev/null
            . "$target/standins/env.sh"
            # Only the width matters: nothing is computed, and untouched memory costs nothing.
            export XDG_CACHE_HOME=$out/cache FAKE_CUDA_TRACE=$folder/trace.txt FAKE_CUDA_PTX_DIR=$folder
            # A rank of 8 has the memory for this only, and a model of a few blocks would need less.
            more=()
            [ "$preset" != 7b ] || more=(--set shard.recompute=selective)
            "$programs/kiln-bench" step --config "configs/$preset.toml" --set device.backend=cuda \
                --set train.ranks=1 --set model.layers=$blocks --set train.global_batch="$batch" \
                --set train.micro_batch="$batch" --set data.seq_len="$seq" --set precision.compute=bf16 "${more[@]}" \
                --steps "${STEPS:-3}" --warmup 2 --json >"$folder/report.json"
        )
    done
done
echo "host: profile $profile, with a line written for each call, on $(nproc) cores"
"$programs/kernels" --host "${check[@]}" "${folders[@]}"
