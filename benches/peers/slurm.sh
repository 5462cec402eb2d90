#!/usr/bin/env bash
# Runs configs/slurm on a real Slurm, and checks the state of jobs after they are signalled to stop, preempted,
# cancelled and killed.
#
#     benches/peers/slurm.sh
#
# Creates a temporary cluster: two nodes on this machine, each with a separate network and host name, and all files in
# a temporary folder. Takes about two minutes.
# KILN names the binary (default target/release/kiln). Needs root, and Debian's slurm-wlm, munge and iproute2,
# which it installs if apt-get exists.
# Exits with 1 if a check fails, and with 2 if something needed is missing.
set -euo pipefail

usage() {
    sed -n '2,/^set -/p' "$0" | sed -n 's/^# \{0,1\}//p'
}

missing() {
    echo "$1" >&2
    exit 2
}

# --- Outside: requirements, and the namespaces, whose end ends every process. ---

if [[ ${1:-} != --inside ]]; then
    case "${1:-}" in
    "") ;;
    -h | --help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        exit 2
        ;;
    esac
    kiln=$(realpath "${KILN:-$(dirname "$0")/../../target/release/kiln}")
    [[ -x $kiln ]] || missing "$kiln is missing; build it with: cargo build --release"
    [[ $(id -u) == 0 ]] || missing "this needs root, for network namespaces and Slurm's daemons"
    if ! command -v slurmctld slurmd munged ip >/dev/null; then
        command -v apt-get >/dev/null || missing "install Slurm, munge and iproute2"
        apt-get update -qq && apt-get install -y -qq slurm-wlm munge iproute2 >/dev/null
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    chmod 755 "$work"
    code=0
    KILN=$kiln unshare --mount --pid --net --uts --fork --kill-child --mount-proc \
        "$(realpath "$0")" --inside "$work" || code=$?
    exit "$code"
fi

# --- Inside: the cluster. ---

trap 'exit 130' INT TERM
work=$2
repository=$(realpath "$(dirname "$0")/../..")

ip link set lo up
hostname kiln-a
printf '127.0.0.1 localhost\n10.77.0.1 kiln-a\n10.77.0.2 kiln-b\n' >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts
unshare --net --uts sh -c "hostname kiln-b; touch $work/b; exec sleep infinity" &
b=$!
on_b() { nsenter --target $b --net --uts "$@"; }
until [[ -e $work/b ]]; do sleep 0.05; done
ip link add cable type veth peer name cable netns $b
ip address add 10.77.0.1/24 dev cable
ip link set cable up
on_b ip link set lo up
on_b ip address add 10.77.0.2/24 dev cable
on_b ip link set cable up

mkdir -p "$work"/{munge,state,log,jobs}
(umask 077 && head -c 1024 /dev/urandom >"$work/munge/key")
munged --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
    --log-file="$work/munge/log" --seed-file="$work/munge/seed"

# A requeued job waits until its previous credential has expired, by default two minutes.
cat >"$work/slurm.conf" <<CONF
ClusterName=kiln
SlurmctldHost=kiln-a
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/ctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/log/ctld
SlurmdLogFile=$work/log/%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=kiln-a NodeAddr=10.77.0.1 CPUs=32
NodeName=kiln-b NodeAddr=10.77.0.2 CPUs=32
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=off
CONF
export SLURM_CONF=$work/slurm.conf
slurmctld
slurmd
on_b slurmd
for _ in {1..300}; do
    [[ $(sinfo --noheader --Node --partition low --format %T 2>/dev/null) == $'idle\nidle' ]] && break
    sleep 0.1
done
sinfo --Node --partition low --noheader --format '%N %T' | grep -q kiln-b ||
    missing "Slurm does not start: $(tail -n 3 "$work"/log/*)"

# --- Jobs. ---

results=$work/results
passed() { echo "ok      $1" | tee -a "$results"; }

# Reports a failed check, with the output of the job.
failed() {
    {
        echo "FAILED  $1: $2"
        tail -n 12 "$work/jobs/$1"/*.log 2>/dev/null | sed 's/^/        /'
    } | tee -a "$results"
}

# A fault drill: runs ACT, and lets its rank continue when a signal has reached both ranks.
cat >"$work/hold.sh" <<'HOLD'
#!/usr/bin/env bash
trap 'told=1' TERM USR1
told=
eval "$ACT"
until [[ -n $told ]]; do sleep 0.05; done
sleep 0.5
exit 0
HOLD
chmod +x "$work/hold.sh"

arguments=("$repository/configs/debug.toml" --set "data.path=$work/data" --set train.steps=8 --set log.every=1
    --set optim.warmup_steps=0 --set checkpoint.every=3 --set checkpoint.async=false)
drill=(--fault "run=$work/hold.sh@data:5:0")

losses() {
    sed -n 's/.*"step":\([0-9]*\),.*"loss":\([^,}]*\).*/\1 \2/p' "$1/metrics.jsonl" 2>/dev/null
}

# Submits recipe $2 as job $1, in a folder of that name; SBATCH has further flags of sbatch.
submit() {
    local name=$1 recipe=$2
    shift 2
    mkdir -p "$work/jobs/$name"
    RANKS_PER_NODE=1 sbatch --parsable --chdir "$work/jobs/$name" --nodes 2 --ntasks-per-node 1 --cpus-per-task 1 \
        ${SBATCH:-} "$repository/configs/slurm/$recipe.sbatch" "${arguments[@]}" --out run "$@"
}

# Waits for the end of job $1; prints its state and the number of times it was requeued.
outcome() {
    local job
    for _ in {1..1200}; do
        job=$(scontrol --oneliner show job "$1")
        if [[ $job =~ JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED) ]]; then
            echo "${BASH_REMATCH[1]} $(sed -n 's/.* Restarts=\([0-9]*\).*/\1/p' <<<"$job")"
            return
        fi
        sleep 0.2
    done
    echo "no end after four minutes: $(squeue --noheader --jobs "$1" --format '%T %r')"
}

