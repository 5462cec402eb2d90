#!/usr/bin/env bash
# Checks and measures Kiln on one NVIDIA GPU, in two calls of less than 10 minutes each.
#
#     benches/gpu.sh --pack           # on the build machine: writes target/pack, prints the number of bytes to copy
#     benches/gpu.sh                  # on the GPU machine: the first call, at most 530 s
#     benches/gpu.sh --second         # the second call, at most 220 s
#     benches/gpu.sh --only steps,train    # some steps of a call
#     benches/gpu.sh --size           # prints the number of bytes to copy
#
# Each call writes two files to OUT (default target/gpu): report.md and logs.tgz. They are rewritten after every
# step and every few seconds, so a call that is cut off still reports. The steps, in order:
#
#   first     doctor   the GPU, the driver and the libraries
#             check    every fused kernel against its plain form, in three dtypes
#             steps    training steps of 300m and 1b, next to their prediction; clocks and power each second
#             train    a run on the GPU and on the CPU, resume, generate, eval
#             tests    alongside train: kernels, sharding, NCCL and cuBLASLt against their references
#             kernels  the time of every kernel
#             peer     PyTorch on the same machine: 1b, 300m, kernels (torch.compile), 1b (eager)
#             trace    five steps of 300m, traced
#   second    products 1b again with the fastest algorithm for each matrix product
#             ncu      counters of attention and a norm
#             ranks    two ranks on this GPU over NCCL
#             sanitizer  compute-sanitizer on a small decoder
#             7b       steps of 7b with offload
#
# PEER_PYTHON is a Python with PyTorch (default python3), PACK the folder of the pack (default target/pack). BUDGET is
# the time limit of a call in seconds, from which the limits of its steps follow. HOST_MEMORY is the memory that 7b may
# use on the host (default 112GiB). A call needs no network. The pack and the files of the repository have at most
# 64 MiB. benches/standins/rehearse.sh rehearses both calls without a GPU.
set -uo pipefail

usage() {
    sed -n '2,30s/^# \{0,1\}//p' "$0"
    exit "$1"
}
call=first only=""
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage 0 ;;
    --pack | --second | --size) call=${1#--} ;;
    --only)
        [ $# -gt 1 ] || { echo "--only needs a value" >&2; exit 2; }
        only=$2
        shift
        ;;
    *) echo "unknown argument $1" >&2; usage 2 >&2 ;;
    esac
    shift
done
case $call in
first) known=doctor,check,steps,train,tests,kernels,peer,trace usual=530 ;;
second) known=doctor,products,ncu,ranks,sanitizer,7b usual=220 ;;
pack | size) known="" usual=0 ;;
esac
for step in ${only//,/ }; do
    case ,$known, in *",$step,"*) ;; *) echo "--only $step: must be some of $known" >&2; exit 2 ;; esac
done
budget=${BUDGET:-$usual}
if ! [[ $budget =~ ^[0-9]+$ ]]; then
    echo "BUDGET=$budget: must be a number of seconds" >&2
    exit 2
fi

cd "$(dirname "$0")/.." || exit 2
target=${CARGO_TARGET_DIR:-target}
pack=${PACK:-target/pack}
binaries=(kiln kiln-bench it sharding nccl)

# -- On the build machine ---------------------------------------------------------------------------------------------

# Compiles the kernels of the steps below into the cache folder $2, by running the programs in $1 under the stand-ins.
# The GPU machine then needs no compiler. Results are meaningless here.
compile_kernels() (
    programs=$1 left=$(mktemp -d)
    benches/standins/setup.sh >/dev/null || exit 1
    # shellcheck source=/dev/null
    . "$target/standins/env.sh"
    export XDG_CACHE_HOME=$2 KILN_TEST_DEVICE=cuda FAKE_CUDA_COPY_MIB=1
    config=(configs/debug.toml --set device.backend=cuda --set train.ranks=1 --set train.steps=2
        --set optim.warmup_steps=1 --set device.verify_kernels=false --set precision.compute=f32
        --set data.path="$left/data" --out "$left/run")
    "$programs/kiln" doctor --gpu
    "$programs/kiln-bench" gpu --unchecked --only 300m --only 1b --steps 1
    "$programs/kiln-bench" gpu --only kernels
    "$programs/kiln" train "${config[@]}"
    # A test ends at its first wrong value, so the stand-in executes these kernels.
    export FAKE_CUDA_EXECUTE=1
    "$programs/it" cube_attention:: --skip compiled &
    "$programs/it" cube:: cube_experts:: cube_verify::
    "$programs/sharding" cube
    wait
    rm -rf "$left"
)

