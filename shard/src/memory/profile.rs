//! What a rank allocates for a while, by owner.

use std::time::Duration;

use super::changes::Recording;
use super::owners::{self, MemoryOwner, Tag};

/// Whose memory it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeldFor {
    /// What it is for.
    pub owner: MemoryOwner,
    /// Of activations, the module that they belong to; `None` outside of modules.
    pub module: Option<String>,
}

/// Some memory was allocated or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Since the profile has begun.
    pub after: Duration,
    /// Place in [`Profile::holders`].
    pub holder: usize,
    /// By how many bytes its holder has more than before.
    pub bytes: i64,
}

/// The counted allocations of one rank for a while.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Whoever held memory at some time.
    pub holders: Vec<HeldFor>,
    /// What each of them held in the beginning, in bytes.
    pub held: Vec<u64>,
    /// What happened then, in order.
    pub changes: Vec<Change>,
    /// Bytes that the rank held at the end, as [`live_bytes`](super::live_bytes) tells: `held` and all `changes`, if
    /// none is missing.
    pub held_at_end: u64,
    /// Changes of any rank of the process that there was no room for.
    pub missing: usize,
}

/// Records the allocations of a rank; see [`begin_profile`](super::begin_profile).
#[derive(Debug)]
pub struct Profiler {
    rank: usize,
    /// Tells what a rank holds.
    live_bytes: fn(usize) -> usize,
    recording: Recording,
    held: Vec<(Tag, usize)>,
}

impl Profiler {
    /// Begins to record the allocations of `rank`, which holds as much as `live_bytes` tells.
    pub(super) fn begin(rank: usize, live_bytes: fn(usize) -> usize) -> Profiler {
        // A list that is long enough, before anything is recorded.
        let mut held = Vec::with_capacity(owners::HOLDERS + 1);
        let recording = Recording::begin();
        let live = live_bytes(rank);
        owners::holders(rank, &mut held);
        let counted: usize = held.iter().map(|(_, bytes)| bytes).sum();
        // Whole weights that several ranks read in one place count for each of them, and are in no block of theirs.
        held.push((Tag::gathered(rank), live.saturating_sub(counted)));
        Profiler { rank, live_bytes, recording, held }
    }

    /// Ends it.
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
    /// The place of whoever holds what `tag` is of.
    fn holder(&mut self, tag: Tag) -> usize {
        let holder = HeldFor { owner: tag.memory_owner(), module: tag.module() };
        self.holders.iter().position(|known| *known == holder).unwrap_or_else(|| {
            self.holders.push(holder);
            self.held.push(0);
            self.holders.len() - 1
        })
    }
}
