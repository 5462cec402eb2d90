#!/usr/bin/env bash
# Trains on CUDA without a GPU, with stand-ins for NVIDIA's libraries, and checks the calls to the driver:
# gathers overlap with compute, a step never waits, and no memory is allocated from the third step on.
#
#     benches/trace.sh                    # all of train/kiln/tests/cli/trace.rs
#     benches/trace.sh gathers            # tests of this name
#
# TRACE_KEPT names a file for the trace of the last run.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/.."
# One set of features for everything here, so that burn is built once.
build=(--profile "${KILN_GPU_PROFILE:-release}" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)
program=$(cargo test "${build[@]}" --test cli --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/cli-[^"]*\)".*/\1/p')
benches/standins/setup.sh
# shellcheck source=/dev/null
. "${CARGO_TARGET_DIR:-target}/standins/env.sh"
exec "$program" "trace::${1:-}" --ignored --test-threads=1
