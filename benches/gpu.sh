#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of less than 9 minutes, and a table at its end.
#
#     benches/gpu.sh --pack           # where it is built: programs into target/pack, and their sizes
#     benches/gpu.sh                  # where the GPU is: runs what is in target/pack
#     benches/gpu.sh --report FILE    # the same, and writes the table as Markdown
#     benches/gpu.sh --only A,C       # some of the parts
#     benches/gpu.sh --libraries      # what of NVIDIA is needed, and where it is on this machine
#
# A  every fused kernel holds against its plain form, with kernels to compile and with compiled ones; every kernel
#    equals its reference, on CUDA; compute-sanitizer finds nothing, if it is there
# B  sharding over ranks on one GPU; NCCL with one rank, and with two on one GPU where it allows that
# C  the time of every kernel and of steps of 300m and 1b, beside what was predicted and PyTorch's in the same run
# D  a step of 7b
#
# NVIDIA's libraries come from where `kiln doctor` finds them; a folder target/pack/python with Python's
# packages of them is looked through as well. PEER_PYTHON is a Python with torch (default python3), and
# PACK another folder than target/pack. Logs are left in OUT (default target/gpu-logs). BUDGET is the number of
# seconds that all of it may take (default 530); what its parts may take follows from it. What is carried to a GPU
# without a network must stay below 64 MiB; --pack fails above that. benches/fakecuda/rehearse.sh rehearses all of
# this without a GPU.
set -uo pipefail

usage() {
    sed -n '2,22s/^# \{0,1\}//p' "$0"
    exit "$1"
}
mode=run report="" parts=A,B,C,D
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage 0 ;;
    --pack | --libraries) mode=${1#--} ;;
    --report | --only)
        [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
        if [ "$1" = --report ]; then report=$2; else parts=$2; fi
        shift
        ;;
    *) echo "unknown argument $1" >&2; usage 2 >&2 ;;
    esac
    shift
done
if ! [[ $parts =~ ^[ABCD](,[ABCD])*$ ]]; then
    echo "--only $parts: must be some of A,B,C,D" >&2
    exit 2
fi
if [ -n "$report" ]; then
    # Paths are the caller's.
    report=$(realpath -m "$report")
fi

cd "$(dirname "$0")/.." || exit 2
target=${CARGO_TARGET_DIR:-target}
pack=${PACK:-target/pack}
binaries=(kiln kiln-bench it sharding nccl)
# Bytes that fit through to a GPU.
room=$((64 << 20))
# Seconds that all of it may take, and that the limits below are meant for.
usual=530
budget=${BUDGET:-$usual}
if ! [[ $budget =~ ^[1-9][0-9]*$ ]]; then
    echo "BUDGET=$budget: must be a number of seconds" >&2
    exit 2
fi
predicted=benches/reports/2026-11-25-predicted.md
# The steps of part D: masters and moments in the memory of the host.
seven_b=(--config configs/7b.toml --set train.global_batch=1 --set precision.compute=bf16 --set shard.offload=true --steps 2)

