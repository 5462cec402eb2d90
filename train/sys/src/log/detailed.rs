//! Lines of a detailed log: each begins with the time, the machine, and the position of its rank.

use std::fmt::{self, Write};
use std::sync::OnceLock;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::clock;
use crate::facts;
use crate::position::{self, Position};

/// Levels, as they appear in lines, that a terminal showing the progress of a job can omit.
const QUIET: [&str; 3] = ["INFO", "DEBUG", "TRACE"];

/// Number of words before the level: time, machine, rank, step, phase, unit.
const WORDS: usize = 6;

/// Writes lines such as
/// `2026-11-24T18:03:59.042Z host=node7 rank=1 step=3 phase=backward unit=layers.0 DEBUG kiln::run: a step begins`;
/// unknown values are `-`.
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
        let rank = facts::rank_of_thread();
        let position = position::of(rank);
        clock::write_now(&mut writer)?;
        write!(writer, " host={}", facts::host())?;
        write_place(&mut writer, position.as_deref(), rank)?;
        write!(writer, " {} {}: ", event.metadata().level(), event.metadata().target())?;
        context.format_fields(writer.by_ref(), event)?;
        writer.write_str("\n")
    }
}

fn write_place(out: &mut dyn Write, position: Option<&Position>, rank: Option<usize>) -> fmt::Result {
    let Some(position) = position else {
        return match rank {
            Some(rank) => write!(out, " rank={rank} step=- phase=- unit=-"),
            None => write!(out, " rank={} step=- phase=- unit=-", rank_of_process()),
        };
    };
    write!(out, " rank={} step={}", position.rank, position.step())?;
    // Each value must be one word.
    write!(out, " phase={} unit=", position.phase().replace(' ', "_"))?;
    let mut unit = String::new();
    position.write_unit(&mut unit)?;
    out.write_str(if unit.is_empty() { "-" } else { &unit })
}

/// Returns the rank that a launcher has given to this process, before a thread works for it.
fn rank_of_process() -> &'static str {
    static RANK: OnceLock<String> = OnceLock::new();
    RANK.get_or_init(|| {
        let rank = std::env::var("RANK").ok().filter(|rank| rank.parse::<usize>().is_ok());
        rank.unwrap_or_else(|| "-".to_owned())
    })
}

/// Returns true if a line of a rank's standard error is a log line below `warn`.
pub fn is_detail(line: &[u8]) -> bool {
    let line = String::from_utf8_lossy(line);
    // The format of lines without a position.
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
    use crate::position::Present;

    fn line(level: &str) -> String {
        let mut line = String::new();
        let world = FakeCommunicator::new(70, 71);
        world.recorder().set_activity("data loading");
        let present = Present::new(Path::new("run"), world.view(), Box::new(Vec::new));
        present.begin_step(3);
        clock::write_now(&mut line).unwrap();
        line.push_str(" host=node7");
        write_place(&mut line, position::of(Some(70)).as_deref(), Some(70)).unwrap();
        line + &format!(" {level} kiln::run: a step begins\n")
    }

    #[test]
    fn lines_say_where_their_rank_is() {
        let line = line("DEBUG");
        let (_, place) = line.split_once(' ').unwrap();
        let expected = "host=node7 rank=70 step=3 phase=data_loading unit=- DEBUG kiln::run: a step begins\n";
        assert_eq!(place, expected);
        let mut nowhere = String::new();
        write_place(&mut nowhere, None, Some(4)).unwrap();
        assert_eq!(nowhere, " rank=4 step=- phase=- unit=-");
    }

    #[test]
    fn details_are_told_from_all_else() {
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
