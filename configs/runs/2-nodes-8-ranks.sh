#!/usr/bin/env bash
# Trains on two machines with 8 ranks on each. Start it on both, at about the same time and with the
# same files below the working directory:
#
#     NODE_RANK=0 MASTER_ADDR=host0 KILN_JOB_SECRET=… configs/runs/2-nodes-8-ranks.sh CONFIG …
#     NODE_RANK=1 MASTER_ADDR=host0 KILN_JOB_SECRET=… configs/runs/2-nodes-8-ranks.sh CONFIG …
#
# CONFIG is configs/debug.toml unless given. launch.sh explains the variables.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if (($# == 0)); then
    set -- "$here/../debug.toml"
fi
exec "$here/launch.sh" 2 8 "$@"
