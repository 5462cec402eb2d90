//! Selects log events by the variable `KILN_LOG`, and formats them.

use std::ffi::OsStr;
use std::fmt::{self, Write};
use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::facts::facts;
use super::output;
use super::position::{self, Position};
use super::words::write_now;

pub(super) const VARIABLE: &str = "KILN_LOG";

const DEFAULT: &str = "warn";

const CRATES: [(&str, &str); 7] = [
    ("comm", "kiln_collectives"),
    ("kiln::checkpoint", "kiln_checkpoint"),
    ("kiln::data", "kiln_data"),
    ("kiln::launch", "kiln_launch"),
    ("kiln::lines", "kiln_sys::lines"),
    ("kiln::place", "kiln_launch::place"),
    ("kiln::process", "kiln_sys"),
];

/// The error for an invalid value of `KILN_LOG`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE}={value}: \"{wrong}\" is not a level; use off, error, warn, info, debug or trace, with others \
     for parts of the program as in warn,kiln_collectives=debug, or unset it for {DEFAULT}"
)]
pub struct LogLevelError {
    value: String,
    wrong: String,
}

pub(super) fn filter(value: Option<&OsStr>) -> Result<EnvFilter, LogLevelError> {
    let value = value.map(OsStr::to_string_lossy).unwrap_or_default();
    let value = if value.trim().is_empty() { DEFAULT } else { value.trim() };
    let error = |wrong: &str| LogLevelError { value: value.to_owned(), wrong: wrong.trim().to_owned() };
    // A word that the filter would take for a crate is probably a misspelt level. Spans, in brackets, contain commas.
    if !value.contains('[') {
        // An empty word would be accepted as "error".
        let is_level = |level: &str| !level.trim().is_empty() && level.trim().parse::<LevelFilter>().is_ok();
        let is_wrong = |directive: &&str| !directive.rsplit('=').next().is_some_and(is_level);
        if let Some(wrong) = value.split(',').find(is_wrong) {
            return Err(error(wrong));
        }
    }
    let mut named: Vec<_> = value.split(',').map(of_crate).collect();
    // Levels of some crates do not change the default level of the others.
    if value.split(',').all(|directive| directive.contains('=')) {
        named.insert(0, DEFAULT.to_owned());
    }
    EnvFilter::try_new(named.join(",")).map_err(|_| error(value))
}

fn of_crate(directive: &str) -> String {
    let directive = directive.trim();
    let named = CRATES.iter().find_map(|(part, name)| {
        let rest = directive.strip_prefix(part)?;
        (rest.is_empty() || rest.starts_with(['=', '[', ':'])).then(|| format!("{name}{rest}"))
    });
    named.unwrap_or_else(|| directive.to_owned())
}

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

const QUIET: [&str; 3] = ["INFO", "DEBUG", "TRACE"];

const WORDS: usize = 6;

/// Formats detailed log lines, with `-` for unknown values, such as
/// `2026-11-24T18:03:59.042Z host=node7 rank=1 step=3 phase=backward module=layers.0 DEBUG kiln::run: a step begins`.
pub(super) struct Detailed;

impl<S, N> FormatEvent<S, N> for Detailed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let rank = (facts().rank_of_thread)();
        let position = position::of(rank);
        write_now(&mut writer)?;
        let system = rustix::system::uname();
        write!(writer, " host={}", system.nodename().to_string_lossy())?;
        write_place(&mut writer, position.as_deref(), rank)?;
        write!(writer, " {} {}: ", event.metadata().level(), event.metadata().target())?;
        context.format_fields(writer.by_ref(), event)?;
        writer.write_str("\n")
    }
}