# Prints the sizes of the pack and of the files that git tracks or does not ignore. Fails if they exceed the limit.
carried() {
    local tree packed room=$((64 << 20))
    tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 stat -c %s 2>/dev/null |
        awk '{ sum += $1 } END { print sum + 0 }')
    packed=$(stat -c %s "$pack/pack.tar.xz") || return
    printf '%10d bytes  %s\n' "$packed" "$pack/pack.tar.xz" "$tree" "the files of the repository" \
        $((tree + packed)) "in total, of at most $room"
    [ $((tree + packed)) -le $room ] || { echo "too much to carry" >&2; return 1; }
}

if [ "$call" = size ]; then
    carried
    exit
fi
if [ "$call" = pack ]; then
    set -e
    parts=$pack.parts
    rm -rf "$parts" && mkdir -p "$pack" "$parts/bin" "$parts/python/nvidia/cu13"
    # One set of features for everything, so that burn is built once. Building the tests also builds both programs.
    CARGO_TARGET_DIR=$target cargo test --release --workspace --features kiln-benches/cuda,kiln-benches/wgpu --no-run \
        --message-format=json-render-diagnostics --test it --test sharding --test nccl --test bench |
        sed -n 's/.*"target":{[^}]*"name":"\(kiln\|kiln-bench\|it\|sharding\|nccl\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
        while read -r name program; do strip -o "$parts/bin/$name" "$program"; done
    for binary in "${binaries[@]}"; do
        test -x "$parts/bin/$binary" || { echo "cargo has made no $binary" >&2; exit 1; }
    done
    if [ "${PACK_KERNELS:-1}" = 1 ]; then
        echo "compiling kernels (some minutes; PACK_KERNELS=0 leaves them out)"
        compile_kernels "$parts/bin" "$PWD/$parts/cache" >"$parts/kernels.log" 2>&1 || true
        XDG_CACHE_HOME=$PWD/$parts/cache "$parts/bin/kiln" warmup --pack "$parts/kernels.tar"
        # Machines without CUDA's headers need them: NVRTC compiles all kernels that are not in the pack.
        cp -r "$target/standins/python/nvidia/cu13/include" "$parts/python/nvidia/cu13/"
    fi
    # The programs share most of their code. A single stream whose window covers all of them stores it once.
    entries=(bin python)
    [ ! -e "$parts/kernels.tar" ] || entries+=(kernels.tar)
    rm -f "$pack"/*
    tar -C "$parts" --sort=name --owner=0 --group=0 --mtime=@0 -cf - "${entries[@]}" |
        xz --lzma2=preset=6,dict=512MiB >"$pack/pack.tar.xz"
    rm -rf "$parts"
    carried
    exit
fi

# -- On the GPU machine -----------------------------------------------------------------------------------------------

out=${OUT:-target/gpu}
mkdir -p "$out" || exit 2
work=$(mktemp -d)
logs=$work/logs
results=$work/results
mkdir -p "$logs" "$results" "$work/cache"
# The home folder is neither read nor written.
export XDG_CACHE_HOME=$work/cache TORCHINDUCTOR_CACHE_DIR=$work/cache/inductor TRITON_CACHE_DIR=$work/cache/triton
export KILN_TEST_DEVICE=cuda HOME=${HOME:-$work}
python=${PEER_PYTHON:-python3}
helpers=()
# Tools that are often not on PATH.
for folder in /usr/local/cuda/bin /usr/local/nvidia/bin /opt/nvidia/nsight-compute/*; do
    [ ! -d "$folder" ] || PATH=$PATH:$folder
done

finish() {
    kill "${helpers[@]}" 2>/dev/null
    publish
    rm -rf "$work"
}
trap finish EXIT

# Writes the state of a step to a separate file, since steps may run at the same time: result, seconds, start.
note() { printf '%s\n' "$2" "$3" "$4" >"$results/$1"; }
state_of() { sed -n "$2p" "$results/$1"; }

# Runs a step: name, limit in seconds, second by which the step usually ends, command. Unused time of earlier steps
# extends the limit. A step that reaches its limit fails.
step() {
    local name=$1 limit=$2 until=$3 code from=$SECONDS result
    shift 3
    local log=$logs/$name.log
    limit=$((limit * budget / usual)) until=$((until * budget / usual))
    # No step can start in less time.
    [ "$limit" -ge 10 ] || limit=10
    [ $((until - from)) -le "$limit" ] || limit=$((until - from))
    [ "$limit" -le $((budget - from)) ] || limit=$((budget - from))
    if [ "$limit" -le 0 ]; then
        note "$name" "not run: no time left" 0 "$from"
        return 1
    fi
    note "$name" "running, limit $limit s" 0 "$from"
    # A gentler signal would end the shell of a step and leave a program that hangs on the GPU.
    timeout -s KILL "$limit" "$@" >"$log" 2>&1
    code=$?
    case $code in
    0) result=passed ;;
    137)
        if [ $((SECONDS - from)) -ge "$limit" ]; then result="failed: out of time"; else result="failed: killed, perhaps for lack of memory"; fi
        ;;
    *)
        # The first complaint of kiln-bench or of a test.
        result=$(sed -n 's/^FAILED //p; s/^test \(.*\) \.\.\. FAILED$/\1/p; s/^error: //p' "$log" | head -n 1)
        result="failed${result:+: ${result//|//}} (exit code $code)"
        ;;
    esac
    # cargo's test runner succeeds even if a filter matches no test.
    if [ $code = 0 ] && grep -q '^test result: ok. 0 passed' "$log"; then
        code=1 result="failed: no test ran"
    fi
    note "$name" "$result" $((SECONDS - from)) "$from"
    echo "$name: $result, $((SECONDS - from)) s"
    publish
    return $code
}
skip() { note "$1" "not run: $2" 0 "$SECONDS"; }
wanted() { [ -z "$only" ] || case ,$only, in *",$1,"*) ;; *) return 1 ;; esac; }

# The lines about one subject in a table of the doctor, a line on GPUs, and the path at the end of it.
lines_of() {
    awk -v subject="$1" '/^[^ ]/ { inside = $3 == subject }
        inside { sub("^[^ ]+ +[^ ]+ +" subject " +|^ +", ""); print }' "$2"
}
of_doctor() { lines_of GPUs "$logs/doctor.log" | sed -n "s/^$1: \(.*\)/\1/p" | head -n 1; }
path_of() { of_doctor "$1" | sed -n 's/.*(\(\/.*\))$/\1/p; s/^\(\/[^ ]*\)$/\1/p' | head -n 1; }

# -- The report -------------------------------------------------------------------------------------------------------

steps_so_far() {
    # In the order of their starts.
    local file
    for file in "$results"/*; do
        [ -e "$file" ] && printf '%s %s\n' "$(sed -n 3p "$file")" "${file##*/}"
    done | sort -n | cut -d' ' -f2
}
title() {
    local name bad=() runs=() wrong
    for name in $(steps_so_far); do
        case $(state_of "$name" 1) in
        failed*) bad+=("$name") ;;
        running*) runs+=("$name") ;;
        esac
    done
    wrong=$(lines_of kernels "$logs/check.log" 2>/dev/null |
        sed -n 's/^\([a-z_]*\) *WRONG  \([a-z0-9]*\):.*/\1 in \2/p' | paste -sd,)
    printf '# Kiln on %s:%s' "${gpu:-a GPU}" "${wrong:+ wrong kernels: ${wrong//,/, };}"
    [ ${#runs[@]} = 0 ] || printf ' running: %s;' "${runs[*]}"
    if [ ${#bad[@]} -gt 0 ]; then echo " failed: ${bad[*]}"; else echo " no step failed"; fi
}
median() { sort -n | awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }'; }
# The SM clock and the power during the busy seconds of a step.
clocks() {
    local from busy
    from=$(state_of "$1" 3)
    busy=$(awk -F', *' -v from="$from" -v to=$((from + $(state_of "$1" 2))) \
        '$1 >= from && $1 <= to && $6 >= 50 { print $2, $4 }' "$logs/clocks.csv" 2>/dev/null)
    [ -n "$busy" ] || return 0
    printf '\nSM clock %s MHz, power %s W: medians of %s busy seconds\n' "$(cut -d' ' -f1 <<<"$busy" | median)" \
        "$(cut -d' ' -f2 <<<"$busy" | median)" "$(wc -l <<<"$busy")"
}
# The tables that a step printed, or the end of its log if it printed none.
figures() {
    if grep -q '^|' "$1"; then
        grep -v '^ *INFO ' "$1"
    else
        printf '```text\n%s\n```\n' "$(tail -n 40 "$1")"
    fi
}
report() {
    local name log
    title
    echo
    echo "$(date -u +%F), \`benches/gpu.sh\`, $call call, $SECONDS s of at most $budget; ${version:-}."
    sed -n 's/^/- /p' "$logs/gpu.log" 2>/dev/null
    lines_of GPUs "$logs/doctor.log" 2>/dev/null | sed 's/^/- /'
    sed -n 's/^PyTorch/- PyTorch/p' "$logs/torch.log" 2>/dev/null
    echo
    echo "| step | result | began at | seconds |"
    echo "|---|---|---|---|"
    for name in $(steps_so_far); do
        echo "| $name | $(state_of "$name" 1) | $(state_of "$name" 3) | $(state_of "$name" 2) |"
    done
    for name in $(steps_so_far); do
        log=$logs/$name.log
        [ -s "$log" ] || continue
        case $name in
        doctor | tests-*) case $(state_of "$name" 1) in failed*) ;; *) continue ;; esac ;;
        esac
        printf '\n## %s\n\n' "$name"
        case $name in
        check) lines_of kernels "$log" | sed 's/^/    /' ;;
        steps | kernels | peer-* | products-* | 7b)
            figures "$log"
            clocks "$name"
            ;;
        *) printf '```text\n%s\n```\n' "$(tail -n 30 "$log" | cut -c1-300)" ;;
        esac
    done
    if [ -n "${predicted:-}" ]; then
        printf '\n## Predicted before\n\nFrom `%s`:\n\n' "$predicted"
        sed -n '/^| preset/,/^$/p' "$predicted"
    fi
}
# Writes the current report and logs. May be called at any time, also concurrently.
publish() (
    flock 9 2>/dev/null
    report >"$out/.report.md" && mv "$out/.report.md" "$out/report.md"
    tar -C "$work" -czf "$out/.logs.tgz" logs 2>/dev/null
    mv "$out/.logs.tgz" "$out/logs.tgz"
) 9>"$work/lock"

