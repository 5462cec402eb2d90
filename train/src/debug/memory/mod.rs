//! `kiln train --memory-profile`: who holds how much memory when, in one step.

mod profiler;

pub(super) use profiler::MemoryProfiler;
