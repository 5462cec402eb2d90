//! The purposes of a rank's memory, for the report when memory is exhausted.
//!
//! A thread declares the purpose of its allocations with [`owned_by`]; all other allocations count as activations of
//! the module that its rank is in ([`enter_module`]). Purpose and module are stored in the header of the block, so
//! that they are known when it is freed.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::changes;
use crate::sync::lock;

/// Maximum number of ranks per process with separate counters; further ranks share the last counter.
pub const MAX_RANKS: usize = 64;

/// Purpose of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryOwner {
    /// Activations of modules, and everything without another owner.
    Activations,
    /// f32 master weights.
    Weights,
    /// Slots of the optimizer.
    OptimizerState,
    /// Gradients, whole or of a shard.
    Gradients,
    /// Gathered whole weights.
    GatheredWeights,
}

impl MemoryOwner {
    const ALL: [MemoryOwner; 5] = [
        MemoryOwner::Activations,
        MemoryOwner::Weights,
        MemoryOwner::OptimizerState,
        MemoryOwner::Gradients,
        MemoryOwner::GatheredWeights,
    ];

    /// Returns the name of the owner.
    pub fn name(self) -> &'static str {
        ["activations", "weights", "optimizer state", "gradients", "gathered weights"][self as usize]
    }
}

/// Index of the counter for memory that does not belong to a single rank: memory that several ranks share, and
/// allocations of threads that are bound to no rank, such as those that prepare a run.
pub(super) const NO_RANK: usize = MAX_RANKS;

/// Number of entries in the table of modules; modules that do not fit share the last one.
const PLACES: usize = 160;
const OWNERS: usize = MemoryOwner::ALL.len();
/// Maximum number of entries that [`holders`] returns.
pub(super) const HOLDERS: usize = PLACES + OWNERS;

/// Bytes by rank and owner and, for activations, by module.
static BY_OWNER: [[AtomicUsize; OWNERS]; MAX_RANKS + 1] =
    [const { [const { AtomicUsize::new(0) }; OWNERS] }; MAX_RANKS + 1];
static BY_PLACE: [[AtomicUsize; PLACES]; MAX_RANKS + 1] =
    [const { [const { AtomicUsize::new(0) }; PLACES] }; MAX_RANKS + 1];
/// The module that each rank is in, and the pass.
static PLACE: [AtomicUsize; MAX_RANKS + 1] = [const { AtomicUsize::new(0) }; MAX_RANKS + 1];
/// The names of the modules.
static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Bytes of all ranks of this process.
static TOTAL: AtomicUsize = AtomicUsize::new(0);
/// The maximum of `TOTAL`. Freed memory keeps its pages, so allocations up to this maximum need no new pages.
static MOST: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Maximum number of bytes in pages of this process.
static RESIDENT_LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static EXHAUSTED: OnceLock<fn(&str)> = OnceLock::new();
/// The callback set by [`on_failure`].
static FAILURE: OnceLock<fn(usize)> = OnceLock::new();
/// Set while a thread is reporting that memory is exhausted.
static IS_REPORTING: AtomicBool = AtomicBool::new(false);

/// Minimum size of an allocation that must wait while another thread reports that memory is exhausted.
const WAITS_FROM: usize = 64 << 10;
/// Maximum time that such an allocation waits, which should be enough time to write the report and its files.
const REPORT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(10);

thread_local! {
    /// The counter of the rank that the thread is bound to, or [`NO_RANK`].
    pub(super) static RANK: Cell<usize> = const { Cell::new(NO_RANK) };
    /// The rank that the thread is bound to, which may be [`MAX_RANKS`] or more; `None` before it is bound.
    pub(super) static BOUND: Cell<Option<usize>> = const { Cell::new(None) };
    static OWNER: Cell<MemoryOwner> = const { Cell::new(MemoryOwner::Activations) };
    static IS_TELLING: Cell<bool> = const { Cell::new(false) };
}

