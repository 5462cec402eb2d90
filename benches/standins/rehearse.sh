#!/usr/bin/env bash
# Rehearses benches/gpu.sh on a simulated new machine, without a GPU: a folder with the files of this repository and
# the pack, no cargo, an empty cache, no network, and stand-ins for NVIDIA's libraries. The loader finds the driver; all
# other libraries are in a virtual environment at an unusual place, whose python3 is on PATH. Neither LD_LIBRARY_PATH
# nor VIRTUAL_ENV is set. Needs the pack (benches/gpu.sh --pack), root, a C compiler, and PyPI once, for NVRTC.
#
#     benches/standins/rehearse.sh            # size, driverless, hang, slow and whole, one after the other
#     benches/standins/rehearse.sh slow       # some of: size driverless hang slow timed second whole
#
# size        the pack and the files of the repository exceed the limit: the pack is refused
# driverless  the machine has no driver: the report says so
# hang        the second step hangs and the call is killed: the report has the first step's result and all logs
# slow        every launch takes 20 ms, and the call has 60 (or BUDGET) seconds: the report names steps without time
# timed       steps, kernels, peer and trace with kernels that compute nothing, loaded as machine code
# second      the second call; only the run of two ranks is computed
# whole       the first call with kernels that are executed on the CPU, except in steps, kernels and peer
#
# The output and the reports stay in target/rehearsal/SCENE.
set -uo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,18s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
scenes=("$@")
[ $# -gt 0 ] || scenes=(size driverless hang slow whole)

cd "$(dirname "$0")/../.." || exit 2
target=${CARGO_TARGET_DIR:-target}
pack=$(realpath "${PACK:-target/pack}")
[ -e "$pack/pack.tar.xz" ] || { echo "no $pack/pack.tar.xz: run benches/gpu.sh --pack first" >&2; exit 2; }
benches/standins/setup.sh >/dev/null || exit 2
stand_ins=$(cd "$target/standins" && pwd)
mkdir -p "$target/rehearsal"
rehearsal=$(cd "$target/rehearsal" && pwd)
failed=0

# Creates a new machine at $1.
machine() (
    rm -rf "$1"
    mkdir -p "$1/kiln/target/pack" "$1/home" "$1/tmp" "$1/driver" "$1/usr/bin" "$1/opt/torch/.venv/bin"
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$1/kiln" 2>/dev/null
    cp "$pack/pack.tar.xz" "$1/kiln/target/pack/"
    # Libraries and headers as pip installs them, without the compiler tools.
    local site=$1/opt/torch/.venv/lib/python3.12/site-packages/nvidia
    mkdir -p "$site/cu13" "$site/nccl/lib"
    cp -r "$stand_ins/python/nvidia/cu13/"{lib,include} "$site/cu13/"
    cp "$stand_ins/lib/"lib{cublasLt,cupti}.so* "$site/cu13/lib/"
    cp "$stand_ins/lib/"libnccl.so* "$site/nccl/lib/"
    cp "$stand_ins/lib/"libcuda.so* "$1/driver/"
    # The python3 on PATH is a link into the environment, as from /usr/local/bin.
    peer "$1/opt/torch/.venv/bin/python3"
    ln -s ../../opt/torch/.venv/bin/python3 "$1/usr/bin/python3"
    # The loader's cache with the driver, or without.
    { cat /etc/ld.so.conf; [ "$2" = driverless ] || echo "$1/driver"; } >"$1/ld.so.conf"
    ldconfig -C "$1/ld.so.cache" -f "$1/ld.so.conf" -X 2>/dev/null
    case $2 in timed | second | whole) uncheck "$1" ;; esac
)

# On the machine at $1, runs that are too large to be executed compute nothing and do not verify their kernels.
uncheck() (
    mkdir "$1/unpacked" "$1/programs" && cd "$1/unpacked" && tar -xJf "../kiln/target/pack/pack.tar.xz" || exit 2
    mv bin/kiln bin/kiln-bench "$1/programs/"
    cat >bin/kiln-bench <<END
#!/bin/sh
FAKE_CUDA_EXECUTE=0 exec "$1/programs/kiln-bench" "\$@" --unchecked
END
    cat >bin/kiln <<END
#!/bin/sh
case "\$*" in
*" --trace "* | "warmup configs"*)
    FAKE_CUDA_EXECUTE=0 exec "$1/programs/kiln" "\$@" --set device.verify_kernels=false --set train.nonfinite=skip ;;
