//! What a rank knows of its world once it has joined.

use super::control::Control;
use super::listener::Listener;
use super::message::MemberInfo;
use super::options::{Ring, Seal, Secret};
use super::pending::PendingConnections;
use std::sync::Arc;
use std::time::Duration;

/// A world, seen from one of its ranks, whose groups share it.
pub(super) struct World {
    pub(super) control: Control,
    pub(super) members: Vec<MemberInfo>,
    pub(super) job: String,
    pub(super) secret: Secret,
    pub(super) seal: Seal,
    pub(super) session: u64,
    pub(super) pending: Arc<PendingConnections>,
    /// Machine of this rank.
    pub(super) node: String,
    pub(super) ring: Ring,
    /// Whether ranks on one machine may read each other's memory.
    pub(super) read_memory: bool,
    /// Whether all ranks are in this process.
    pub(super) in_one_process: bool,
    /// How long the ranks of a new group may take to connect.
    pub(super) timeout: Duration,
    /// Where other ranks connect. Closed last of all.
    pub(super) _listener: Listener,
}
