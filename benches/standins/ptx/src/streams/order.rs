//! The last users of bytes, with a check that the next user comes after them.
//!
//! Two operations are ordered if they are on the same stream, or if events or the host order them, but not
//! because one of them happened to run earlier. Conflicts are found in any order of execution: for each byte,
//! the last write and the last read of each stream since are kept.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::operation::{Access, Operation, Use};
use super::problem::{Problem, Side};

/// Bytes with the same history.
#[derive(Debug, Clone)]
struct Segment {
    end: u64,
    written: (Arc<Operation>, Use),
    /// The last read of each stream since the write.
    reads: Vec<Arc<Operation>>,
}

impl Segment {
    fn is_like(&self, other: &Segment) -> bool {
        let same = |a: &Arc<Operation>, b: &Arc<Operation>| Arc::ptr_eq(a, b);
        same(&self.written.0, &other.written.0)
            && self.written.1 == other.written.1
            && self.reads.len() == other.reads.len()
            && self.reads.iter().zip(&other.reads).all(|(a, b)| same(a, b))
    }
}

/// Memory that was allocated, and may have been freed since.
#[derive(Debug)]
struct Allocation {
    number: u64,
    bytes: u64,
    /// Segments by the offset of their first byte. Together, they cover the whole allocation.
    segments: BTreeMap<u64, Segment>,
}

/// All memory that streams use, and its users.
#[derive(Debug, Default)]
pub struct Order {
    allocations: BTreeMap<u64, Allocation>,
    count: u64,
}

/// The result of freeing memory.
#[derive(Debug)]
pub struct Freed {
    /// The address ranges that were written, if an allocation was freed.
    pub written: Option<Vec<Range<u64>>>,
    pub result: Result<(), Box<Problem>>,
}

impl Order {
    /// Registers `bytes` bytes at `start` as memory from `operation` on.
    pub fn allocated(&mut self, start: u64, bytes: u64, operation: &Arc<Operation>) {
        // Addresses of memory that is no longer pinned may be reused.
        let end = start + bytes;
        self.allocations.retain(|&other, old| other >= end || other + old.bytes <= start);
        self.count += 1;
        let written = (operation.clone(), Use::Allocate);
        let segments = BTreeMap::from([(0, Segment { end: bytes, written, reads: Vec::new() })]);
        self.allocations.insert(start, Allocation { number: self.count, bytes, segments });
    }

    /// Forgets the freed allocation at `start`, whose addresses may be reused.
    pub fn forget(&mut self, start: u64) {
        let is_freed = |old: &Allocation| old.segments.values().all(|segment| segment.written.1 == Use::Free);
        if self.allocations.get(&start).is_some_and(is_freed) {
            self.allocations.remove(&start);
        }
    }

    /// Records the accesses of `operation`.
    ///
    /// # Errors
    ///
    /// The first access that is unordered with another one, or that comes after a free. Later accesses are
    /// recorded as well.
    pub fn uses(&mut self, operation: &Arc<Operation>, accesses: &[Access]) -> Result<(), Box<Problem>> {
        let mut result = Ok(());
        for access in accesses.iter().filter(|access| access.start < access.end) {
            for part in self.parts(access) {
                let found = self.note(operation, &part);
                result = result.and(found);
            }
        }
        result
    }

    /// Splits an access at the borders of allocations: accesses of a kernel to adjacent addresses are merged.
    fn parts(&self, access: &Access) -> Vec<Access> {
        let mut parts = vec![*access];
        while let Some(last) = parts.last_mut()
            && let Some((&start, allocation)) = self.allocations.range(..=last.start).next_back()
            && (last.start + 1..last.end).contains(&(start + allocation.bytes))
        {
            let rest = Access { start: start + allocation.bytes, ..*last };
            last.end = rest.start;
            parts.push(rest);
        }
        parts
    }

    /// Frees the allocation at `start`. The free is recorded even if it is unordered with a use.
    pub fn freed(&mut self, operation: &Arc<Operation>, start: u64) -> Freed {
        let Some(allocation) = self.allocations.get(&start) else {
            let problem = Problem::Unknown(side(operation, Use::Free), start..start);
            return Freed { written: None, result: Err(Box::new(problem)) };
        };
        let segments = || allocation.segments.iter();
        let was_there = segments().all(|(_, segment)| segment.written.1 != Use::Free);
        let written = segments().filter(|(_, segment)| segment.written.1 == Use::Write);
        let written = written.map(|(&from, segment)| start + from..start + segment.end).collect();
        let access = Access { start, end: start + allocation.bytes, how: Use::Free };
        Freed { written: was_there.then_some(written), result: self.note(operation, &access) }
    }