esac
exec "$1/programs/kiln" "\$@"
END
    chmod +x bin/kiln bin/kiln-bench
    tar -cf - ./* | xz -0 >"../kiln/target/pack/pack.tar.xz"
    cd .. && rm -rf unpacked
)

# Installs a Python whose PyTorch finds the GPU and immediately answers with made-up figures.
peer() {
    cat >"$1" <<'END'
#!/bin/sh
case "$*" in
*torch_fsdp.py*--kernels*) echo '{"kernels": {"rms_norm": 1e-5, "attention": 1e-4}}' ;;
*torch_fsdp.py*) echo '{"tokens_per_s": 1000.0, "peak_reserved_bytes": 60000000000}' ;;
*) echo "stand-in for PyTorch" ;;
esac
END
    chmod +x "$1"
}

# Runs gpu.sh on the machine at $1 and kills it after $2 seconds. Variables up to "--" and arguments follow. There is no
# network except the loopback interface, on which the processes of this machine meet.
play() {
    local at=$1 limit=$2 variables=()
    shift 2
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    local words='ip link set lo up 2>/dev/null; mount --bind "$1/ld.so.cache" /etc/ld.so.cache || exit 2
        cd "$1/kiln" && shift && exec bash benches/gpu.sh "$@"'
    timeout -s KILL "$limit" env -i PATH="$at/usr/bin:/usr/local/bin:/usr/bin:/bin" HOME="$at/home" TMPDIR="$at/tmp" \
        OUT="$at/out" LANG=C.UTF-8 "${variables[@]}" \
        unshare --map-root-user --mount --net --pid --fork --kill-child bash -c "$words" bash "$at" "$@" \
        >"$at/said.txt" 2>&1
    echo "exit code $?" >>"$at/said.txt"
}

# Checks that a file has a line that matches.
expect() {
    grep -qE -- "$2" "$1" && return
    echo "$1 has no line like: $2"
    failed=1
}
# Checks the number, sizes and names of the output files.
comes_back() {
    local file count=0
    for file in "$at/out"/* "$at/out"/.[!.]*; do
        [ -e "$file" ] || continue
        count=$((count + 1))
        [[ ${file##*/} =~ ^[A-Za-z0-9._-]+$ && -f $file && $(stat -c %s "$file") -le $((16 << 20)) ]] ||
            { echo "$file has a wrong name or is too large"; failed=1; }
    done
    [ $count -le 8 ] || { echo "$count files in $at/out"; failed=1; }
    [ -s "$at/out/report.md" ] || { echo "no $at/out/report.md"; failed=1; }
    tar -tzf "$at/out/logs.tgz" >"$at/logs.txt" || failed=1
}
# Checks the order in which steps began.
in_order() {
    local began
    began=$(sed -n 's/^| \([a-z0-9-]*\) | [^-].*/\1/p' "$report" | grep -v '^step$' | paste -sd' ')
    local pattern="* ${1// /*} *"
    # shellcheck disable=SC2053
    [[ " $began " == $pattern ]] || { echo "steps began in this order: $began"; failed=1; }
}
is_measured() {
    local figure='[0-9.]+'
    expect "$report" "^\| 300m \| $figure \| $figure, at least $figure \| .* \| 1000 \| 60.00 \|"
    expect "$report" "^\| 1b \| $figure \| $figure, at least $figure \| .* \| 1000 \| 60.00 \|"
    expect "$report" '^\| attention \|.*\| 100.0 \|'
    expect "$report" '^\| kernels \| passed'
    expect "$report" '^\| trace \| passed'
}

for scene in "${scenes[@]}"; do
    at=$rehearsal/$scene
    report=$at/out/report.md
    echo "== $scene"
    case $scene in
    size)
        rm -rf "$at" && git clone --quiet --shared . "$at"
        PACK=$pack "$at/benches/gpu.sh" --size || failed=1
        truncate -s 60M "$at/a-file-that-travels"
        PACK=$pack "$at/benches/gpu.sh" --size >"$at/said.txt" 2>&1 && { echo "60 MB more were not refused"; failed=1; }
        expect "$at/said.txt" '^too much to carry'
        continue
        ;;
    driverless | hang | slow | timed | second | whole) machine "$at" "$scene" ;;
    *) echo "no such scene" >&2; exit 2 ;;
    esac
    began=$SECONDS
    case $scene in
    driverless)
        play "$at" 60 --
        expect "$at/said.txt" '^no GPU that kiln can use'
        expect "$report" '^\| doctor \| failed: no GPU that kiln can use'
        expect "$at/said.txt" '^exit code 1$'
        ;;
    hang)
        # A launch takes an hour.
        play "$at" 45 FAKE_CUDA_LAUNCH_US=3600000000 --
        expect "$report" '^\| doctor \| passed \|'
        expect "$report" '^\| check \| running'
        comes_back
        expect "$at/logs.txt" 'doctor.log'
        expect "$at/logs.txt" 'check.log'
        expect "$at/said.txt" '^exit code 137$'
        ;;
    slow)
        budget=${BUDGET:-60}
        play "$at" 7200 FAKE_CUDA_LAUNCH_US=20000 FAKE_CUDA_EXECUTE=1 BUDGET="$budget" --
        # Five more seconds to kill steps that hang, and some to write the report.
        took=$((SECONDS - began))
        [ $took -le $((budget + 10)) ] || { echo "it took $took s, and had $budget"; failed=1; }
        expect "$report" 'failed: out of time'
        expect "$at/said.txt" '^exit code 1$'
        ;;
    timed)
        play "$at" 7200 FAKE_CUDA_CUBIN=1 BUDGET=3000 -- --only steps,kernels,peer,trace
        is_measured
        in_order "doctor steps kernels peer-1b peer-300m peer-kernels peer-1b-eager trace"
        ;;
    second)
        play "$at" 7200 FAKE_CUDA_EXECUTE=1 FAKE_NCCL_VERSION=23000 BUDGET=2000 HOST_MEMORY=16GiB -- --second
        expect "$report" '^\| products-measure \| passed'
        expect "$report" '^\| ranks \| passed'
        expect "$report" '^\| ncu \| not run: there is no ncu'
        # Its state needs more memory than this machine may have.
        expect "$report" '^\| 7b \| failed: 7b: this run takes .* of memory'
        in_order "doctor products-measure products-1b ranks 7b"
        ;;
    whole)
        play "$at" 7200 BUDGET=6600 FAKE_CUDA_EXECUTE=1 FAKE_NCCL_VERSION=23000 --
        for step in doctor check train tests-{cube,attention,experts,sharding,nccl,products}; do
            expect "$report" "^\| $step \| passed"
        done
        expect "$report" 'kernels: [0-9]+ fused operations agree with their plain forms'
        is_measured
        in_order "doctor check steps train tests-cube kernels peer-1b peer-300m peer-kernels peer-1b-eager trace"
        ;;
    esac
    comes_back
    sed -n '1p; /^| step/,/^$/p' "$report"
done
exit $failed
