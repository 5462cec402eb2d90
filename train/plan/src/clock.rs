//! The duration of a step: computation overlapped with communication.

use kiln_collectives::{Operation, Phase};
use serde::Serialize;

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// The ranks that share one copy of the model.
    Shard,
    /// The ranks that hold the same shard.
    Replicate,
    /// All ranks.
    World,
}

/// A collective of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlannedCall {
    /// Operation of the collective.
    pub operation: Operation,
    /// The ranks that take part.
    pub axis: Axis,
    /// Phase of the collective.
    pub phase: Phase,
    /// Bytes that each rank sends in one call.
    pub sent: u64,
    /// Number of equal calls: those of a middle micro-batch are counted once for each such micro-batch.
    pub times: u64,
}

/// The speed of a collective among the ranks of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkSpeed {
    /// Fixed latency of a call in seconds.
    pub latency_s: f64,
    /// Bytes that a rank sends per second once the latency has passed.
    pub bytes_per_s: f64,
}

impl LinkSpeed {
    /// Links on which a collective takes no time.
    pub const INSTANT: LinkSpeed = LinkSpeed { latency_s: 0.0, bytes_per_s: f64::INFINITY };
}

/// The speed of a rank's computation and communication.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// FLOP/s of matrix products.
    pub flops: f64,
    /// Bytes of memory read and written per second by all other operations.
    pub memory: f64,
    /// True if collectives overlap with computation, which they do not if the same cores do both.
    pub overlaps: bool,
    /// Link speeds by operation and axis.
    pub(crate) links: Vec<(Operation, Axis, LinkSpeed)>,
}

impl Speed {
    /// A rank whose work takes no time.
    pub const INSTANT: Speed =
        Speed { flops: f64::INFINITY, memory: f64::INFINITY, overlaps: true, links: Vec::new() };

    fn seconds(&self, call: &PlannedCall) -> f64 {
        let link = self.links.iter().find(|(op, axis, _)| (*op, *axis) == (call.operation, call.axis));
        let link = link.map_or(LinkSpeed::INSTANT, |(.., link)| *link);
        link.latency_s + call.sent as f64 / link.bytes_per_s
    }
}

/// The time of one rank's step so far, and its collectives.
#[derive(Debug)]
pub(super) struct Clock {
    speed: Speed,
    now: f64,
    /// Time at which all started collectives are done; they run one after the other.
    communicated: f64,
    waited: f64,
    calls: Vec<PlannedCall>,
}

/// Time at which a collective is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish(f64);

impl Clock {
    pub(super) fn new(speed: Speed) -> Self {
        Clock { speed, now: 0.0, communicated: 0.0, waited: 0.0, calls: Vec::new() }
    }

    /// Advances by matrix products of `flops` FLOP, and by `bytes` of memory that other operations read and write.
    pub(super) fn compute(&mut self, flops: f64, bytes: f64) {
        self.now += flops / self.speed.flops + bytes / self.speed.memory;
    }

    /// Advances by `seconds` of other work.
    pub(super) fn pass(&mut self, seconds: f64) {
        self.now += seconds;
    }

    /// Starts a collective, and returns the time at which it will be done.
    pub(super) fn issue(&mut self, call: PlannedCall) -> Finish {
        let seconds = self.speed.seconds(&call);
        self.calls.push(call);
        if self.speed.overlaps {
            self.communicated = self.communicated.max(self.now) + seconds;
        } else {
            self.now += seconds;
            self.communicated = self.now;
        }
        Finish(self.communicated)
    }

    /// Advances to the time at which a collective is done.
    pub(super) fn wait(&mut self, Finish(finish): Finish) {
        self.waited += (finish - self.now).max(0.0);
        self.now = self.now.max(finish);
    }

    /// Returns the seconds so far, how many of them were spent waiting, and the collectives.
    pub(super) fn read(&self) -> (f64, f64, &[PlannedCall]) {
        (self.now, self.waited, &self.calls)
    }
}