/// Calls `run`, and counts its allocations on this thread for `owner`.
pub fn owned_by<T>(owner: MemoryOwner, run: impl FnOnce() -> T) -> T {
    struct Restored(MemoryOwner);
    impl Drop for Restored {
        fn drop(&mut self) {
            OWNER.set(self.0);
        }
    }
    let _restored = Restored(OWNER.replace(owner));
    run()
}

/// Sets the module that the calling thread's rank is in, as an index into the names passed to [`name_modules`].
pub(crate) fn enter_module(index: usize) {
    PLACE[RANK.get()].store((index + 1).min(PLACES - 1), Ordering::Relaxed);
}

/// Sets the names of modules, for the report of [`limit`].
pub(crate) fn name_modules(names: impl Iterator<Item = String>) {
    *lock(&NAMES) = names.collect();
}

/// Writes the name of the last module that `rank` entered; nothing before the first one. Takes no lock and allocates
/// nothing, so a signal handler may call it.
pub fn write_module_of(rank: usize, out: &mut dyn fmt::Write) -> fmt::Result {
    let place = PLACE[rank.min(MAX_RANKS - 1)].load(Ordering::Relaxed);
    let Ok(names) = NAMES.try_lock() else { return Ok(()) };
    place.checked_sub(1).and_then(|place| names.get(place)).map_or(Ok(()), |name| out.write_str(name))
}

/// Limits this process, and its ranks together, to `bytes` of memory. If an allocation would exceed the
/// limit, `told` is called with a report of all owners and their bytes, and must end the process.
pub fn limit(bytes: usize, told: fn(&str)) {
    // The function is set only by the first call; later calls may change the limit.
    let _ = EXHAUSTED.set(told);
    LIMIT.store(bytes, Ordering::Relaxed);
    RESIDENT_LIMIT.store(bytes, Ordering::Relaxed);
}

/// Lowers the limit, once [`limit`] has set one.
pub fn lower_limit(bytes: usize) {
    if EXHAUSTED.get().is_some() {
        LIMIT.fetch_min(bytes, Ordering::Relaxed);
    }
}

/// Calls `told` with the requested number of bytes whenever the system refuses an allocation, before the caller sees
/// the failure. `told` may run at any moment, on a thread that holds any lock, so it must neither allocate nor wait.
/// Only the first call of this function takes effect.
pub fn on_failure(told: fn(usize)) {
    let _ = FAILURE.set(told);
}

/// Returns `block`, and calls the callback of [`on_failure`] if it is null. `size` is the number of bytes requested.
pub(super) fn check_failure(block: *mut u8, size: usize) -> *mut u8 {
    #[cold]
    fn tell(size: usize) {
        if let Some(told) = FAILURE.get() {
            told(size);
        }
    }
    if block.is_null() {
        tell(size);
    }
    block
}

/// Collects the bytes that `rank` holds for every owner, with activations split by module.
pub(super) fn holders(rank: usize, held: &mut Vec<(Tag, usize)>) {
    let read = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let others: usize = BY_OWNER[rank][1..].iter().map(read).sum();
    for (place, bytes) in BY_PLACE[rank].iter().map(read).enumerate() {
        // Memory of other owners is counted in place 0.
        let bytes = if place == 0 { bytes.saturating_sub(others) } else { bytes };
        held.push((Tag(rank | place << 32), bytes));
    }
    for (owner, bytes) in BY_OWNER[rank].iter().map(read).enumerate().skip(1) {
        held.push((Tag(rank | owner << 16), bytes));
    }
    held.retain(|(_, bytes)| *bytes > 0);
}

/// Returns the name of an entry in the table of modules, as set by [`name_modules`].
fn name_of(place: usize, names: &[String]) -> Option<&str> {
    match place {
        0 => None,
        place if place == PLACES - 1 => Some("further modules"),
        place => names.get(place - 1).map(String::as_str),
    }
}

/// Owner, module and rank of a block, encoded in one word for the block's header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag(usize);

impl Tag {
    /// Returns the tag of the calling thread, for blocks of `rank`.
    pub(super) fn here(rank: usize) -> Self {
        let owner = OWNER.try_with(Cell::get).unwrap_or(MemoryOwner::Activations) as usize;
        let place = if owner == 0 { PLACE[rank].load(Ordering::Relaxed) } else { 0 };
        Tag(rank | owner << 16 | place << 32)
    }