    fn note(&mut self, operation: &Arc<Operation>, access: &Access) -> Result<(), Box<Problem>> {
        let unknown = || Box::new(Problem::Unknown(side(operation, access.how), access.start..access.end));
        let (&start, allocation) =
            self.allocations.range_mut(..=access.start).next_back().ok_or_else(unknown)?;
        let range = access.start - start..access.end - start;
        if range.end > allocation.bytes {
            return Err(unknown());
        }
        allocation.split(range.start);
        allocation.split(range.end);
        let mut result = Ok(());
        for (&from, segment) in allocation.segments.range_mut(range.clone()) {
            if result.is_ok()
                && let Some(other) = conflict(operation, access.how, segment)
            {
                let sides = [other, side(operation, access.how)];
                let bytes = from..segment.end;
                result = Err((sides, bytes));
            }
            segment.note(operation, access.how);
        }
        allocation.unite(range);
        result.map_err(|(sides, bytes)| {
            Box::new(Problem::between(sides, bytes, allocation.number, allocation.bytes))
        })
    }
}

fn side(operation: &Arc<Operation>, how: Use) -> Side {
    Side { operation: operation.clone(), how }
}

/// Returns the earlier use with which `operation` conflicts, if any.
fn conflict(operation: &Arc<Operation>, how: Use, segment: &Segment) -> Option<Side> {
    let (writer, written) = &segment.written;
    // Freed memory must not be used at all, in whatever order.
    if *written == Use::Free || !writer.precedes(operation) {
        return Some(side(writer, *written));
    }
    if how == Use::Read {
        return None;
    }
    let reader = segment.reads.iter().find(|reader| !reader.precedes(operation))?;
    Some(side(reader, Use::Read))
}

impl Segment {
    fn note(&mut self, operation: &Arc<Operation>, how: Use) {
        if self.written.1 == Use::Free {
            return;
        }
        if how != Use::Read {
            (self.written, self.reads) = ((operation.clone(), how), Vec::new());
            return;
        }
        let stream = operation.place.map(|(stream, _)| stream);
        match self.reads.iter_mut().find(|read| read.place.map(|(stream, _)| stream) == stream) {
            Some(read) => *read = operation.clone(),
            None => self.reads.push(operation.clone()),
        }
    }
}

impl Allocation {
    /// Splits the segment that contains `at`, so that one begins there.
    fn split(&mut self, at: u64) {
        let Some((&from, segment)) = self.segments.range_mut(..=at).next_back() else { return };
        if from < at && at < segment.end {
            let tail = segment.clone();
            segment.end = at;
            self.segments.insert(at, tail);
        }
    }

