#!/usr/bin/env bash
# Runs tests of GPU kernels on CUDA without a GPU: kernels are compiled by NVRTC, and executed and checked by
# benches/ptx. Needs a C compiler, and PyPI for NVRTC.
#
#     benches/fakecuda/execute.sh                 # the model's operations and the decoder
#     benches/fakecuda/execute.sh cube_attention  # tests of this name
#
# FAKE_CUDA_CAPABILITY=8.0 executes what an A100 gets, FAKE_CUDA_CHECK=0 leaves the checks out.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/../.."
# One set of features for everything on GPUs, so that burn is built once. Only the model has a test `it`.
build=(--profile "${KILN_GPU_PROFILE:-release}" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)
program=$(cargo test "${build[@]}" --test it --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/it-[^"]*\)".*/\1/p')

benches/fakecuda/setup.sh
# shellcheck source=/dev/null
. "${CARGO_TARGET_DIR:-target}/fakecuda/env.sh"
export KILN_TEST_DEVICE=cuda FAKE_CUDA_EXECUTE=1
# What kernels are compiled to is tested elsewhere, and takes a minute.
exec "$program" "${1:-cube}" --skip compiled
