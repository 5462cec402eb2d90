#!/usr/bin/env bash
# Predicts the time of training steps on a GPU, by operation, without a GPU.
#
#     benches/predict.sh                        # presets 300m, 1b and 7b on an H100, as Markdown
#     benches/predict.sh --gpu h200 1b          # another GPU, and some presets
#
# Reads the traces and kernels that benches/host_cost.sh writes to target/host_cost, and runs it for presets
# that have none. Downloads NVIDIA's disassembler and heuristics for matrix products (10 MB) from PyPI once.
set -euo pipefail
gpu=h100
presets=()
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        sed -n '2,8s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --gpu)
        gpu=${2:?--gpu needs a name}
        shift
        ;;
    *) presets+=("$1") ;;
    esac
    shift
done
[ ${#presets[@]} -gt 0 ] || presets=(300m 1b 7b)

cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
profile=${KILN_GPU_PROFILE:-release}
cargo build --quiet --profile "$profile" --workspace --features kiln-benches/cuda,kiln-benches/wgpu --bin kernels
benches/standins/setup.sh >&2
tools=$target/standins/predict
if [ ! -e "$tools/.done" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps \
        --root-user-action ignore --upgrade --target "$tools" \
        nvidia-cuda-nvdisasm==13.5.37 nvidia-matmul-heuristics==0.1.0.27
    touch "$tools/.done"
fi
folders=()
for preset in "${presets[@]}"; do
    folder=$target/host_cost/$preset
    { [ -s "$folder/2/report.json" ] && [ -s "$folder/4/report.json" ]; } || benches/host_cost.sh "$preset" >&2
    folders+=("$folder/2" "$folder/4")
done
PYTHONPATH=$tools "$target/$profile/kernels" --predict "$gpu" --nvdisasm "$tools/nvidia/cu13/bin/nvdisasm" \
    --python "${PYTHON:-python3}" "${folders[@]}"
