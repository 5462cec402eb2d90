//! Work in blocks of a fixed size, compiled for this machine's vector instructions.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

/// Elements of a block of an elementwise kernel: few enough for the operands to fit in a core's L2 cache, and
/// enough work to be worth handing to another thread.
pub const BLOCK: usize = 16 * 1024;

/// Rows of `width` elements that make up a block.
pub fn rows_per_block(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

/// Runs `f` compiled for the vector instructions of this machine. `f` and everything in its inner loops are
/// marked `#[inline(always)]`: a function that is not inlined keeps the baseline instructions.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Runs `f(start, block)` on every block of `size` elements of `data`, where `start` is the index
/// of the block's first element. `f` is compiled as in [`simd`].
pub fn for_each_block<T: Send>(data: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
    let run = |start: usize, block: &mut [T]| {
        simd(
            #[inline(always)]
            || f(start, block),
        )
    };
    if data.len() <= size {
        run(0, data);
    } else {
        data.par_chunks_mut(size).enumerate().for_each(|(i, block)| run(i * size, block));
    }
}

/// Runs `task` with each index below `count`, at the same time where there are threads for it.
///
/// For tasks of about one size. The calling thread stays awake while it waits for the last tasks: waking it
/// would take longer than they do.
pub fn for_each_task(count: usize, task: impl Fn(usize) + Sync) {
    struct Done<'a>(&'a AtomicUsize);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Release);
        }
    }
    let left = AtomicUsize::new(count);
    rayon::scope(|scope| {
        for index in 1..count {
            let (left, task) = (&left, &task);
            scope.spawn(move |_| {
                // Also if the task panics, which the scope passes on to the caller.
                let _done = Done(left);
                task(index);
            });
        }
        if count > 0 {
            let _done = Done(&left);
            task(0);
        }
        while left.load(Ordering::Acquire) > 0 {
            // A task that no other thread has taken, or nothing.
            if rayon::yield_now() != Some(rayon::Yield::Executed) {
                (0..16).for_each(|_| std::hint::spin_loop());
                std::thread::yield_now();
            }
        }
    });
}

/// `count` consecutive blocks of `size` elements of `data`; all of them are `None` if `data` is.
pub fn blocks<T>(data: Option<&mut [T]>, size: usize, count: usize) -> Vec<Option<&mut [T]>> {
    match data {
        None => std::iter::repeat_with(|| None).take(count).collect(),
        Some(data) => {
            let mut chunks = data.chunks_mut(size.max(1));
            (0..count).map(|_| Some(chunks.next().unwrap_or_default())).collect()
        }
    }
}