    pub(super) fn from_word(word: usize) -> Self {
        Tag(word)
    }

    pub(super) fn word(self) -> usize {
        self.0
    }

    pub(super) fn rank(self) -> usize {
        self.0 & 0xffff
    }

    fn owner(self) -> usize {
        self.0 >> 16 & 0xffff
    }

    fn place(self) -> usize {
        self.0 >> 32
    }

    /// Returns the tag of whole weights that `rank` shares with others.
    pub(super) fn gathered(rank: usize) -> Self {
        Tag(rank | (MemoryOwner::GatheredWeights as usize) << 16)
    }

    pub(super) fn memory_owner(self) -> MemoryOwner {
        MemoryOwner::ALL.get(self.owner()).copied().unwrap_or(MemoryOwner::Activations)
    }

    /// Returns the module of the block, if it has one.
    pub(super) fn module(self) -> Option<String> {
        name_of(self.place(), &lock(&NAMES)).map(str::to_owned)
    }

    pub(super) fn add(self, size: usize) {
        changes::record(self.0, size.cast_signed());
        BY_OWNER[self.rank()][self.owner()].fetch_add(size, Ordering::Relaxed);
        BY_PLACE[self.rank()][self.place()].fetch_add(size, Ordering::Relaxed);
        let total = TOTAL.fetch_add(size, Ordering::Relaxed) + size;
        MOST.fetch_max(total, Ordering::Relaxed);
    }

    pub(super) fn remove(self, size: usize) {
        changes::record(self.0, -size.cast_signed());
        BY_OWNER[self.rank()][self.owner()].fetch_sub(size, Ordering::Relaxed);
        BY_PLACE[self.rank()][self.place()].fetch_sub(size, Ordering::Relaxed);
        TOTAL.fetch_sub(size, Ordering::Relaxed);
    }
}

/// Calls the callback passed to [`limit`], which ends the process, if `size` more bytes would exceed the limit. Must
/// be called before any lock is taken.
pub(super) fn check_limit(size: usize) {
    let (asked, limit) = (TOTAL.load(Ordering::Relaxed).saturating_add(size), LIMIT.load(Ordering::Relaxed));
    let grows = asked.saturating_sub(MOST.load(Ordering::Relaxed));
    if asked > limit || asked > limit / 8 * 7 && grows > 0 && are_pages_short(grows) {
        exhausted(size);
    }
}

/// Returns whether `size` more bytes would exceed the limit on the pages of the process, which hold more than the
/// counted memory.
#[cold]
fn are_pages_short(size: usize) -> bool {
    resident().saturating_add(size) > RESIDENT_LIMIT.load(Ordering::Relaxed)
}

/// Returns the bytes of pages private to this process, or 0 if the system does not report them. Allocates
/// nothing.
fn resident() -> usize {
    let mut text = [0u8; 128];
    // SAFETY: the path is null-terminated, the buffer has the given length, and the descriptor is closed.
    let (length, page) = unsafe {
        let file = libc::open(c"/proc/self/statm".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return 0;
        }
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        (length, libc::sysconf(libc::_SC_PAGESIZE))
    };
    let text = text.get(..usize::try_from(length).unwrap_or(0)).unwrap_or_default();
    let mut pages = std::str::from_utf8(text).unwrap_or_default().split_whitespace().skip(1);
    let [all, shared] = [(); 2].map(|()| pages.next().and_then(|pages| pages.parse().ok()).unwrap_or(0usize));
    all.saturating_sub(shared) * usize::try_from(page).unwrap_or(0)
}

