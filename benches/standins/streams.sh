#!/usr/bin/env bash
# Tests the stand-ins for the driver and for NCCL: streams, events, copies, collectives between processes, and bugs in
# their use, each of which must be reported. Needs a C compiler, but neither a GPU nor the network.
#
#     benches/standins/streams.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
benches/standins/setup.sh --drivers
out=${CARGO_TARGET_DIR:-target}/standins
# shellcheck source=/dev/null
. "$out/env.sh"
tests=benches/standins/tests
for name in streams nccl; do
    "${CC:-cc}" -O1 -g -std=gnu11 -Wall -Wextra -Werror -o "$out/test-$name" "$tests/$name.c" "$tests/support.c" \
        -L"$out/lib" -l:libnccl.so.2 -l:libcuda.so.1
    "$out/test-$name"
done
