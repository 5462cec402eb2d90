//! Fire drills: `kiln train --fault KIND@PHASE:STEP:RANK` makes one rank fail at a chosen point of a run.
//! [`Faulty`] sits between the rank and its communicator; no other code depends on it.

mod drill;
mod faulty;
mod spec;

pub use drill::Drill;
pub use faulty::{Faulty, rehearse};
pub use spec::{Fault, FaultKind, FaultParseError, FaultPhase};
