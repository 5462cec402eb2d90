#!/usr/bin/env bash
# Compiles the kernels that a program launches for sm_80 and sm_90, without a GPU, and holds what
# NVIDIA's assembler says of them to benches/kernels.toml.
#
#     benches/kernels.sh                  # the operations of train/kiln/tests/cli/captured.rs
#     benches/kernels.sh COMMAND...       # whatever else launches kernels on CUDA device 0
#
# COMMAND is a program that is built already, not cargo: CUDA_PATH is set for it, and with another
# CUDA_PATH cargo would build everything on cudarc again.
#
# KERNELS_ARGS are arguments for the table, such as --entries, which prints entries for new kernels.
# What was launched stays in target/kernels (or where CARGO_TARGET_DIR says): PTX, and a trace of all calls.
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
# What executes kernels without a GPU knows all of their instructions.
find "${folders[@]}" -name '*.ptx' -exec "$target/release/ptx" {} +
# shellcheck disable=SC2086
"$table" --ptxas "$target/standins/python/nvidia/cu13/bin/ptxas" ${KERNELS_ARGS:-} "${folders[@]}"