fn write_place(out: &mut dyn Write, position: Option<&Position>, rank: Option<usize>) -> fmt::Result {
    let Some(position) = position else {
        return match rank {
            Some(rank) => write!(out, " rank={rank} step=- phase=- module=-"),
            None => write!(out, " rank={} step=- phase=- module=-", rank_of_process()),
        };
    };
    write!(out, " rank={} step={}", position.rank, position.step())?;
    write!(out, " phase={} module=", position.phase().replace(' ', "_"))?;
    let mut module = String::new();
    position.write_module(&mut module)?;
    out.write_str(if module.is_empty() { "-" } else { &module })
}

/// Returns the rank that the launcher assigned, for lines of threads that work for no rank yet.
fn rank_of_process() -> &'static str {
    static RANK: OnceLock<String> = OnceLock::new();
    RANK.get_or_init(|| {
        let rank = std::env::var("RANK").ok().filter(|rank| rank.parse::<usize>().is_ok());
        rank.unwrap_or_else(|| "-".to_owned())
    })
}

/// Returns whether a line of a rank's standard error is a log line below `warn`.
pub fn is_detail(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    let plain = line.trim_start().split(' ').next();
    let mut words = line.split(' ');
    let is_placed = words.next().is_some_and(|time| time.ends_with('Z') && time.len() == 24)
        && words.next().is_some_and(|host| host.starts_with("host="));
    match is_placed {
        true => words.nth(WORDS - 2).is_some_and(|level| QUIET.contains(&level)),
        false => line.starts_with(' ') && plain == Some(QUIET[0]),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kiln_collectives::{Communicator, FakeCommunicator};

    use super::*;
    use crate::position::RankPosition;

    #[test]
    fn only_levels_are_accepted() {
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
    fn crates_have_two_names() {
        let shown = |value: &str| filter(Some(OsStr::new(value))).expect(value).to_string();
        assert_eq!(shown("warn,kiln::data=debug"), shown("warn,kiln_data=debug"));
        assert_eq!(shown("warn,kiln::checkpoint::saver=off"), shown("warn,kiln_checkpoint::saver=off"));
        assert_eq!(shown("warn,kiln::run=info"), "kiln::run=info,warn");
        assert_eq!(shown("warn,comm=trace"), shown("warn,kiln_collectives=trace"));
        assert_eq!(shown("warn,kiln_shard::comm=trace"), "kiln_shard::comm=trace,warn");
        // Omitted crates keep their level.
        assert_eq!(shown("comm=trace"), shown("warn,comm=trace"));
    }

    /// A filter matches prefixes of names, so `kiln` selects all of its crates.
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

    fn line(level: &str) -> String {
        let mut line = String::new();
        let world = FakeCommunicator::new(70, 71);
        world.recorder().set_activity("data loading");
        let present = RankPosition::new(Path::new("run"), world.view(), Box::new(Vec::new));
        present.begin_step(3);
        write_now(&mut line).unwrap();
        line.push_str(" host=node7");
        write_place(&mut line, position::of(Some(70)).as_deref(), Some(70)).unwrap();
        line + &format!(" {level} kiln::run: a step begins\n")
    }

    #[test]
    fn lines_show_the_position() {
        let line = line("DEBUG");
        let (_, place) = line.split_once(' ').unwrap();
        let expected =
            "host=node7 rank=70 step=3 phase=data_loading module=- DEBUG kiln::run: a step begins\n";
        assert_eq!(place, expected);
        let mut nowhere = String::new();
        write_place(&mut nowhere, None, Some(4)).unwrap();
        assert_eq!(nowhere, " rank=4 step=- phase=- module=-");
    }

    #[test]
    fn details_are_recognised() {
        for level in QUIET {
            assert!(is_detail(line(level).as_bytes()), "{level}");
        }
        assert!(is_detail(b" INFO device: CPU\n"));
        for other in [
            &line("WARN"),
            &line("ERROR"),
            " WARN slow",
            "error: no such file",
            "",
            "INFO of a program",
            "step 3",
        ] {
            assert!(!is_detail(other.as_bytes()), "{other}");
        }
    }
}
