#!/usr/bin/env bash
# Trains on this machine with 8 ranks, each a process:
#
#     configs/runs/1-node-8-ranks.sh [CONFIG [ARGUMENTS OF kiln train …]]
#
# CONFIG is configs/debug.toml unless given. launch.sh lists the variables.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
if (($# == 0)); then
    set -- "$here/../debug.toml"
fi
exec "$here/launch.sh" 1 8 "$@"
