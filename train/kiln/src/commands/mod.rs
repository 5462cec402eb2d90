//! The commands, one file each: its arguments, and the call of the crate that does the work.

pub(crate) mod attach;
pub(crate) mod chat;
pub(crate) mod convert;
pub(crate) mod data;
pub(crate) mod documents;
pub(crate) mod eval;
pub(crate) mod explain;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod launch;
pub(crate) mod metrics;
pub(crate) mod own;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod sampling;
pub(crate) mod status;
pub(crate) mod sweep;
pub(crate) mod tools;
pub(crate) mod train;
pub(crate) mod watch;