    /// Merges segments in and around `range` that have become equal.
    fn unite(&mut self, range: Range<u64>) {
        let first = self.segments.range(..range.start).next_back().map_or(0, |(&from, _)| from);
        let mut at = first;
        while let Some(next) = self.segments.get(&at).map(|segment| segment.end) {
            if next > range.end {
                break;
            }
            let alike = self.segments.get(&next).is_some_and(|other| self.segments[&at].is_like(other));
            if alike && let Some(other) = self.segments.remove(&next) {
                if let Some(segment) = self.segments.get_mut(&at) {
                    segment.end = other.end;
                }
            } else {
                at = next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::clock::Clock;
    use super::*;

    /// The operation at `position` of `stream`, which comes after the operations in `after`.
    fn operation(number: u64, stream: usize, position: u32, after: &[(usize, u32)]) -> Arc<Operation> {
        let mut clock = Clock::default();
        clock.raise(stream, position);
        after.iter().for_each(|&(stream, count)| clock.raise(stream, count));
        let what = format!("operation {number}");
        Arc::new(Operation { number, what, place: Some((stream, position)), clock })
    }

    fn host() -> Arc<Operation> {
        Arc::new(Operation { number: 0, what: "the host".into(), place: None, clock: Clock::default() })
    }

    fn memory() -> Order {
        let mut order = Order::default();
        order.allocated(1000, 100, &host());
        order
    }

    fn access(range: Range<u64>, how: Use) -> [Access; 1] {
        [Access { start: range.start, end: range.end, how }]
    }

    #[test]
    fn segments_split_and_unite() {
        let mut order = memory();
        let (first, second) = (operation(1, 0, 1, &[]), operation(2, 0, 2, &[]));
        for at in (1000..1100).step_by(10) {
            order.uses(&first, &access(at..at + 5, Use::Read)).unwrap();
        }
        assert_eq!(order.allocations[&1000].segments.len(), 20);
        for at in (1005..1105).step_by(10) {
            order.uses(&first, &access(at..at + 5, Use::Read)).unwrap();
        }
        assert_eq!(order.allocations[&1000].segments.len(), 1);
        order.uses(&second, &access(1020..1030, Use::Write)).unwrap();
        assert_eq!(order.allocations[&1000].segments.len(), 3);
        order.uses(&second, &access(1000..1100, Use::Write)).unwrap();
        assert_eq!(order.allocations[&1000].segments.len(), 1);
    }

    /// The conflict is found and reported identically in either order of recording.
    #[test]
    fn the_order_of_execution_does_not_matter() {
        for (a, b) in [(Use::Write, Use::Read), (Use::Read, Use::Write), (Use::Write, Use::Write)] {
            let (first, second) = (operation(1, 1, 1, &[]), operation(2, 2, 1, &[]));
            let uses = [(&first, access(1010..1050, a)), (&second, access(1040..1080, b))];
            let told = [[0, 1], [1, 0]].map(|turns| {
                let mut order = memory();
                order.uses(uses[turns[0]].0, &uses[turns[0]].1).unwrap();
                order.uses(uses[turns[1]].0, &uses[turns[1]].1).unwrap_err().to_string()
            });
            assert_eq!(told[0], told[1]);
            assert!(told[0].contains("bytes 40..50 of allocation 1 (100 bytes)"), "{}", told[0]);
            // Ordered operations, or separate bytes, are not a problem.
            let mut order = memory();
            order.uses(&first, &access(1010..1050, a)).unwrap();
            order.uses(&operation(2, 2, 1, &[(1, 1)]), &access(1040..1080, b)).unwrap();
            let mut order = memory();
            order.uses(&first, &access(1010..1040, a)).unwrap();
            order.uses(&second, &access(1040..1080, b)).unwrap();
        }
    }

    #[test]
    fn every_reader_counts_until_a_write() {
        let mut order = memory();
        for stream in 1..4 {
            order.uses(&operation(stream, stream as usize, 1, &[]), &access(1000..1004, Use::Read)).unwrap();
        }
        let behind_two = operation(4, 4, 1, &[(1, 1), (3, 1)]);
        let problem = order.uses(&behind_two, &access(1000..1100, Use::Write)).unwrap_err().to_string();
        assert!(problem.contains("operation 2 on stream 2"), "{problem}");
        order.uses(&operation(5, 5, 1, &[(4, 1)]), &access(1000..1100, Use::Write)).unwrap();
    }

    #[test]
    fn freed_memory_is_used_by_nobody() {
        let mut order = memory();
        let user = operation(1, 1, 1, &[]);
        order.uses(&user, &access(1010..1020, Use::Write)).unwrap();
        let Freed { written, result } = order.freed(&operation(2, 2, 1, &[]), 1000);
        assert_eq!(written.unwrap(), [1010..1020; 1]);
        let problem = result.unwrap_err().to_string();
        assert!(problem.contains("operation 2 on stream 2 frees"), "{problem}");
        let again = order.freed(&operation(4, 2, 3, &[]), 1000);
        assert!(again.written.is_none() && again.result.is_err());
        // Not even after the free.
        let behind = operation(3, 2, 2, &[]);
        let problem = order.uses(&behind, &access(1090..1091, Use::Read)).unwrap_err().to_string();
        assert!(problem.starts_with("used after it was freed"), "{problem}");
    }

    #[test]
    fn memory_that_is_not_there_is_not_used() {
        for range in [0..4, 1098..1102, 2000..2001] {
            let problem = memory().uses(&operation(1, 1, 1, &[]), &access(range, Use::Read)).unwrap_err();
            assert!(problem.to_string().contains("not allocated"), "{problem}");
        }
    }
}
