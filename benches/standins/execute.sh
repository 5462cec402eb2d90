#!/usr/bin/env bash
# Runs Kiln's tests on CUDA without a GPU: NVRTC compiles kernels, and benches/standins/ptx executes and checks them.
# Streams are asynchronous, and NCCL moves data. Needs a C compiler, and PyPI for NVRTC.
#
#     benches/standins/execute.sh                       # all parts
#     benches/standins/execute.sh model                 # one of: stand-ins, planted, nccl, model, sharding, commands
#     benches/standins/execute.sh model cube_attention  # the tests of a part with this name
#
# FAKE_CUDA_CAPABILITY=8.0 executes the kernels for an A100, FAKE_CUDA_CHECK=0 skips the checks of kernels,
# FAKE_CUDA_ASYNC=7 changes the seed of the delays, and FAKE_CUDA_ASYNC=0 makes streams synchronous.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
"" | stand-ins | planted | nccl | model | sharding | commands) ;;
*)
    echo "no part $1: stand-ins, planted, nccl, model, sharding, commands" >&2
    exit 2
    ;;
esac
part=${1:-} name=${2:-}

cd "$(dirname "$0")/../.."
# One set of features for everything on GPUs, so that burn is built once.
build=(--profile "${KILN_GPU_PROFILE:-release}" --workspace --features kiln-benches/cuda,kiln-benches/wgpu)

# Builds a test program, which is then started without cargo: see README.md.
program() {
    cargo test "${build[@]}" --test "$1" --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/'"$1"'-[^"]*\)".*/\1/p'
}

# Runs a test program under the stand-ins.
run() {
    (
        # shellcheck source=/dev/null
        . "${CARGO_TARGET_DIR:-target}/standins/env.sh"
        export KILN_TEST_DEVICE=cuda FAKE_CUDA_EXECUTE=1 FAKE_CUDA_ASYNC="${FAKE_CUDA_ASYNC:-1}"
        "$@"
    )
    # .ci/run lists all tests of its steps this way.
    if [ -n "${KILN_TESTS_LISTED:-}" ]; then
        { echo "Running ($1)" && "$@" --list; } >>"$KILN_TESTS_LISTED"
    fi
}

wanted() { [ -z "$part" ] || [ "$part" = "$1" ]; }

if wanted stand-ins; then
    benches/standins/streams.sh
fi
benches/standins/setup.sh
if wanted planted; then
    run "$(program it)" planted::every --ignored --nocapture
fi
if wanted nccl; then
    nccl=$(program nccl)
    FAKE_CUDA_DEVICES=2 run "$nccl" "$name" --ignored --skip python_wheel
    # A collective that never completes must be reported.
    FAKE_NCCL_STALLS=1 run "$nccl" ends_or_times_out --ignored
fi
if wanted model; then
    # Tests of compiled kernels run elsewhere, and take a minute.
    it=$(program it)
    if [ -n "$name" ]; then
        run "$it" "$name" --skip compiled
    else
        # Two programs in parallel: in each, a single thread compiles all kernels, which takes most of the time.
        said=$(mktemp)
        run "$it" cube_attention:: --skip compiled >"$said" 2>&1 &
        attention=$! failed=0
        run "$it" cube:: cube_experts:: || failed=1
        wait "$attention" || failed=1
        cat "$said"
        rm "$said"
        [ $failed = 0 ]
        # The instructions of an A100, also as a fallback on an H100.
        FAKE_CUDA_CAPABILITY=8.0 run "$it" attention_on_cuda --skip compiled
        run "$(program warpgroups)"
        # Products by burn's kernels, if cuBLASLt has no algorithm.
        run "$it" cublaslt::fallback::burn_multiplies --ignored
    fi
fi
if wanted sharding; then
    run "$(program sharding)" "${name:-cube}"
fi
if wanted commands; then
    cli=$(program cli)
    run "$cli" "${name:-gpu::}"
    [ -n "$name" ] || FAKE_CUDA_DEVICES=4 run "$cli" processes_over_nccl --ignored
fi
