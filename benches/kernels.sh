#!/usr/bin/env bash
# Compiles the kernels that a program launches for sm_80 and sm_90, without a GPU, and compares the
# resource usage that NVIDIA's assembler reports with benches/kernels.toml.
#
#     benches/kernels.sh                  # the operations of train/kiln/tests/cli/captured.rs
#     benches/kernels.sh COMMAND...       # any other program that launches kernels on CUDA device 0
#
# COMMAND must be a built program, not cargo: this script sets CUDA_PATH, and with a different
# CUDA_PATH cargo would rebuild everything that depends on cudarc.
#
# KERNELS_ARGS are arguments for the table, such as --entries, which prints entries for new kernels.
# PTX and a trace of all calls stay in the folder kernels of target (or CARGO_TARGET_DIR).
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
# One set of features for everything here, so that burn is built once.
build=(--profile "${KILN_GPU_PROFILE:-release}" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)
built=$(cargo test "${build[@]}" --test cli --test kernels_table --no-run --message-format=json)
table=$(echo "$built" | sed -n 's/.*"executable":"\([^"]*\/kernels\)".*/\1/p')
if [ $# = 0 ]; then
    program=$(echo "$built" | sed -n 's/.*"executable":"\([^"]*\/cli-[^"]*\)".*/\1/p')
    set -- "$program" captured --ignored --test-threads=1
fi

benches/standins/setup.sh
folders=()
for capability in 8.0 9.0; do
    folder=$target/kernels/sm_${capability/./}
    rm -rf "$folder"
    mkdir -p "$folder"
    folder=$(cd "$folder" && pwd)
    (
        # shellcheck source=/dev/null
        . "$target/standins/env.sh"
        export FAKE_CUDA_CAPABILITY=$capability FAKE_CUDA_PTX_DIR=$folder FAKE_CUDA_TRACE=$folder/trace.txt
        "$@"
    )
    folders+=("$folder")
done
# The stand-in must support all instructions of the kernels.
find "${folders[@]}" -name '*.ptx' -exec "$target/release/ptx" {} +
# shellcheck disable=SC2086
"$table" --ptxas "$target/standins/python/nvidia/cu13/bin/ptxas" ${KERNELS_ARGS:-} "${folders[@]}"