# The data of the traced run: this repository's text.
prepared() { "$bin/kiln" data prepare --input README.md docs model shard --vocab-size 4096 --out "$work/text"; }

# -- Start ------------------------------------------------------------------------------------------------------------

timeout 240 "$python" -c '
import torch
print("PyTorch", torch.__version__, "with CUDA", torch.version.cuda, flush=True)
raise SystemExit(not torch.cuda.is_available())' >"$logs/torch.log" 2>&1 &
torch=$!
if command -v nvidia-smi >/dev/null; then
    timeout 20 nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,vbios_version --format=csv >"$logs/gpu.log" 2>&1
    stdbuf -oL nvidia-smi -l 1 --format=csv,noheader,nounits \
        --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,memory.used 2>/dev/null |
        while read -r line; do echo "$SECONDS, $line"; done >"$logs/clocks.csv" &
    helpers+=($!)
fi
if ! [ -e "$pack/pack.tar.xz" ]; then
    echo "no $pack/pack.tar.xz: run benches/gpu.sh --pack where it is built" >&2
    exit 2
fi
if ! tar -C "$work" -xJf "$pack/pack.tar.xz" 2>"$logs/unpack.log"; then
    # The machine has no xz.
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1], "r:xz").extractall(sys.argv[2])' \
        "$pack/pack.tar.xz" "$work" >>"$logs/unpack.log" 2>&1 ||
        { echo "$pack/pack.tar.xz cannot be unpacked: neither tar with xz nor $python does it" >&2; exit 2; }