if [ "$mode" = pack ]; then
    set -e
    mkdir -p "$pack"
    # One set of features for everything, so that burn is built once; with the tests come both programs.
    CARGO_TARGET_DIR=$target cargo test --release --workspace --features kiln-benches/cuda,kiln-benches/wgpu --no-run \
        --message-format=json-render-diagnostics --test it --test sharding --test nccl --test bench |
        sed -n 's/.*"target":{[^}]*"name":"\(kiln\|kiln-bench\|it\|sharding\|nccl\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
        while read -r name program; do cp "$program" "$pack/$name"; done
    for binary in "${binaries[@]}"; do
        test -x "$pack/$binary" || { echo "cargo has made no $binary" >&2; exit 1; }
        strip "$pack/$binary"
        xz -9 --force --threads=2 "$pack/$binary"
        printf '%10d bytes  %s\n' "$(stat -c %s "$pack/$binary.xz")" "$pack/$binary.xz"
    done
    total=$(find "$pack" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }')
    printf '%10d bytes  in all, and there is room for %d\n' "$total" $room
    if [ "$total" -gt $room ]; then
        echo "that is too much to be carried" >&2
        exit 1
    fi
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unpacked() {
    local binary
    for binary in "$@"; do
        if [ -e "$pack/$binary.xz" ]; then
            xz -dc "$pack/$binary.xz" >"$work/$binary" 2>/dev/null ||
                python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
                    "$pack/$binary.xz" "$work/$binary" ||
                { echo "$pack/$binary.xz cannot be unpacked into $work: neither xz nor python3 does it" >&2; exit 2; }
        elif ! cp "$pack/$binary" "$work/$binary"; then
            echo "no $pack/$binary: run benches/gpu.sh --pack where it is built" >&2
            exit 2
        fi
        chmod +x "$work/$binary"
    done
}

if [ -d "$pack/python" ]; then
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/$pack/python"
fi
# A line of the doctor's section on GPUs, and the path in it: in brackets at its end, or all of it.
told() { sed -n "s/^  $1: \(.*\)/\1/p" "$doctor" | head -n 1; }
path_of() { told "$1" | sed -n 's/.*(\(\/.*\))$/\1/p; s/^\(\/[^ ]*\)$/\1/p' | head -n 1; }

if [ "$mode" = libraries ]; then
    unpacked kiln
    doctor=$work/doctor.log
    "$work/kiln" doctor >"$doctor"
    echo "needed, and where it is here:"
    for what in driver NVRTC cuBLASLt NCCL headers; do
        printf '  %-9s %s\n' "$what" "$(told $what)"
    done
    for what in NVRTC cuBLASLt NCCL; do
        path=$(path_of $what)
        [ -n "$path" ] && printf '%12d bytes  %s\n' "$(stat -Lc %s "$path")" "$path"
    done
    exit 0
fi

