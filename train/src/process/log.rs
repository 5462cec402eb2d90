//! Which log events are shown: the variable `KILN_LOG`.

use std::ffi::OsStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The variable.
pub(super) const VARIABLE: &str = "KILN_LOG";

/// Where nobody says otherwise.
const DEFAULT: &str = "warn";

/// A value of `KILN_LOG` that says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE}={value}: \"{wrong}\" is no level; use off, error, warn, info, debug or trace, with others \
     for parts of the program as in warn,kiln_collectives=debug, or unset it for {DEFAULT}"
)]
pub struct LogLevelError {
    value: String,
    /// The part of it that is wrong.
    wrong: String,
}

/// What `value`, that of the variable, lets through.
pub(super) fn filter(value: Option<&OsStr>) -> Result<EnvFilter, LogLevelError> {
    let value = value.map(OsStr::to_string_lossy).unwrap_or_default();
    let value = if value.trim().is_empty() { DEFAULT } else { value.trim() };
    let error = |wrong: &str| LogLevelError { value: value.to_owned(), wrong: wrong.trim().to_owned() };
    // What the filter takes for the name of a part is more likely a level that was misspelt. Spans are in
    // brackets, with commas of their own.
    if !value.contains('[') {
        // An empty one would pass for "error".
        let is_level = |level: &str| !level.trim().is_empty() && level.trim().parse::<LevelFilter>().is_ok();
        let is_wrong = |directive: &&str| !directive.rsplit('=').next().is_some_and(is_level);
        if let Some(wrong) = value.split(',').find(is_wrong) {
            return Err(error(wrong));
        }
    }
    EnvFilter::try_new(value).map_err(|_| error(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_told_from_nonsense() {
        let filter = |value: &str| filter(Some(OsStr::new(value)));
        for value in ["", " ", "error", "WARN", "off", "warn,kiln=debug", "kiln_shard=trace", "[step]=info"] {
            assert!(filter(value).is_ok(), "{value}");
        }
        for (value, wrong) in [
            ("verbose", "verbose"),
            ("kiln", "kiln"),
            ("kiln=loud", "kiln=loud"),
            ("warn,, info", ""),
            ("warn,nfo", "nfo"),
            ("=", "="),
        ] {
            let error = filter(value).expect_err(value);
            assert_eq!(error.wrong, wrong);
            assert!(error.to_string().contains("use off, error, warn"), "{error}");
        }
        assert!(super::filter(None).is_ok());
    }
}