fi
bin=$work/bin
version=$("$bin/kiln" --version)
if [ -e "$work/kernels.tar" ]; then
    "$bin/kiln" warmup --unpack "$work/kernels.tar" >"$logs/unpack.log" 2>&1
fi
while sleep 5; do publish; done >/dev/null 2>&1 &
helpers+=($!)
preparing=
if [ "$call" = first ] && wanted trace; then
    prepared >"$logs/prepare.log" 2>&1 &
    preparing=$!
fi

# Reading cold files may be slow. The steps below are meaningless without a GPU that kiln can use.
step doctor 60 10 "$bin/kiln" doctor
gpu=$(of_doctor GPU | sed -n 's/^0 (\([^,]*\),.*/\1/p')
if [ -z "$gpu" ] && [ "$(state_of doctor 1)" != "failed: out of time" ]; then
    note doctor "failed: no GPU that kiln can use" "$SECONDS" 0
    lines_of GPUs "$logs/doctor.log"
    echo "no GPU that kiln can use"
    exit 1
fi
if ! [ -d "$(of_doctor headers)" ] && [ -d "$work/python" ]; then
    # The pack's own headers.
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$work/python"
    timeout 60 "$bin/kiln" doctor >"$logs/doctor.log"
fi
# kiln finds libraries by itself. Test programs do not, and PyTorch must find its own.
libraries=${LD_LIBRARY_PATH:-}
[ -d /usr/local/nvidia/lib64 ] && libraries=${libraries:+$libraries:}/usr/local/nvidia/lib64
for what in NVRTC cuBLASLt NCCL; do
    path=$(path_of $what)
    [ -n "$path" ] && libraries=${libraries:+$libraries:}$(dirname "$path")