out=${OUT:-target/gpu-logs}
mkdir -p "$out"
rm -f "$out"/*.log
unpacked "${binaries[@]}"
rows=()
failed=0
# Name, seconds it may take of the usual ones, command. What ran out of time has failed.
check() {
    local name=$1 limit=$2 log result code from=$SECONDS
    shift 2
    case ,$parts, in *",${name%% *},"*) ;; *) return ;; esac
    # SECONDS counts from the start of this script.
    local left=$((budget - SECONDS))
    limit=$((limit * budget / usual + 1))
    limit=$((limit < left ? limit : left))
    log=$out/${name// /_}.log
    if [ $left -le 0 ]; then
        rows+=("$name|not run: no time left|0|")
        failed=1
        return
    fi
    timeout -k 5 $limit "$@" >"$log" 2>&1
    code=$?
    case $code in
    0) result=passed ;;
    124) result="out of time" ;;
    137) if [ $((SECONDS - from)) -ge "$limit" ]; then result="out of time"; else result="killed, as for want of memory"; fi ;;
    *)
        # What kiln-bench holds against a row or a bar.
        result=$(sed -n 's/^FAILED //; T; s/:*$//p' "$log" | head -n 1)
        result="failed${result:+: ${result//|//}} ($code)"
        ;;
    esac
    # Tests that a filter leaves out would pass as well.
    if [ $code = 0 ] && grep -q '^test result: ok. 0 passed' "$log"; then
        code=1 result="failed (nothing ran)"
    fi
    [ $code = 0 ] || failed=1
    rows+=("$name|$result|$((SECONDS - from))|$log")
    echo "$name: $result, $((SECONDS - from)) s"
    # What C and D have to say comes below.
    [ $code = 0 ] || [[ $name = [CD]* ]] || tail -n 20 "$log"
}
left_out() {
    case ,$parts, in *",${1%% *},"*) rows+=("$1|not run: $2|0|") ;; esac
}

# What the doctor says of GPUs, as a list.
on_gpus() { sed -n '/^GPUs/,$s/^  /- /p' "$doctor"; }

# Nothing below means anything if kiln cannot use this GPU.
doctor=$out/doctor.log
timeout -k 5 60 "$work/kiln" doctor | tee "$doctor"
if ! grep -q '^  GPU: 0 ' "$doctor"; then
    echo "no GPU that kiln can use; see above"
    if [ -n "$report" ]; then
        {
            echo "# Kiln on a GPU"
            echo
            echo "$(date -u +%F), \`benches/gpu.sh\`, $("$work/kiln" --version): there is no GPU that kiln can use."
            echo
            on_gpus
        } >"$report"
    fi
    exit 1
fi
# kiln finds libraries by itself. The tests are without that part of it.
for what in NVRTC cuBLASLt NCCL; do
    path=$(path_of $what)
    [ -n "$path" ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$path")
done
export LD_LIBRARY_PATH
headers=$(told headers)
if [ -z "${CUDA_PATH:-}" ] && [ -d "$headers" ]; then
    CUDA_PATH=$(dirname "$headers")
    export CUDA_PATH
fi
export KILN_TEST_DEVICE=cuda

# All dtypes and operations: first compiled, then from the cache, as every start after the first one.
check "A check, compiling" 60 "$work/kiln" doctor --gpu
check "A check" 20 "$work/kiln" doctor --gpu
check "A kernels" 90 "$work/it" cube --test-threads=4
if command -v compute-sanitizer >/dev/null; then
    # A small decoder, which has every operation in it, and attention on tensor cores.
    check "A sanitizer" 45 compute-sanitizer --error-exitcode 9 "$work/it" --test-threads=1 \
        cube::a_decoder_on_wgpu attention_on_cuda_matches_the_reference_in_bf16
else
    left_out "A sanitizer" "there is no compute-sanitizer"
fi

check "B sharding" 60 "$work/sharding" cube --test-threads=1
# Only the stand-ins detect memory that is reused out of order.
alone=(--skip threads_cannot --skip of_a_python_wheel --skip memory_)
# Of several GPUs, each gets a rank as well.
[ "$(grep -c '^  GPU: ' "$doctor")" -gt 1 ] || alone+=(--skip with_a_gpu_each)
check "B nccl" 20 "$work/nccl" --ignored --test-threads=1 "${alone[@]}"
version=$(told NCCL | sed -n 's/^\([0-9]*\)\.\([0-9]*\) .*/\1 \2/p')
read -r major minor <<<"${version:-0 0}"
version=${version/ /.}
if [ "$major" -gt 2 ] || { [ "$major" = 2 ] && [ "$minor" -ge 30 ]; }; then
    # The losses of two processes on this GPU are those of two threads on the CPU.
    two_ranks() {
        local run
        "$work/kiln" train configs/debug.toml --ranks 2 --out "$work/cpu" \
            --set device.backend=cpu --set train.steps=5 --set optim.warmup_steps=2 --set log.every=1 &&
            "$work/kiln" launch --nproc-per-node 2 -- train configs/debug.toml --out "$work/gpu" \
                --set device.backend=cuda --set train.steps=5 --set optim.warmup_steps=2 --set log.every=1 || return
        for run in cpu gpu; do
            sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.]*\).*/\1 \2/p' "$work/$run/metrics.jsonl" >"$work/$run.losses"
        done
        paste "$work/cpu.losses" "$work/gpu.losses" | awk '
            { print; lines++; off = ($4 - $2) / $2; if (off < 0) off = -off
              if ($1 != $3 || off > 1e-4) bad = 1 }
            END { exit bad || lines < 5 }'
    }
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    export -f two_ranks
    export work
    check "B nccl 2 ranks" 40 bash -c two_ranks
    unset NCCL_MULTI_RANK_GPU_ENABLE
