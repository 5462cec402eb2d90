#!/usr/bin/env python3
"""Estimate times of matrix products on a GPU by NVIDIA's heuristics (nvidia-matmul-heuristics on PyPI).

    benches/matmul_times.py h100 <products

Needs no GPU. Each line of the input is a product of column-major matrices: rows, columns and inner dimension, N or
T for each of the two factors, and the dtype of the result (bf16 or f32): "2048 16384 2048 NN bf16". The factors are
in bf16. Each line of the output is the time of the best kernel, in seconds. `kernels predict` runs this script.
"""

import sys

from nvMatmulHeuristics import (
    NvMatmulHeuristicsFlags,
    NvMatmulHeuristicsInterfaceEx,
    NvMatmulHeuristicsMatmulLayout,
    NvMatmulHeuristicsNvidiaGpu,
    NvMatmulHeuristicsTarget,
)

GPUS = {"h100": "H100_SXM", "h100-pcie": "H100_PCIE", "h100-nvl": "H100_NVL", "h200": "H200_SXM", "h20": "H20_SXM"}
# Factors in bf16 (T), sums in f32 (S), and the result.
PRECISIONS = {"bf16": "TST", "f32": "TSS"}


def main():
    gpu = GPUS.get(sys.argv[1]) if len(sys.argv) == 2 else None
    if gpu is None:
        sys.exit(f"usage: {sys.argv[0]} GPU, where GPU is one of {', '.join(GPUS)}")
    heuristics = NvMatmulHeuristicsInterfaceEx(
        backend=NvMatmulHeuristicsTarget.CUTLASS3,
        flags=NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=NvMatmulHeuristicsNvidiaGpu[gpu],
    )
    for line in sys.stdin:
        m, n, k, transposed, result = line.split()
        layout = NvMatmulHeuristicsMatmulLayout[f"{transposed}_COL_MAJOR"]
        precision = PRECISIONS[result]
        heuristics.loadInternalDiscoverySet(layout, precision=precision)
        problem = heuristics.makeNvMatmulHeuristicsProblem(int(m), int(n), int(k), layout)
        kernels = heuristics.get(problem, 8, precision=precision)
        if not kernels:
            sys.exit(f"no kernel for {line.strip()}")
        print(min(kernel["runtime"] for kernel in kernels))


if __name__ == "__main__":
    main()
