#!/usr/bin/env bash
# Rehearses benches/gpu.sh on a machine that has never seen Kiln, without a GPU: a folder with the files of this
# repository and target/pack, no cargo, an empty cache, no network, no nvidia-smi, and the stand-ins for NVIDIA's
# libraries in place of a driver. Needs target/pack (benches/gpu.sh --pack), a C compiler, and PyPI for NVRTC once.
#
#     benches/fakecuda/rehearse.sh            # driverless, slow and whole, one after the other
#     benches/fakecuda/rehearse.sh slow       # some: driverless, slow, correct, timed, whole
#
# driverless  there is no driver: that is said, in the report as well (seconds)
# slow        every launch takes 20 ms, and there is a minute for all, or BUDGET seconds: what has no time is told, the
#             report is written
# correct     parts A and B, whose kernels are executed on the CPU; as much time as that takes
# timed       parts C and D with kernels that compute nothing, beside a peer that answers, in the usual time
# whole       all parts at once, as in correct and timed
#
# What was printed and the reports stay in target/rehearsal/SCENE.
set -uo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,16s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
scenes=("$@")
[ $# -gt 0 ] || scenes=(driverless slow whole)

cd "$(dirname "$0")/../.." || exit 2
target=${CARGO_TARGET_DIR:-target}
pack=${PACK:-target/pack}
[ -d "$pack" ] || { echo "no $pack: run benches/gpu.sh --pack first" >&2; exit 2; }
benches/fakecuda/setup.sh >/dev/null || exit 2
stand_ins=$(cd "$target/fakecuda" && pwd)
mkdir -p "$target/rehearsal"
rehearsal=$(cd "$target/rehearsal" && pwd)

# A machine as it comes, at $1.
machine() (
    rm -rf "$1"
    mkdir -p "$1/kiln/target/pack" "$1/home" "$1/tmp" "$1/driver"
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$1/kiln"
    find "$pack" -maxdepth 1 -type f -exec cp -t "$1/kiln/target/pack" {} +
    # NVRTC and headers as pip installs them; of the tools beside them a machine with a GPU has none.
    mkdir -p "$1/kiln/target/pack/python/nvidia/cu13"
    cp -r "$stand_ins/python/nvidia/cu13/"{lib,include} "$1/kiln/target/pack/python/nvidia/cu13/"
    # Kernels are executed by all programs but the one that measures.
    if [ "$2" = whole ]; then
        cd "$1" || exit 2
        local packed=kiln/target/pack/kiln-bench
        if [ -e $packed.xz ]; then xz -d $packed.xz; fi
        mv $packed measures && chmod +x measures
        printf '#!/bin/sh\nFAKE_CUDA_EXECUTE=0 exec %s "$@"\n' "$1/measures" >$packed
    fi
)

# A Python whose PyTorch finds the GPU and answers at once, with figures that nobody has measured.
peer() {
    cat >"$1" <<'END'
#!/bin/sh
case "$*" in
-c*) echo "PyTorch that stands in for one" ;;
*--kernels*) echo '{"kernels": {"rms_norm": 1e-5, "attention": 1e-4}}' ;;
*) echo '{"tokens_per_s": 1000.0, "peak_reserved_bytes": 60000000000}' ;;
esac
END
    chmod +x "$1"
}

# gpu.sh on the machine at $1, with two more arguments and then variables: without a network but with the loopback
# of its own, as processes that meet on one machine need it.
play() {
    local at=$1 only=$2 parts=$3
    shift 3
    local words='ip link set lo up 2>/dev/null; cd "$1/kiln" && shift && exec bash benches/gpu.sh "$@"'
    timeout -k 5 7200 env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$at/home" TMPDIR="$at/tmp" LANG=C.UTF-8 "$@" \
        unshare --map-root-user --net bash -c "$words" bash "$at" --report "$at/report.md" "$only" "$parts" \
        >"$at/said.txt" 2>&1
    echo "exit code $?" >>"$at/said.txt"
}

failed=0
# Whether a text of a scene has a line like this.
expect() {
    grep -qE -- "$2" "$1" && return
    echo "$1 has no line like: $2"
    failed=1
}

is_correct() {
    local check
    for check in "A check, compiling" "A check" "A kernels" "B sharding" "B nccl" "B nccl 2 ranks"; do
        expect "$report" "^\| $check \| passed"
    done
    expect "$report" 'kernels: 12 fused operations agree with their plain forms'
}
# Steps have their prediction and the peer's figures beside them. Bars are for GPUs.
is_measured() {
    local figure='[0-9.]+'
    expect "$report" "^\| 300m \| $figure \| $figure, at least $figure \| .* \| 1000 \| 60.00 \|"
    expect "$report" "^\| 1b \| $figure \| $figure, at least $figure \| .* \| 1000 \| 60.00 \|"
    expect "$report" '^\| attention \|.*\| 100.0 \|'
    expect "$report" '^\| C kernels \| passed'
    # Its state takes more memory than most machines have.
    expect "$report" '^\| D 7b \| passed|^FAILED 7b: .*memory'
}

for scene in "${scenes[@]}"; do
    at=$rehearsal/$scene
    report=$at/report.md
    echo "== $scene"
    case $scene in driverless | slow | correct | timed | whole) ;; *) echo "no such scene" >&2; exit 2 ;; esac
    machine "$at" "$scene"
    driver=LD_LIBRARY_PATH=$stand_ins/lib
    began=$SECONDS
    case $scene in
    driverless)
        play "$at" --only A,B,C,D
        expect "$at/said.txt" '^no GPU that kiln can use'
        expect "$report" 'no GPU that kiln can use'
        expect "$at/said.txt" '^exit code 1$'
        ;;
    slow)
        budget=${BUDGET:-60}
        play "$at" --only A,B,C,D "$driver" FAKE_CUDA_LAUNCH_US=20000 BUDGET="$budget"
        # Five more to kill what does not end, and some to write the report.
        took=$((SECONDS - began))
        [ $took -le $((budget + 10)) ] || { echo "it took $took s, and had $budget"; failed=1; }
        expect "$report" 'out of time'
        expect "$report" 'no PyTorch that finds the GPU'
        expect "$at/said.txt" '^exit code 1$'
        ;;
    correct)
        play "$at" --only A,B "$driver" BUDGET=6600 FAKE_CUDA_EXECUTE=1 FAKE_NCCL_VERSION=23000
        is_correct
        ;;
    timed)
        peer "$at/peer"
        play "$at" --only C,D "$driver" PEER_PYTHON="$at/peer"
        is_measured
        ;;
    whole)
        peer "$at/peer"
        play "$at" --only A,B,C,D "$driver" PEER_PYTHON="$at/peer" BUDGET=6600 FAKE_CUDA_EXECUTE=1 \
            FAKE_NCCL_VERSION=23000
        is_correct
        is_measured
        ;;
    esac
    sed -n '/^| check/,/ s in all/p' "$at/said.txt"
done
exit $failed
