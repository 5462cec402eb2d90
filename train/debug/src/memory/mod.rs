//! `kiln train --memory-profile`: who holds how much memory at which time of one step.

mod profiler;

pub(super) use profiler::MemoryProfiler;