else
    left_out "B nccl 2 ranks" "two ranks on one GPU need NCCL 2.30, and this is ${version:-none}"
fi

python=${PEER_PYTHON:-python3}
peer=() bars=() peer_version="no PyTorch"
case ,$parts, in *,C,*)
    from=$SECONDS
    timeout -k 5 60 "$python" -c '
import sys, torch
print("PyTorch", torch.__version__)
sys.exit(not torch.cuda.is_available())' >"$out/peer.log" 2>&1
    code=$?
    # What cannot be compared has not reached its bar.
    case $code in
    0)
        peer=(--peer "$python") bars=(--bars)
        peer_version=$(tail -n 1 "$out/peer.log")
        why=
        ;;
    124 | 137) why="$python has not said within 60 s whether it has PyTorch" ;;
    *) why="$python has no PyTorch that finds the GPU; nothing stands beside Kiln's figures" ;;
    esac
    if [ $code != 0 ]; then
        rows+=("C peer|failed: $why|$((SECONDS - from))|$out/peer.log")
        failed=1
        echo "C peer: failed: $why"
        tail -n 1 "$out/peer.log"
    fi
    ;;
esac
# What benches/predict.sh has said of these steps before anybody ran them.
expected=()
[ -e $predicted ] && expected=(--predicted "$predicted")
# Rows are told when they are done, so that what runs out of time has not been in vain.
export KILN_LOG=warn,kiln=info
check "C steps" 190 "$work/kiln-bench" gpu "${peer[@]}" "${bars[@]}" "${expected[@]}" --least-mfu 45 \
    --only 300m --only 1b
check "C kernels" 80 "$work/kiln-bench" gpu "${peer[@]}" --only kernels
check "D 7b" 75 "$work/kiln-bench" gpu "${seven_b[@]}"
unset KILN_LOG
# What was measured, without what was told on the way if the end was reached; else all that was told, as it is.
figures() {
    if grep -q '^|' "$1"; then
        grep -v '^ *INFO ' "$1"
    else
        echo '```text'
        cat "$1"
        echo '```'
    fi
}
# The verdict of a check of kernels on each, and how long it took; of a second check, what is new.
verdicts() {
    if [ "$1" = "A check" ]; then
        sed -n '/^kernels/,$s/^  /    /p' "$2" | sed -n '/WRONG/p; $p'
    else
        sed -n '/^kernels/,$s/^  /    /p' "$2"
    fi
}

table() {
    echo "| check | result | seconds | log |"
    echo "|---|---|---|---|"
    local row
    for row in "${rows[@]}"; do echo "| ${row//|/ | } |"; done
}
# Each figure under its own heading.
sections() {
    local name log
    for name in "A check, compiling" "A check" "C steps" "C kernels" "D 7b"; do
        log=$out/${name// /_}.log
        case ,$parts, in *",${name%% *},"*) ;; *) continue ;; esac
        [ -e "$log" ] || continue
        echo
        echo "## $name"
        echo
        if ! [ -s "$log" ]; then
            echo "Nothing was told until it ended."
            continue
        fi
        case $name in A*) verdicts "$name" "$log" ;; *) figures "$log" ;; esac
    done
    case $parts in
    *[CD]*)
        echo
        echo "## Predicted before, by benches/predict.sh"
        echo
        if [ -e $predicted ]; then
            sed -n 's/^# \(.*\)/\1.\n/p; /^| preset/,/^$/p' $predicted
            echo "All of it is in \`$predicted\`."
        else
            echo "There is no $predicted."
        fi
        ;;
    esac
}

sections
echo
table
echo "$SECONDS s in all"
if [ -n "$report" ]; then
    {
        echo "# Kiln on a GPU"
        echo
        echo "$(date -u +%F), \`benches/gpu.sh\`, $SECONDS s of at most $budget; $("$work/kiln" --version), $peer_version."
        echo
        on_gpus
        echo
        table
        sections
    } >"$report"
fi
exit $failed