done
with_libraries=(env LD_LIBRARY_PATH="$libraries")
headers=$(of_doctor headers)
[ -d "$headers" ] && with_libraries+=(CUDA_PATH="$(dirname "$headers")")
case $gpu in *H200*) predicted=benches/reports/2026-11-27-predicted-h200.md ;; *) predicted=benches/reports/2026-11-25-predicted.md ;; esac
prediction=(--predicted "$predicted")
[ -s "$predicted" ] || prediction=() predicted=""
# Each finished row is logged, so that a step that runs out of time still has results.
export KILN_LOG=warn,kiln=info

# -- The steps --------------------------------------------------------------------------------------------------------

# A small run, in f32, on a device.
small_run() {
    local device=$1 folder=$2
    shift 2
    "$bin/kiln" train configs/debug.toml --out "$work/$folder" --set data.path="$work/data" --set device.backend="$device" \
        --set precision.compute=f32 --set train.ranks=1 --set optim.schedule=constant --set optim.warmup_steps=2 --set log.every=1 \
        --set checkpoint.every=10 "$@"
}
# Compares the losses of two runs, which must agree to 1e-4.
same_losses() {
    local run
    for run in "$1" "$2"; do
        sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.]*\).*/\1 \2/p' "$work/$run/metrics.jsonl" >"$work/$run.losses"
    done
    echo "step, loss of $1, step, loss of $2:"
    paste "$work/$1.losses" "$work/$2.losses" | awk '
        { print; lines++; off = ($4 - $2) / $2; if (off < 0) off = -off; if (off > worst) worst = off; if ($1 != $3) bad = 1 }
        END { printf "largest relative difference of losses: %.1e\n", worst; exit bad || worst > 1e-4 || lines < 5 }'
}
# Runs a part of a step and prints its name. If a part fails, the other parts still run.
train() {
    local failed=0
    part() {
        echo "== $1"
        shift
        "$@" || failed=1
    }
    part "on the CPU" small_run cpu cpu --set train.steps=20
    part "on the GPU" small_run cuda gpu --set train.steps=20
    part "losses of both" same_losses cpu gpu
    part "half of it" small_run cuda half --set train.steps=10
    part "resumed" small_run cuda half --set train.steps=20 --resume latest
    part "losses of a resume" same_losses gpu half
    part generate "$bin/kiln" generate "$work/gpu" --device cuda --prompt "1 + 1 = " --max-tokens 16
    part eval "$bin/kiln" eval "$work/gpu" --device cuda --data "$work/data"
    return $failed
}
traced() {
    "$bin/kiln" train configs/300m.toml --out "$work/traced" --set data.path="$work/text" \
        --set model.vocab_size=4096 --set device.backend=cuda --set train.ranks=1 \
        --set train.global_batch=16 --set train.micro_batch=16 --set train.steps=9 --set optim.warmup_steps=2 \
        --set optim.decay_steps=2 --set eval.every=100 --set checkpoint.every=100 \
        --set log.every=1 --trace "steps=4-8,$logs/steps.pftrace"
    # The trace is written before the run ends with a checkpoint.
    "$bin/kiln" trace summary "$logs/steps.pftrace"
}
# Runs two processes on this GPU. Their losses must be those of two threads on the CPU.
two_ranks() {
    local rank code=0
    local settings=(--set data.path="$work/data" --set train.steps=5 --set optim.warmup_steps=2 --set log.every=1
        --set precision.compute=f32)
    # NCCL before 2.30 refuses two ranks of one machine on one GPU, so each claims to be on a separate machine.
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_SOCKET_IFNAME=lo NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MAX_CTAS=4
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29617
    env -u WORLD_SIZE -u LOCAL_WORLD_SIZE "$bin/kiln" train configs/debug.toml --ranks 2 --out "$work/threads" \
        --set device.backend=cpu "${settings[@]}" || return
    RANK=1 LOCAL_RANK=1 NCCL_HOSTID=kiln1 "$bin/kiln" train configs/debug.toml --out "$work/ranks" \
        --set device.backend=cuda "${settings[@]}" &
    rank=$!
    RANK=0 LOCAL_RANK=0 NCCL_HOSTID=kiln0 "$bin/kiln" train configs/debug.toml --out "$work/ranks" \
        --set device.backend=cuda "${settings[@]}" || code=$?
    wait $rank && [ $code = 0 ] && same_losses threads ranks
}
counters() {
    local filter
    for filter in attention_on_cuda_matches_reference_in_bf16 rms_norm; do
        ncu --clock-control none --set basic --launch-count 12 "$bin/it" "$filter" --test-threads=1 || return
    done
}
export bin work logs
export -f small_run same_losses train traced two_ranks counters