#[cold]
fn exhausted(size: usize) {
    // The report's own allocations are small, and must not trigger another report.
    if IS_TELLING.try_with(|is_telling| is_telling.replace(true)).unwrap_or(true) {
        return;
    }
    if IS_REPORTING.swap(true, Ordering::Relaxed) {
        // Another thread is reporting, and will end the process. Its small allocations succeed; a tensor's must wait,
        // or the kernel would end the process first.
        let begun = Instant::now();
        while size >= WAITS_FROM && IS_REPORTING.load(Ordering::Relaxed) && begun.elapsed() < REPORT_TIMEOUT {
            thread::sleep(POLL);
        }
    } else {
        // Report only once, in case the report does not end the process.
        let limit = LIMIT.load(Ordering::Relaxed);
        if let Some(told) = EXHAUSTED.get().filter(|_| limit != usize::MAX) {
            told(&describe(size, limit));
        }
        LIMIT.store(usize::MAX, Ordering::Relaxed);
        IS_REPORTING.store(false, Ordering::Relaxed);
    }
    IS_TELLING.set(false);
}

/// Describes the owners and their bytes, after a request for `size` more bytes would have exceeded `limit`.
fn describe(size: usize, limit: usize) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = write_text(&mut text, size, Some(limit));
    text
}

/// Writes a table of the memory that each owner holds, after a request for `size` bytes has failed. Takes no lock and
/// allocates nothing.
///
/// # Errors
///
/// If writing to `out` fails.
pub fn write_holders(out: &mut dyn fmt::Write, size: usize) -> fmt::Result {
    write_text(out, size, None)
}

fn write_text(out: &mut dyn fmt::Write, size: usize, limit: Option<usize>) -> fmt::Result {
    struct Mib(usize);
    impl fmt::Display for Mib {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            // Padded manually, because the module is not part of the number's width.
            let mib = self.0 as f64 / f64::from(1 << 20);
            match f.width() {
                Some(width) => write!(f, "{mib:>width$.1} MiB", width = width.saturating_sub(4)),
                None => write!(f, "{mib:.1} MiB"),
            }
        }
    }
    // A thread that is bound to no rank is reported as one of rank 0.
    let counter = RANK.try_with(Cell::get).unwrap_or(0) % MAX_RANKS;
    let rank = BOUND.try_with(Cell::get).ok().flatten().unwrap_or(counter);
    let read = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    // Not locked if taken: a thread that is allocating, possibly this one, may hold the lock.
    let names = NAMES.try_lock().ok();
    let names = names.as_ref().map_or(&[][..], |names| &names[..]);
    let name = |place: usize| name_of(place, names).unwrap_or("elsewhere");
    let place = name(read(&PLACE[counter]));
    let (held, pages) = (Mib(read(&TOTAL)), Mib(resident()));
    write!(out, "out of memory: rank {rank} asks for {} in {place}; its process holds {held}, ", Mib(size))?;
    match limit {
        Some(limit) => write!(out, "in pages of {pages}, and may hold {}", Mib(limit))?,
        None => write!(out, "in pages of {pages}, and the system gives it no more")?,
    }
    write!(out, "\nof rank {rank}:")?;
    for owner in MemoryOwner::ALL {
        let bytes = Mib(read(&BY_OWNER[counter][owner as usize]));
        write!(out, "\n  {bytes:>12}  {}", owner.name())?;
    }
    let mut places = [(0, 0); PLACES];
    for (place, (bytes, at)) in places.iter_mut().enumerate() {
        (*bytes, *at) = (read(&BY_PLACE[counter][place]), place);
    }
    // Memory of other owners is counted in place 0.
    let others: usize = BY_OWNER[counter][1..].iter().map(read).sum();
    places[0].0 = places[0].0.saturating_sub(others);
    places.sort_unstable_by_key(|(bytes, place)| (std::cmp::Reverse(*bytes), *place));
    write!(out, "\nactivations of rank {rank} by module, the largest first:")?;
    for (bytes, place) in places.iter().filter(|(bytes, _)| *bytes > 0).take(8) {
        write!(out, "\n  {:>12}  {}", Mib(*bytes), name(*place))?;
    }
    let shared = read(&BY_OWNER[NO_RANK][MemoryOwner::GatheredWeights as usize]);
    if shared > 0 {
        write!(out, "\n  {:>12}  gathered weights that all ranks of this process read", Mib(shared))?;
    }
    Ok(())
}
