//! Functions with C's calling convention, for `benches/fakecuda/cuda.c`.
