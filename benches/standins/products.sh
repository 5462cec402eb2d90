#!/usr/bin/env bash
# Tests the matrix products of model/src/ops/cube/cublaslt under the stand-ins, which compute them. Needs a
# C compiler, but neither a GPU nor the network.
#
#     benches/standins/products.sh [FILTER]
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}

# One set of features for everything on GPUs, so that burn is built once. Only the model has a test `it`.
build=(--profile "${KILN_GPU_PROFILE:-release}" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)
program=$(cargo test "${build[@]}" --test it --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/it-[^"]*\)".*/\1/p')

benches/standins/setup.sh --drivers
# shellcheck source=/dev/null
. "$target/standins/env.sh"
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
export FAKE_CUDA_TRACE=$trace FAKE_CUBLASLT_COMPUTE=1e9
# burn's kernels need NVRTC: execute.sh has that test.
"$program" "cublaslt::${1:-}" --ignored --skip burn_multiplies
