#!/bin/sh
# Creates the folder standins in target (or CARGO_TARGET_DIR): the stand-ins of this folder, built with cc, the
# library that executes kernels (benches/standins/ptx), built with cargo, and NVIDIA's compiler and headers from PyPI.
# Needs neither a GPU nor a driver.
#
#     benches/standins/setup.sh            # everything; existing files are kept
#     benches/standins/setup.sh --drivers  # the stand-ins only; needs no network
#
# PYTHON is the interpreter whose pip downloads packages (default python3), CC the C compiler (default cc).
# To run a program under the stand-ins, source target/standins/env.sh.
set -eu

case "${1:-}" in
"" | --drivers) ;;
*)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/../.."
sources=benches/standins
mkdir -p "${CARGO_TARGET_DIR:-target}/standins/lib"
out=$(cd "${CARGO_TARGET_DIR:-target}/standins" && pwd)

# The names by which programs look for the libraries: file names and sonames.
build() {
    name=$1
    shift
    "${CC:-cc}" -O1 -g -std=gnu11 -Wall -Wextra -Werror -fPIC -shared -pthread \
        -Wl,-soname,"$name" -o "$out/lib/$name" "$sources/trace.c" "$@"
}
cargo build --quiet --release -p kiln-ptx
build libcuda.so.1 -DHAS_PTX=1 "$sources/cuda.c" "$sources/memory.c" "$sources/streams.c" \
    "$out/../release/libkiln_ptx.a" -Wl,--exclude-libs,ALL -ldl -lm
build libnccl.so.2 "$sources/nccl.c" "$sources/nccl_collectives.c" "$sources/nccl_config.c" \
    "$sources/nccl_ranks.c" "$sources/nccl_sum.c"
build libcublasLt.so.13 "$sources/cublaslt.c"
build libcupti.so.13 "$sources/cupti.c"

cat >"$out/env.sh" <<END
# Programs that are started with these variables find the stand-ins instead of a driver. Not for cargo.
export LD_LIBRARY_PATH=$out/lib:$out/python/nvidia/cu13/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export CUDA_PATH=$out/python/nvidia/cu13
END

if [ "${1:-}" = --drivers ]; then
    exit 0
fi

# CUDA 13.0, to which cudarc's bindings are pinned. `nvcc` provides ptxas, `crt` and `cccl` the headers that
# kernels include.
if [ ! -e "$out/python/.done" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --no-deps \
        --root-user-action ignore --upgrade --target "$out/python" \
        nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 \
        nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88
    touch "$out/python/.done"
fi
"$out/python/nvidia/cu13/bin/ptxas" --version | tail -2
echo "done; source $out/env.sh"