# Runs recipe $2 as job $1, which must end in state $3; if $4 is given, one of its logs must contain it. Unless
# CURVE is `none`, its losses must equal those of a run with threads, bit for bit.
check() {
    local name=$1 recipe=$2 expected=$3 says=$4 id found
    shift 4
    id=$(submit "$name" "$recipe" "$@")
    found=$(outcome "$id")
    if [[ $found != "$expected" ]]; then
        failed "$name" "ended as '$found', expected '$expected'"
    elif ! grep -rqF --include "*.log" -e "$says" "$work/jobs/$name"; then
        failed "$name" "no log says '$says'"
    elif [[ ${CURVE:-} != none ]] && ! diff <(losses "$work/reference") <(losses "$work/jobs/$name/run"); then
        failed "$name" "its losses differ from those of threads"
    else
        passed "$name"
    fi
}

"$KILN" train "${arguments[@]}" --ranks 2 --out "$work/reference" >"$work/reference.log" 2>&1 ||
    missing "threads do not train: $(cat "$work/reference.log")"
[[ $(losses "$work/reference" | wc -l) == 8 ]] || missing "threads have not logged 8 steps"

srun --nodes 2 --ntasks-per-node 1 "$KILN" doctor >"$work/doctor" 2>&1 || true
if [[ $(grep -c 'Slurm  *taken: a task of srun' "$work/doctor") == 2 ]]; then
    passed "doctor"
else
    failed "doctor" "$(cat "$work/doctor")"
fi

for recipe in train launch; do
    check "$recipe" $recipe "COMPLETED 0" "done: 8 steps" &
    # Only the ranks, only the batch script, all processes of the job.
    for flags in "--signal=TERM" "--signal=TERM --batch" "--signal=USR1 --batch" "--signal=USR1 --full"; do
        ACT="scancel $flags \$SLURM_JOB_ID" check "$recipe: scancel $flags" $recipe "COMPLETED 1" \
            "stopped on request: 5 of 8 steps" "${drill[@]}" &
    done
    # At SIGTERM, srun kills its tasks: the job resumes from the previous checkpoint.
    ACT="scancel --signal=TERM --full \$SLURM_JOB_ID" check "$recipe: scancel --signal=TERM --full" $recipe \
        "COMPLETED 1" "resuming from run/checkpoints/fsdp_cpt3" "${drill[@]}" &
    # Slurm itself sends the signal, some time before the job's time limit.
    SBATCH="--time=1 --signal=USR1@50" ACT= check "$recipe: the end of its time" $recipe "COMPLETED 1" \
        "stopped on request: 5 of 8 steps" "${drill[@]}" &
    CURVE=none ACT="scancel \$SLURM_JOB_ID" check "$recipe: cancelled" $recipe "CANCELLED 0" \
        "stopped on request: 5 of 8 steps" "${drill[@]}" &
done
CURVE=none ACT='kill -9 $PPID' check "train: a rank is killed" train "FAILED 0" "(world rank 0): it died" "${drill[@]}" &
CURVE=none ACT='kill -9 $PPID' check "train: another rank is killed" train "FAILED 0" "(world rank 1): it died" \
    --fault "run=$work/hold.sh@data:5:1" &
ACT='kill -9 $PPID' check "launch: a rank is killed" launch "COMPLETED 0" "resuming from run/checkpoints/fsdp_cpt3" \
    "${drill[@]}" &
SBATCH="--nodes 1" ACT="scancel --signal=TERM \$SLURM_JOB_ID" check "train: one task, two threads" train \
    "COMPLETED 1" "stopped on request: 5 of 8 steps" "${drill[@]}" &
SBATCH="--nodes 1 --ntasks-per-node 2" ACT="scancel --signal=TERM \$SLURM_JOB_ID" check "train: two tasks on one node" \
    train "COMPLETED 1" "stopped on request: 5 of 8 steps" "${drill[@]}" &
wait $(jobs -p | grep -vx $b)

# A job of higher priority takes both nodes, so nothing else runs meanwhile.
for recipe in train launch; do
    ACT="sbatch --partition high --nodes 2 --exclusive --output /dev/null --wrap true" \
        check "$recipe: preempted by another job" $recipe "COMPLETED 1" "stopped on request: 5 of 8 steps" "${drill[@]}"
done

if grep -q ^FAILED "$results"; then
    echo "FAIL: $(grep -c ^FAILED "$results") checks failed"
    exit 1
fi
echo "PASS: $(grep -c ^ok "$results") checks"
