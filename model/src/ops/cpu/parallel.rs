//! Work in blocks of a fixed size, compiled for this machine's vector instructions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

/// Elements per block of an elementwise kernel: the operands fit in a core's L2 cache.
pub const BLOCK: usize = 16 * 1024;

/// Returns the number of rows of `width` elements in a block.
pub fn rows_per_block(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

/// Runs `f`, compiled for this machine's vector instructions. `f` and all functions in its inner loops must be
/// `#[inline(always)]`: other functions keep the baseline instructions.
#[inline(always)]
pub fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Runs `f(start, block)`, compiled as in [`simd`], on each block of `size` elements from index `start` on.
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
        for_each_item(data.chunks_mut(size), usize::MAX, |i, block| run(i * size, block));
    }
}

/// Calls `f`, compiled as in [`simd`], with the index and the `width` elements of each row.
pub fn for_each_row<T: Send>(data: &mut [T], width: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
    if width == 0 {
        return;
    }
    for_each_block(
        data,
        rows_per_block(width) * width,
        #[inline(always)]
        |start, block| {
            for (i, row) in block.chunks_exact_mut(width).enumerate() {
                f(start / width + i, row);
            }
        },
    );
}

/// Calls `f` with each item's index and the item, in parallel. Use `at_once` 1 if items differ in work.
pub fn for_each_item<T: Send>(
    items: impl IntoIterator<Item = T>,
    at_once: usize,
    f: impl Fn(usize, T) + Sync,
) {
    let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    for_each_index(items.len(), at_once, &|index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        f(index, item.expect("invariant: each index is passed once"));
    });
}

/// Returns the result of `f` for each item, in order.
pub fn map_items<T: Send, R: Send>(items: impl IntoIterator<Item = T>, f: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut results = Vec::new();
    let items: Vec<_> = items.into_iter().collect();
    results.resize_with(items.len(), || None);
    for_each_item(items.into_iter().zip(&mut results), usize::MAX, |_, (item, result)| {
        *result = Some(f(item))
    });
    results.into_iter().map(|result| result.expect("invariant: each item was passed")).collect()
}

/// Calls `task` with each index. Not generic: rayon's functions, compiled per kernel and dtype, took a fifth of this
/// crate's build time.
fn for_each_index(count: usize, at_once: usize, task: &(dyn Fn(usize) + Sync)) {
    (0..count).into_par_iter().with_max_len(at_once).for_each(task);
}

/// Calls `task` with each index below `count`, in parallel, for tasks of similar size. The caller spins while it waits:
/// waking it would take longer than the last tasks.
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
                // Counts down even if the task panics; the scope passes the panic on to the caller.
                let _done = Done(left);
                task(index);
            });
        }
        if count > 0 {
            let _done = Done(&left);
            task(0);
        }
        while left.load(Ordering::Acquire) > 0 {
            // Runs a task that no other thread has taken.
            if rayon::yield_now() != Some(rayon::Yield::Executed) {
                (0..16).for_each(|_| std::hint::spin_loop());
                std::thread::yield_now();
            }
        }
    });
}

/// Splits `data` into `count` blocks of `size` elements, or into `None`s if there is no data.
pub fn blocks<T>(data: Option<&mut [T]>, size: usize, count: usize) -> Vec<Option<&mut [T]>> {
    match data {
        None => std::iter::repeat_with(|| None).take(count).collect(),
        Some(data) => {
            let mut chunks = data.chunks_mut(size.max(1));
            (0..count).map(|_| Some(chunks.next().unwrap_or_default())).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_run_once_and_results_keep_order() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        pool.install(|| {
            for (count, at_once) in [(0, 1), (1, 1), (1000, 1), (1000, usize::MAX)] {
                let mut seen = vec![0; count];
                for_each_item(seen.iter_mut().enumerate(), at_once, |index, (item, seen)| {
                    assert_eq!(index, item);
                    *seen += 1 + item;
                });
                assert_eq!(seen, (1..=count).collect::<Vec<_>>());
                let squares = map_items(0..count, |item| item * item);
                assert_eq!(squares, (0..count).map(|item| item * item).collect::<Vec<_>>());
            }
        });
    }
}
