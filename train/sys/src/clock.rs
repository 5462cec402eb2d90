//! Human-readable times in UTC, without allocation, for signal handlers.

use std::fmt::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

const DAY: u64 = 24 * 60 * 60;

/// Writes the current time, such as `2026-11-24T18:03:59.042Z`.
pub(super) fn write_now(out: &mut (impl Write + ?Sized)) -> fmt::Result {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    write_time(out, now.as_secs(), now.subsec_millis())
}

pub(super) fn write_time(out: &mut (impl Write + ?Sized), seconds: u64, millis: u32) -> fmt::Result {
    let (year, month, day) = date(seconds / DAY);
    let second = seconds % DAY;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Returns the year, month and day of the Gregorian calendar, `days` days after 1970-01-01. Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`: years begin in March, so that a leap day
/// is the last one.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_date() {
        // As printed by `date -u -d @SECONDS`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_703_980_800, "2023-12-31T00:00:00.007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.007Z"),
            (1_764_037_133, "2025-11-25T02:18:53.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            let mut text = String::new();
            write_time(&mut text, seconds, 7).unwrap();
            assert_eq!(text, expected);
        }
    }
}
