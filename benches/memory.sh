#!/usr/bin/env bash
# Compares the memory of training steps at their real sizes with `kiln plan`, without a GPU: the memory that the driver
# allocates for a rank, without the driver's own. Fails if the plan is more than 2 % too low, or more than 5 % and a
# page too high, or if more than MOST_WASTE percent (default 5) of a full GPU's memory (300m, 1b and 7b on one rank) is
# not in use at the peak. (The page that a buffer fits into depends on how far the host is ahead of the GPU, and in a
# small step a page is more than 5 %.)
#
#     benches/memory.sh            # all configurations, about 10 minutes on two cores
#     benches/memory.sh 300m       # the configurations of some presets
#
# Steps run under the stand-in for NVIDIA's driver (benches/standins): device memory is reserved and not touched.
# Several ranks are threads that share the GPU, each with separate pages. With shard.communicate_alone, a rank uses
# NCCL, and no collective runs before the host waits at the end of a step: the host is as far ahead as possible.
# Weights are zeros, so that no random numbers are drawn, and large copies are skipped. Prints a table in Markdown;
# reports and traces stay in target/memory.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,15s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
[ $# -gt 0 ] || set -- 10m 90m 300m 1b 7b

cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${KILN_GPU_PROFILE:-release}
# One set of features for everything here, so that burn is built once.
cargo build --profile "$profile" --workspace --features kiln-benches/cuda,kiln-benches/wgpu --bin kiln-bench
benches/standins/setup.sh

# Preset, ranks, micro-batches, sequences and tokens of each, GiB of the GPU (an H100's, and for 7b an H200's), and
# settings.
configurations() {
    cat <<LIST
10m 1 1 4 256 80
10m 1 1 4 256 80 precision.compute=f32
10m 1 3 4 256 80
10m 1 1 4 256 80 shard.recompute=block
10m 1 1 4 256 80 shard.recompute=selective
10m 2 1 4 256 80 shard.strategy=FULL_SHARD
10m 2 1 4 256 80 shard.strategy=SHARD_GRAD_OP
10m 2 1 4 256 80 shard.strategy=NO_SHARD
10m 4 1 4 256 80 shard.strategy=FULL_SHARD
10m 4 1 4 256 80 shard.strategy=SHARD_GRAD_OP
10m 4 1 4 256 80 shard.strategy=NO_SHARD
10m 4 1 4 256 80 shard.strategy=HYBRID_SHARD shard.shard_size=2
10m 4 2 4 256 80 shard.strategy=FULL_SHARD shard.recompute=block precision.compute=f32
90m 1 1 8 512 80
90m 1 1 8 512 80 precision.compute=f32
90m 1 1 8 512 80 shard.recompute=block
90m 1 3 8 512 80
90m 1 1 8 512 80 shard.offload=true
90m 2 1 8 512 80 shard.strategy=FULL_SHARD
90m 2 1 8 512 80 shard.strategy=SHARD_GRAD_OP
90m 2 1 8 512 80 shard.strategy=NO_SHARD
90m 2 3 8 512 80 shard.strategy=FULL_SHARD shard.recompute=block
90m 2 3 8 512 80 shard.strategy=FULL_SHARD shard.recompute=block shard.accumulate=unsharded
90m 2 2 8 512 80 shard.strategy=SHARD_GRAD_OP precision.compute=f32
90m 2 1 8 512 80 shard.strategy=FULL_SHARD shard.offload=true
90m 4 1 8 512 80 shard.strategy=FULL_SHARD
90m 4 1 8 512 80 shard.strategy=SHARD_GRAD_OP
90m 4 1 8 512 80 shard.strategy=NO_SHARD
300m 1 1 16 1024 80
300m 1 1 2 1024 80 shard.communicate_alone=true precision.reduce=bf16
300m 2 1 4 1024 80 shard.strategy=FULL_SHARD
300m 4 2 2 1024 80 shard.strategy=FULL_SHARD shard.recompute=block
1b 1 1 8 2048 80
1b 1 2 8 2048 80 shard.recompute=block
1b 1 1 8 2048 80 shard.recompute=selective
1b 2 1 2 2048 80 shard.strategy=FULL_SHARD
7b 1 1 1 4096 140 shard.recompute=block
7b 1 1 1 4096 140 shard.recompute=selective
LIST
}

# Prints a figure of a report.
figure() { sed -n "s/.*\"$2\":\([0-9]*\).*/\1/p" "$1"; }

echo
echo "| preset | ranks | step | settings | GB of the driver | by the plan | difference | GB in use, by the plan | GB after a step | by the plan | pages | of other sizes | not in use |"
echo "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
failed=0
number=0
while read -r preset ranks passes batch seq gib settings; do
    [[ " $* " == *" $preset "* ]] || continue
    number=$((number + 1))
    out=$target/memory/$preset/$number
    rm -rf "$out"
    mkdir -p "$out"
    more=()
    for setting in $settings; do more+=(--set "$setting"); done
    (
        # shellcheck source=/dev/null
        . "$target/standins/env.sh"
        export FAKE_CUDA_TRACE=$out/trace.txt FAKE_CUDA_MEMORY_GIB=$gib FAKE_CUDA_COPY_MIB=1 FAKE_CUDA_AHEAD=1
        "$target/$profile/kiln-bench" step --config "configs/$preset.toml" --steps 1 --warmup 2 --json \
            --set device.backend=cuda --set precision.compute=bf16 --set train.ranks="$ranks" --set model.init_std=0 \
            --set train.global_batch=$((batch * passes * ranks)) --set train.micro_batch="$batch" \
            --set data.seq_len="$seq" "${more[@]}" >"$out/report.json"
    )
    # Only these configurations fill a GPU.
    most=100
    [ "$ranks" = 1 ] && [[ -z $settings || "$preset $settings" = "7b shard.recompute=block" ]] && [[ $preset =~ ^(300m|1b|7b)$ ]] && most=${MOST_WASTE:-5}
    report=$out/report.json
    # A page is at least 1 MiB. Pages whose size is not the most frequent one are left over from smaller buffers.
    awk -v row="$preset | $ranks | $passes x $batch x $seq | $settings" -v ranks="$ranks" -v most="$most" \
        -v planned="$(figure "$report" planned_reserved_bytes)" -v live="$(figure "$report" planned_rank_bytes)" \
        -v used="$(figure "$report" used_device_bytes)" -v state="$(figure "$report" planned_state_bytes)" '
        { delete field; for (i = 2; i <= NF; i++) { at = index($i, "="); field[substr($i, 1, at - 1)] = substr($i, at + 1) } }
        ($1 == "alloc" || $1 == "alloc_async") && field["result"] == 0 {
            bytes[field["at"]] = field["bytes"]
            now += field["bytes"]
            if (now > reserved) reserved = now
        }
        $1 == "free" || $1 == "free_async" { now -= bytes[field["at"]]; delete bytes[field["at"]] }
        END {
            for (at in bytes) if (bytes[at] >= 2^20) { pages++; of_size[bytes[at]]++ }
            for (size in of_size) if (of_size[size] > usual) { usual = of_size[size]; page = size + 0 }
            reserved /= ranks
            difference = 100 * (planned / reserved - 1)
            waste = 100 * (1 - live / reserved)
            printf "| %s | %.3f | %.3f | %+.1f %% | %.3f | %.3f | %.3f | %d | %d | %.1f %% |\n", row, reserved / 1e9,
                planned / 1e9, difference, live / 1e9, used / ranks / 1e9, state / 1e9, pages, pages - usual, waste
            exit difference < -2 || (difference > 5 && planned - reserved > page) || waste > most
        }' "$out/trace.txt" || failed=1
done < <(configurations)
if [ $failed = 1 ]; then
    echo "a plan is not within -2 % and +5 %, or more than ${MOST_WASTE:-5} % is not in use"
fi
exit $failed
