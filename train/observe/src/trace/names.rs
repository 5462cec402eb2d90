//! Names in a trace file that both the writer and the reader know.

/// Categories of slices.
pub(super) mod category {
    pub(in super::super) const STEP: &str = "step";
    pub(in super::super) const PHASE: &str = "phase";
    pub(in super::super) const UNIT: &str = "unit";
    pub(in super::super) const WAIT: &str = "wait";
    pub(in super::super) const COLLECTIVE: &str = "collective";
    pub(in super::super) const GPU: &str = "gpu";
}

/// Annotations of slices. Times are in microseconds, as Perfetto's UI shows them.
pub(super) mod note {
    pub(in super::super) const STEP: &str = "step";
    pub(in super::super) const NODE: &str = "machine";
    pub(in super::super) const CLOCK_ERROR: &str = "clock_error_us";
    /// Prefix of the names of the recorder's sums.
    pub(in super::super) const RECORDER: &str = "recorder.";
    pub(in super::super) const GROUP: &str = "group";
    pub(in super::super) const RANKS: &str = "ranks";
    pub(in super::super) const SEQUENCE: &str = "sequence";
    pub(in super::super) const ACTIVITY: &str = "activity";
    pub(in super::super) const UNIT: &str = "unit";
    pub(in super::super) const CAME_LAST: &str = "came_last";
    pub(in super::super) const LATE: &str = "late_us";
    pub(in super::super) const OPERATION: &str = "operation";
    pub(in super::super) const SCOPE: &str = "scope";
    pub(in super::super) const PHASE: &str = "phase";
    pub(in super::super) const DTYPE: &str = "dtype";
    pub(in super::super) const BYTES: &str = "bytes";
    pub(in super::super) const BYTES_SENT: &str = "bytes_sent";
    pub(in super::super) const BANDWIDTH: &str = "bandwidth_gb_s";
    pub(in super::super) const QUEUED: &str = "queued_us";
    pub(in super::super) const STREAM: &str = "stream";
    pub(in super::super) const UNFINISHED: &str = "unfinished";
}

/// Returns the name of a rank's process, as in `rank 3 (node7)`.
pub(super) fn process(rank: usize, node: &str) -> String {
    format!("rank {rank} ({node})")
}

/// Parses the rank and the machine from the name of a process.
pub(super) fn rank_of(process: &str) -> Option<(usize, &str)> {
    let (rank, node) = process.strip_prefix("rank ")?.split_once(" (")?;
    Some((rank.parse().ok()?, node.strip_suffix(')')?))
}

/// Formats ranks compactly, as in `0-3,8`.
pub(super) fn ranks(ranks: &[usize]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    while let [first, ..] = rest {
        let run = rest.iter().zip(*first..).take_while(|(rank, expected)| *rank == expected).count();
        let comma = if text.is_empty() { "" } else { "," };
        text += &match run {
            1 => format!("{comma}{first}"),
            _ => format!("{comma}{first}-{}", first + run - 1),
        };
        rest = &rest[run..];
    }
    text
}

/// Maximum number of ranks in a group of a trace.
const MOST_RANKS: usize = 1 << 20;

/// Parses ranks written by [`ranks`].
pub(super) fn parse_ranks(text: &str) -> Option<Vec<usize>> {
    let mut ranks = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last.checked_sub(first)? >= MOST_RANKS - ranks.len() {
            return None;
        }
        ranks.extend(first..=last);
    }
    Some(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        assert_eq!(rank_of(&process(3, "a (b)")), Some((3, "a (b)")));
        assert_eq!(rank_of("chrome"), None);
        for (list, text) in [(vec![], ""), (vec![0], "0"), (vec![0, 1, 2, 5, 7, 8], "0-2,5,7-8")] {
            assert_eq!(ranks(&list), text);
            assert_eq!(parse_ranks(text), Some(list));
        }
        assert_eq!(parse_ranks("0-99999999999"), None);
        assert_eq!(parse_ranks("3-1"), None);
        assert_eq!(parse_ranks("x"), None);
    }
}