# -- The first call ---------------------------------------------------------------------------------------------------

if [ "$call" = first ]; then
    if wanted check; then
        step check 35 45 "$bin/kiln" doctor --gpu
        verdicts=$(lines_of kernels "$logs/check.log")
        if grep -qE '^[a-z_]+ +WRONG' <<<"$verdicts" && ! grep -qE '^[a-z_]+ +right' <<<"$verdicts"; then
            note check "failed: no kernel computes" "$(state_of check 2)" "$(state_of check 3)"
            tail -n 20 "$logs/check.log"
            echo "no kernel computes"
            exit 1
        fi
    fi
    ! wanted steps || step steps 45 90 "$bin/kiln-bench" gpu "${prediction[@]}" --least-mfu 45 --only 300m --only 1b
    ! wanted train || step train 25 115 bash -c train
    if wanted tests; then
        # Only the stand-ins detect memory that is reused out of order.
        alone=(--skip threads_cannot --skip of_a_python_wheel --skip memory_)
        # Of several GPUs, each gets a rank as well.
        [ "$(grep -c '^  GPU: ' "$logs/doctor.log")" -gt 1 ] || alone+=(--skip with_a_gpu_each)
        tests=()
        test_step() {
            local name=$1
            shift
            step "tests-$name" 120 235 "${with_libraries[@]}" "$@" &
            tests+=($!)
        }
        test_step cube "$bin/it" cube:: --test-threads=4
        test_step attention "$bin/it" cube_attention:: --skip compiled --test-threads=4
        test_step experts "$bin/it" cube_experts:: cube_verify:: --test-threads=4
        test_step sharding "$bin/sharding" cube --test-threads=1
        test_step nccl "$bin/nccl" --ignored --test-threads=1 "${alone[@]}"
        test_step products "$bin/it" products_are_right a_layer_is_one_product --ignored --test-threads=1
        wait "${tests[@]}"
    fi
    ! wanted kernels || step kernels 30 265 "$bin/kiln-bench" gpu --only kernels
    if wanted peer; then
        wait $torch
        torch_said=$?
        if [ $torch_said = 0 ]; then
            peer=(--peer "$python" --bars "${prediction[@]}")
            step peer-1b 90 355 "$bin/kiln-bench" gpu "${peer[@]}" --only 1b
            step peer-300m 50 400 "$bin/kiln-bench" gpu "${peer[@]}" --only 300m
            step peer-kernels 20 420 "$bin/kiln-bench" gpu --peer "$python" --only kernels
            step peer-1b-eager 30 455 "$bin/kiln-bench" gpu "${peer[@]}" --peer-eager --only 1b
        else
            note peer "failed: $python has no PyTorch that finds the GPU (exit code $torch_said)" 0 "$SECONDS"
        fi
    fi
    if wanted trace; then
        wait $preparing
        step trace 60 515 bash -c traced
    fi
