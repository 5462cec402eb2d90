//! How long a step takes: computation and communication, one beside the other.

use kiln_collectives::{Operation, Phase};
use serde::Serialize;

/// The ranks that a collective is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Those that share one copy of the model.
    Shard,
    /// Those that hold the same shard.
    Replicate,
    /// All.
    World,
}

/// One collective of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedCall {
    /// What it does.
    pub operation: Operation,
    /// The ranks that take part.
    pub axis: Axis,
    /// When.
    pub phase: Phase,
    /// Bytes that each rank sends each time.
    pub sent: u64,
    /// How often: passes in the middle of a step are alike.
    pub times: u64,
}

/// What a collective takes on the links of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// Seconds that a call takes whatever it sends.
    pub latency_s: f64,
    /// Bytes that a rank sends in a second, beyond that.
    pub bytes_per_s: f64,
}

impl LinkSpeed {
    /// Nothing takes any time.
    pub const INSTANT: LinkSpeed = LinkSpeed { latency_s: 0.0, bytes_per_s: f64::INFINITY };
}

/// How fast a rank computes and communicates.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// FLOP/s in products of matrices.
    pub flops: f64,
    /// Bytes of memory read and written in a second by everything else.
    pub memory: f64,
    /// Whether collectives run beside the computation. They do not where the same cores do both.
    pub overlaps: bool,
    /// Links of each operation and axis.
    pub links: Vec<(Operation, Axis, LinkSpeed)>,
}

impl Speed {
    /// A rank that takes no time.
    pub const INSTANT: Speed =
        Speed { flops: f64::INFINITY, memory: f64::INFINITY, overlaps: true, links: Vec::new() };

    fn seconds(&self, call: &PlannedCall) -> f64 {
        let link = self.links.iter().find(|(op, axis, _)| (*op, *axis) == (call.operation, call.axis));
        let link = link.map_or(LinkSpeed::INSTANT, |(.., link)| *link);
        link.latency_s + call.sent as f64 / link.bytes_per_s
    }
}

/// The time of one rank, and the collectives of its step.
#[derive(Debug)]
pub(super) struct Clock {
    speed: Speed,
    now: f64,
    /// When the collectives that were issued are over. They run in order.
    communicated: f64,
    waited: f64,
    calls: Vec<PlannedCall>,
}

/// When a collective is over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish(f64);

impl Clock {
    pub(super) fn new(speed: Speed) -> Self {
        Clock { speed, now: 0.0, communicated: 0.0, waited: 0.0, calls: Vec::new() }
    }

    /// Products of `flops`, and `bytes` that are read or written besides.
    pub(super) fn compute(&mut self, flops: f64, bytes: f64) {
        self.now += flops / self.speed.flops + bytes / self.speed.memory;
    }

    /// So many seconds of something else.
    pub(super) fn pass(&mut self, seconds: f64) {
        self.now += seconds;
    }

    /// Starts a collective.
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

    /// Waits for a collective.
    pub(super) fn wait(&mut self, Finish(finish): Finish) {
        self.waited += (finish - self.now).max(0.0);
        self.now = self.now.max(finish);
    }

    /// Seconds so far, those of them that were spent waiting, and the collectives.
    pub(super) fn read(&self) -> (f64, f64, &[PlannedCall]) {
        (self.now, self.waited, &self.calls)
    }
}
