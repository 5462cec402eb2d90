//! The limit on files and sockets that this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that a process needs for other things than its connections to ranks.
const SPARE: u64 = 512;

/// Connections of a rank to another: one in the world, some in groups that are split off, and one being
/// accepted.
const PER_RANK: u64 = 6;

/// Raises the soft limit, as far as the hard one allows, to what a world of this size needs. Many systems
/// start with 1,024.
pub(super) fn allow(world_size: usize) {
    let needed = SPARE + PER_RANK * world_size as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return;
    }
    let wanted = maximum.map_or(needed, |maximum| maximum.min(needed));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    if wanted < needed || raised.is_err() {
        tracing::warn!(
            "{world_size} ranks may need {needed} open files in each process, and {} are allowed: raise \
             the limit with `ulimit -n` if connections fail",
            if raised.is_ok() { wanted } else { current.unwrap_or(wanted) }
        );
    }
}
