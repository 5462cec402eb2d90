//! Preparation of a run: checks that it would start, measurements of machines and strategies, and tuning.

pub mod bench;
mod calibrate;
pub mod check;
mod findings;
mod machine;
mod network;
pub mod smoke;
pub mod warmup;

pub use calibrate::calibrated;
pub use machine::DoctorArgs;
