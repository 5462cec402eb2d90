#!/usr/bin/env bash
# The memory of training steps at their real sizes, without a GPU: what the driver has given, against what the plan
# has in use at the same time and the workspace of cuBLASLt. Fails if more than MOST_WASTE percent (default 5) of it
# is waste.
#
#     benches/memory.sh            # presets 300m, 1b and 7b on one GPU
#     benches/memory.sh 300m       # some of them
#
# Steps run under the stand-in for NVIDIA's driver (benches/fakecuda): device memory is reserved and not touched.
# Weights are zeros, so that nothing is drawn, and large copies are not made. A table in Markdown is printed; reports
# and traces stay in target/memory.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
[ $# -gt 0 ] || set -- 300m 1b 7b

cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${KILN_GPU_PROFILE:-release}
# One set of features for everything here, so that burn is built once.
cargo build --profile "$profile" --workspace --features kiln-benches/cuda,kiln-benches/wgpu --bin kiln-bench
benches/fakecuda/setup.sh

# Sequences, tokens of each, and GiB of the GPU: an H100's, and for 7b an H200's.
sizes() {
    case $1 in
    10m) echo 4 256 80 ;;
    90m) echo 32 512 80 ;;
    300m) echo 16 1024 80 ;;
    1b) echo 8 2048 80 ;;
    7b) echo 1 4096 140 ;;
    *)
        echo "no sizes for preset $1" >&2
        return 2
        ;;
    esac
}

# A figure of a report.
figure() { sed -n "s/.*\"$2\":\([0-9]*\).*/\1/p" "$1"; }

echo
echo "| preset | step | GB of the driver | GB of the pools | GB in use, by the plan | GB after a step | pages | of other sizes | MB pinned | waste |"
echo "|---|---|---|---|---|---|---|---|---|---|"
failed=0
for preset in "$@"; do
    read -r batch seq gib < <(sizes "$preset")
    out=$target/memory/$preset
    rm -rf "$out"
    mkdir -p "$out"
    (
        # shellcheck source=/dev/null
        . "$target/fakecuda/env.sh"
        export FAKE_CUDA_TRACE=$out/trace.txt FAKE_CUDA_MEMORY_GIB=$gib FAKE_CUDA_COPY_MIB=1
        "$target/$profile/kiln-bench" step --config "configs/$preset.toml" --steps 1 --warmup 2 --json \
            --set device.backend=cuda --set precision.compute=bf16 --set train.ranks=1 --set model.init_std=0 \
            --set train.global_batch="$batch" --set train.micro_batch="$batch" --set data.seq_len="$seq" \
            >"$out/report.json"
    )
    # A page is at least 1 MiB. Those of other sizes than the most frequent one are left over from smaller buffers.
    awk -v row="$preset | $batch x $seq" -v planned="$(figure "$out/report.json" planned_rank_bytes)" \
        -v pools="$(figure "$out/report.json" peak_reserved_bytes)" \
        -v used="$(figure "$out/report.json" used_device_bytes)" -v most="${MOST_WASTE:-5}" '
        { delete field; for (i = 2; i <= NF; i++) { at = index($i, "="); field[substr($i, 1, at - 1)] = substr($i, at + 1) } }
        ($1 == "alloc" || $1 == "alloc_async") && field["result"] == 0 { bytes[field["at"]] = field["bytes"] }
        $1 == "cublaslt_matmul" && field["workspace"] > workspace { workspace = field["workspace"] }
        $1 == "free" || $1 == "free_async" { delete bytes[field["at"]] }
        $1 == "alloc_host" || $1 == "host_register" { pinned += field["bytes"] }
        END {
            for (at in bytes) {
                reserved += bytes[at]
                if (bytes[at] >= 2^20) { pages++; of_size[bytes[at]]++ }
            }
            for (size in of_size) if (of_size[size] > usual) usual = of_size[size]
            waste = 100 * (1 - (planned + workspace) / reserved)
            printf "| %s | %.2f | %.2f | %.2f | %.2f | %d | %d | %.1f | %.1f %% |\n", row, reserved / 1e9, pools / 1e9,
                planned / 1e9, used / 1e9, pages, pages - usual, pinned / 1e6, waste
            exit waste > most
        }' "$out/trace.txt" || failed=1
done
if [ $failed = 1 ]; then
    echo "more than ${MOST_WASTE:-5} % is waste"
fi
exit $failed