fi

# -- The second call --------------------------------------------------------------------------------------------------

if [ "$call" = second ]; then
    if wanted products; then
        step products-measure 30 40 "$bin/kiln" warmup configs/1b.toml --products --set device.backend=cuda \
            --set data.vocab_size=32000 --set data.seq_len=2048 --set train.global_batch=8 --set train.micro_batch=8
        step products-1b 20 60 "$bin/kiln-bench" gpu "${prediction[@]}" --only 1b
    fi
    if wanted ncu; then
        if command -v ncu >/dev/null; then step ncu 30 90 "${with_libraries[@]}" bash -c counters; else skip ncu "there is no ncu"; fi
    fi
    ! wanted ranks || step ranks 40 125 bash -c two_ranks
    if wanted sanitizer; then
        if command -v compute-sanitizer >/dev/null; then
            # One allocation per tensor, so that accesses beyond a tensor's bounds are detected.
            KILN_TEST_EXACT_BOUNDS=1 step sanitizer 45 170 "${with_libraries[@]}" compute-sanitizer --report-api-errors no --error-exitcode 9 \
                "$bin/it" --test-threads=1 cube::a_decoder_on_wgpu attention_on_cuda_matches_reference_in_bf16
        else
            skip sanitizer "there is no compute-sanitizer"
        fi
    fi
    # Machines whose memory grows with use report too little at their start, so the configuration sets it.
    # If memory runs out nevertheless, the kernel should kill this program and none of the system's.
    ! wanted 7b || step 7b 50 220 bash -c 'echo 1000 >/proc/self/oom_score_adj; exec "$@"' bash \
        "$bin/kiln-bench" gpu --config configs/7b.toml --set train.global_batch=1 --set precision.compute=bf16 \
        --set shard.offload=true --set shard.recompute=block --set device.memory="${HOST_MEMORY:-112GiB}" --steps 2
fi

publish
cat "$out/report.md"
failed=0
for name in $(steps_so_far); do
    case $(state_of "$name" 1) in failed* | "not run: no time left") failed=1 ;; esac
done
exit $failed
