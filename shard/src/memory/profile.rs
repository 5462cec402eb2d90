//! Records the allocations of a rank by owner.

use std::time::Duration;

use super::changes::Recording;
use super::owners::{self, MemoryOwner, Tag};

/// The purpose for which memory is held.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeldFor {
    /// Purpose of the memory.
    pub owner: MemoryOwner,
    /// For activations, the module that they belong to; `None` outside of modules.
    pub module: Option<String>,
}

/// An allocation or a release of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Time since the profile began.
    pub after: Duration,
    /// Index in [`Profile::holders`].
    pub holder: usize,
    /// Change of the holder's bytes.
    pub bytes: i64,
}

/// The counted allocations of one rank during a recording.
#[derive(Clone, Debug)]
pub struct Profile {
    /// All holders that had memory at any time.
    pub holders: Vec<HeldFor>,
    /// Bytes of each holder at the beginning.
    pub held: Vec<u64>,
    /// The changes since then, in order.
    pub changes: Vec<Change>,
    /// Bytes that the rank held at the end, according to [`live_bytes`](super::live_bytes): `held` plus all
    /// `changes`, if none is missing.
    pub held_at_end: u64,
    /// Number of changes, of any rank of the process, that did not fit into the record.
    pub missing: usize,
}

/// Records the allocations of a rank; see [`begin_profile`](super::begin_profile).
#[derive(Debug)]
pub struct Profiler {
    rank: usize,
    /// Function that returns the bytes that a rank holds.
    live_bytes: fn(usize) -> usize,
    recording: Recording,
    held: Vec<(Tag, usize)>,
}

impl Profiler {
    /// Starts recording the allocations of `rank`. `live_bytes` returns the bytes that a rank holds.
    pub(super) fn begin(rank: usize, live_bytes: fn(usize) -> usize) -> Profiler {
        // Allocated with sufficient capacity before recording begins.
        let mut held = Vec::with_capacity(owners::HOLDERS + 1);
        let recording = Recording::begin();
        let live = live_bytes(rank);
        owners::holders(rank, &mut held);
        let counted: usize = held.iter().map(|(_, bytes)| bytes).sum();
        // Whole weights that several ranks share count for each of them, but are in the blocks of none.
        held.push((Tag::gathered(rank), live.saturating_sub(counted)));
        Profiler { rank, live_bytes, recording, held }
    }

    /// Ends the recording.
    pub fn end(self) -> Profile {
        let count = self.recording.count();
        let held_at_end = (self.live_bytes)(self.rank) as u64;
        let (recorded, missing) = self.recording.take(count);
        let mut profile =
            Profile { holders: Vec::new(), held: Vec::new(), changes: Vec::new(), held_at_end, missing };
        for (tag, bytes) in &self.held {
            let holder = profile.holder(*tag);
            profile.held[holder] += *bytes as u64;
        }
        for change in recorded {
            let tag = Tag::from_word(change.tag);
            if tag.rank() == self.rank {
                let (after, holder) = (change.after, profile.holder(tag));
                profile.changes.push(Change { after, holder, bytes: change.bytes as i64 });
            }
        }
        profile
    }
}

impl Profile {
    /// Returns the index of the holder that matches `tag`.
    fn holder(&mut self, tag: Tag) -> usize {
        let holder = HeldFor { owner: tag.memory_owner(), module: tag.module() };
        self.holders.iter().position(|known| *known == holder).unwrap_or_else(|| {
            self.holders.push(holder);
            self.held.push(0);
            self.holders.len() - 1
        })
    }
}
