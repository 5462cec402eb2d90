#!/usr/bin/env bash
# Launches the ranks of one node. Called by the other scripts in this folder; do not run it directly:
#
#     launch.sh NODES RANKS_PER_NODE CONFIG [ARGUMENTS OF kiln train …]
#
# Variables:
#     KILN             the program [target/release/kiln, or kiln from the PATH]
#     MAX_RESTARTS     how often to start all ranks again after a failure [0]
#   and for several nodes
#     NODE_RANK        this node, from 0
#     MASTER_ADDR      host name or address of node 0, the same on every node
#     MASTER_PORT      a port there [29500]
#     KILN_JOB_SECRET  the same random text on every node: openssl rand -hex 32
set -euo pipefail

if (($# < 3)); then
    echo "usage: ${0##*/} NODES RANKS_PER_NODE CONFIG [ARGUMENTS OF kiln train …]" >&2
    exit 2
fi
nodes=$1 ranks=$2
shift 2

if [[ -z ${KILN:-} ]]; then
    built=$(dirname "${BASH_SOURCE[0]}")/../../target/release/kiln
    if [[ -x $built ]]; then
        KILN=$built
    elif ! KILN=$(command -v kiln); then
        echo "no kiln: build it with \`cargo build --release\`, or set KILN to the program" >&2
        exit 2
    fi
fi

place=(--nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}")
if ((nodes == 1)); then
    place+=(--standalone)
else
    for name in NODE_RANK MASTER_ADDR KILN_JOB_SECRET; do
        if [[ -z ${!name:-} ]]; then
            echo "$name is not set; the head of ${BASH_SOURCE[0]} says to what" >&2
            exit 2
        fi
    done
    place+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR")
    place+=(--master-port "${MASTER_PORT:-29500}")
fi
exec "$KILN" launch "${place[@]}" -- train "$@"
