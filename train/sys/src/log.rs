//! The log: which events the variable `KILN_LOG` selects, and their format.

mod detailed;

use std::ffi::OsStr;
use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::output;
use detailed::Detailed;

pub use detailed::is_detail;

/// Name of the variable.
pub(super) const VARIABLE: &str = "KILN_LOG";

/// The default level.
const DEFAULT: &str = "warn";

/// Parts of `kiln` that are separate crates, by their names in `KILN_LOG` and in their events.
const CRATES: [(&str, &str); 7] = [
    ("comm", "kiln_collectives"),
    ("kiln::checkpoint", "kiln_checkpoint"),
    ("kiln::data", "kiln_data"),
    ("kiln::launch", "kiln_launch"),
    ("kiln::lines", "crate::lines"),
    ("kiln::place", "kiln_launch::place"),
    ("kiln::process", "kiln_sys"),
];

/// An invalid value of `KILN_LOG`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE}={value}: \"{wrong}\" is no level; use off, error, warn, info, debug or trace, with others \
     for parts of the program as in warn,kiln_collectives=debug, or unset it for {DEFAULT}"
)]
pub struct LogLevelError {
    value: String,
    /// The invalid part of the value.
    wrong: String,
}

/// Returns the filter for `value`, the content of the variable.
pub(super) fn filter(value: Option<&OsStr>) -> Result<EnvFilter, LogLevelError> {
    let value = value.map(OsStr::to_string_lossy).unwrap_or_default();
    let value = if value.trim().is_empty() { DEFAULT } else { value.trim() };
    let error = |wrong: &str| LogLevelError { value: value.to_owned(), wrong: wrong.trim().to_owned() };
    // A word that the filter would take for the name of a part is more likely a misspelt level. Spans are in
    // brackets and contain commas.
    if !value.contains('[') {
        // An empty word would be accepted as "error".
        let is_level = |level: &str| !level.trim().is_empty() && level.trim().parse::<LevelFilter>().is_ok();
        let is_wrong = |directive: &&str| !directive.rsplit('=').next().is_some_and(is_level);
        if let Some(wrong) = value.split(',').find(is_wrong) {
            return Err(error(wrong));
        }
    }
    let mut named: Vec<_> = value.split(',').map(of_crate).collect();
    // Levels of parts do not change the default of the others.
    if value.split(',').all(|directive| directive.contains('=')) {
        named.insert(0, DEFAULT.to_owned());
    }
    EnvFilter::try_new(named.join(",")).map_err(|_| error(value))
}

/// Returns a directive with the name that events carry.
fn of_crate(directive: &str) -> String {
    let directive = directive.trim();
    let named = CRATES.iter().find_map(|(part, name)| {
        let rest = directive.strip_prefix(part)?;
        (rest.is_empty() || rest.starts_with(['=', '[', ':'])).then(|| format!("{name}{rest}"))
    });
    named.unwrap_or_else(|| directive.to_owned())
}

/// Shows the events that `filter` selects on standard error. An existing subscriber is kept.
pub(super) fn show(filter: EnvFilter) {
    let is_detailed = filter.max_level_hint().is_none_or(|most| most >= LevelFilter::DEBUG);
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| output::Console::Stderr)
        .log_internal_errors(false);
    let _ = match is_detailed {
        true => subscriber.with_ansi(false).event_format(Detailed).try_init(),
        false => {
            subscriber.with_ansi(std::io::stderr().is_terminal()).without_time().with_target(false).try_init()
        }
    };
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

    #[test]
    fn parts_that_are_crates_go_by_both_names() {
        let shown = |value: &str| filter(Some(OsStr::new(value))).expect(value).to_string();
        assert_eq!(shown("warn,kiln::data=debug"), shown("warn,kiln_data=debug"));
        assert_eq!(shown("warn,kiln::checkpoint::saver=off"), shown("warn,kiln_checkpoint::saver=off"));
        assert_eq!(shown("warn,kiln::run=info"), "kiln::run=info,warn");
        assert_eq!(shown("warn,comm=trace"), shown("warn,kiln_collectives=trace"));
        assert_eq!(shown("warn,kiln_shard::comm=trace"), "kiln_shard::comm=trace,warn");
        // Parts that are not mentioned keep their level.
        assert_eq!(shown("comm=trace"), shown("warn,comm=trace"));
    }

    /// A filter matches prefixes of names: the name of the program selects all of its crates.
    #[test]
    fn events_of_all_crates_are_shown() {
        let shows = |value: Option<&str>, target: &str| {
            let filter = filter(value.map(OsStr::new)).unwrap();
            let subscriber =
                tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::sink).finish();
            tracing::subscriber::with_default(subscriber, || match target {
                "kiln" => tracing::enabled!(target: "kiln::run", tracing::Level::WARN),
                "data" => tracing::enabled!(target: "kiln_data::owner", tracing::Level::WARN),
                "place" => tracing::enabled!(target: "kiln_launch::place::survey", tracing::Level::WARN),
                _ => tracing::enabled!(target: "burn", tracing::Level::WARN),
            })
        };
        for target in ["kiln", "data", "place"] {
            assert!(shows(None, target) && shows(Some("off,kiln=info"), target), "{target}");
        }
        assert!(shows(None, "burn") && !shows(Some("off,kiln=info"), "burn"));
        assert!(!shows(Some("kiln::data=off"), "data") && shows(Some("warn,kiln::data=off"), "place"));
    }
}
