#!/bin/sh
# Trains the same tiny model in one process, under torchrun (with both kinds of rendezvous) and under mpirun, and
# checks that the losses agree and that `kiln doctor` names the launcher.
#
#     benches/peers/launchers.sh [STEPS]
#
# STEPS is the number of training steps (default 6).
# KILN names the binary (default target/release/kiln), PEER_PYTHON an interpreter with PyTorch
# (default target/peers/bin/python, installed by setup.sh). Needs mpirun of Open MPI.
# Exits with 1 if a check fails, and with 2 if something needed is missing.
set -u

usage() {
    sed -n '2,/^set -u/p' "$0" | sed -n 's/^# \{0,1\}//p'
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
*[!0-9]*)
    usage >&2
    exit 2
    ;;
esac

cd "$(dirname "$0")/../.." || exit 2
steps=${1:-6}
kiln=$(realpath "${KILN:-target/release/kiln}")
python=${PEER_PYTHON:-target/peers/bin/python}
failures=0
# If unset, torchrun sets it and prints a long warning.
export OMP_NUM_THREADS=1
# torchrun may use this machine's name for the rendezvous, which need not be a loopback address.
KILN_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export KILN_JOB_SECRET

missing() {
    echo "$1" >&2
    exit 2
}
[ -x "$kiln" ] || missing "$kiln is missing; build it with: cargo build --release"
"$python" -c 'import torch' 2>/dev/null ||
    missing "$python has no PyTorch; run benches/peers/setup.sh or set PEER_PYTHON"
mpirun --version >/dev/null 2>&1 ||
    missing "mpirun is missing; install Open MPI (Debian: openmpi-bin)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

passed() {
    echo "ok      $1"
}

failed() {
    echo "FAILED  $1"
    failures=$((failures + 1))
    if [ -f "$2" ]; then
        # Hides torchrun's own warnings. Its summary of a failure follows the output of the rank.
        grep -v '^[WE][0-9]' "$2" | head -n 15 | sed 's/^/        /'
    fi
}

free_port() {
    "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Runs a command once per rank, as one of the launchers: launch NAME COMMAND...
launch() {
    launcher=$1
    shift
    case $launcher in
    torchrun-standalone)
        "$python" -m torch.distributed.run --no-python --nproc-per-node 2 --standalone "$@"
        ;;
    torchrun-static)
        "$python" -m torch.distributed.run --no-python --nproc-per-node 2 --nnodes 1 \
            --master-addr 127.0.0.1 --master-port "$(free_port)" "$@"
        ;;
    mpirun)
        # mpirun provides no rendezvous address. By default it refuses to run as root or with too few
        # cores, both of which are fine for a test.
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
            mpirun -n 2 --oversubscribe \
            -x MASTER_ADDR=127.0.0.1 -x "MASTER_PORT=$(free_port)" "$@"
        ;;
    esac
}

# Trains into run folder $1, with launcher $2 (none if empty) and further arguments.
train() {
    folder=$1
    by=$2
    shift 2
    set -- "$kiln" train configs/debug.toml --out "$work/$folder" \
        --set "data.path=$work/data" --set "train.steps=$steps" --set optim.warmup_steps=0 \
        --set log.every=1 --set checkpoint.every=0 "$@"
    if [ -n "$by" ]; then
        launch "$by" "$@"
    else
        "$@"
    fi >"$work/$folder.log" 2>&1
}

# Succeeds if the losses of both runs agree to 1e-6, step by step. Unconnected ranks would reach the same losses,
# but each of them would report every step.
same_losses() {
    "$python" - "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" "$work/$2.log" "$steps" <<'PYTHON'
import json
import re
import sys

expected, actual = (
    [(line["step"], line["loss"]) for line in map(json.loads, open(path)) if "loss" in line]
    for path in sys.argv[1:3]
)
steps = list(range(1, int(sys.argv[4]) + 1))
for name, found in [("the reference", expected), ("this run", actual)]:
    if [step for step, _ in found] != steps:
        sys.exit(f"{name} logged steps {[step for step, _ in found]}, expected {steps}")
for (step, loss), (_, found) in zip(expected, actual):
    if not abs(found - loss) <= 1e-6 * abs(loss):
        sys.exit(f"loss of step {step} is {found}, expected {loss}")
said = re.findall(r"^step +1\b", open(sys.argv[3]).read(), re.MULTILINE)
if len(said) > 1:
    sys.exit(f"step 1 was reported {len(said)} times: the ranks trained separately")
PYTHON
}

if train reference "" --ranks 2; then
    passed "2 ranks in one process, $steps steps"
else
    failed "2 ranks in one process" "$work/reference.log"
    exit 1
fi

for launcher in torchrun-standalone torchrun-static mpirun; do
    case $launcher in
    torchrun-*) source=torchrun ;;
    mpirun) source="Open MPI" ;;
    esac

    if ! train "$launcher" "$launcher"; then
        failed "$launcher: train" "$work/$launcher.log"
    elif ! same_losses reference "$launcher" >"$work/losses.log" 2>&1; then
        failed "$launcher: losses" "$work/losses.log"
    else
        passed "$launcher: losses equal those of one process"
    fi

    # The source that the doctor uses is on a line with the word `taken`.
    doctor="$work/$launcher-doctor.log"
    if launch "$launcher" "$kiln" doctor >"$doctor" 2>&1 && grep -q "$source.*taken" "$doctor"; then
        passed "$launcher: kiln doctor names $source"
    else
        failed "$launcher: kiln doctor does not name $source" "$doctor"
    fi
done

if [ "$failures" -eq 0 ]; then
    echo "PASS"
else
    echo "FAIL: $failures checks failed"
    exit 1
fi
