use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::steps;

/// The steps to trace and the output file: `steps=10-12` or `steps=10,slow.pftrace`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// The optimizer steps, from 1.
    pub steps: RangeInclusive<u64>,
    /// The output file, instead of one in the run folder.
    pub file: Option<PathBuf>,
}

impl TraceOptions {
    pub(super) fn path(&self, out: &Path) -> PathBuf {
        let name = || format!("steps-{}.pftrace", steps::name(&self.steps));
        self.file.clone().unwrap_or_else(|| out.join("traces").join(name()))
    }
}

/// The error for an invalid selection of steps to trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; write steps=10-12, or steps=10-12,FILE")]
pub struct TraceOptionsError {
    problem: String,
}

impl FromStr for TraceOptions {
    type Err = TraceOptionsError;

    fn from_str(text: &str) -> Result<Self, TraceOptionsError> {
        let wrong = |problem: String| TraceOptionsError { problem };
        let (first, file) = match text.split_once(',') {
            Some((_, "")) => return Err(wrong("missing file name after the comma".to_owned())),
            Some((first, file)) => (first, Some(file.into())),
            None => (text, None),
        };
        Ok(TraceOptions { steps: steps::parse(first).map_err(wrong)?, file })
    }
}

impl fmt::Display for TraceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps={}", steps::name(&self.steps))?;
        self.file.iter().try_for_each(|file| write!(f, ",{}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_options_round_trip() {
        let parsed = |text: &str| text.parse::<TraceOptions>();
        let all = TraceOptions { steps: 10..=12, file: None };
        assert_eq!(parsed("steps=10-12"), Ok(all.clone()));
        assert_eq!(all.path(Path::new("run")), Path::new("run/traces/steps-10-12.pftrace"));
        let one = TraceOptions { steps: 5..=5, file: Some("a,b.pftrace".into()) };
        assert_eq!(parsed("steps=5,a,b.pftrace"), Ok(one.clone()));
        assert_eq!(parsed(&one.to_string()), Ok(one.clone()));
        assert_eq!(one.path(Path::new("run")), Path::new("a,b.pftrace"));
        for (text, problem) in [
            ("10-12", "expected steps="),
            ("steps=0", "numbered from 1"),
            ("steps=3-2", "before"),
            ("steps=3,", "missing file name"),
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("write steps=10-12"), "{text}: {error}");
        }
    }
}
