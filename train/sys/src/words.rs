use std::fmt::{self, Display, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Formats a count, as in `1 rank` or `2 ranks`, for nouns whose plural ends in s.
pub fn number_of<N: Display + From<u8> + PartialEq>(count: N, noun: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Formats a number of bytes, as in `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    let units = [(1u64 << 50, "PiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None if bytes == 1 => "1 byte".to_owned(),
        None => format!("{bytes} bytes"),
    }
}

/// Formats floating-point operations per second, as in `12.3 GFLOP/s`.
pub fn flops_per_s(flops: f64) -> String {
    let units = [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")];
    match units.into_iter().find(|(unit, _)| flops >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", flops / unit),
        None => format!("{:.1} MFLOP/s", flops / 1e6),
    }
}

/// Formats a duration, as in `0.25 s`, `12.4 s`, `2 min 05 s` or `3 h 20 min`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{:.2} s", time.as_secs_f64()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Formats the time `seconds` after 1970 in UTC, as in `2026-11-24T18:03:59.000Z`.
pub fn time_at(seconds: u64) -> String {
    let mut text = String::new();
    let _ = write_time(&mut text, seconds, 0);
    text
}

/// Formats the current time in UTC, as in `2026-11-24T18:03:59.042Z`.
pub fn time_now() -> String {
    let mut text = String::new();
    let _ = write_now(&mut text);
    text
}

/// Formats ascending numbers, as in `1-3, 7`.
pub fn in_ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        single => single.iter().map(usize::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

const DAY: u64 = 24 * 60 * 60;

pub(super) fn write_now(out: &mut (impl Write + ?Sized)) -> fmt::Result {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    write_time(out, now.as_secs(), now.subsec_millis())
}

fn write_time(out: &mut (impl Write + ?Sized), seconds: u64, millis: u32) -> fmt::Result {
    let (year, month, day) = date(seconds / DAY);
    let second = seconds % DAY;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Returns year, month and day, `days` after 1970-01-01. Source: `civil_from_days` in Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms". Years begin in March, so a leap day ends its year.
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
    fn only_one_is_singular() {
        let ranks = |count: usize| number_of(count, "rank");
        assert_eq!([ranks(0), ranks(1), ranks(2)], ["0 ranks", "1 rank", "2 ranks"]);
    }

    #[test]
    fn durations_have_few_digits() {
        let text = [0, 254, 12_440, 125_000, 12_000_000].map(|ms| duration(Duration::from_millis(ms)));
        assert_eq!(text, ["0.00 s", "0.25 s", "12.4 s", "2 min 05 s", "3 h 20 min"]);
    }

    #[test]
    fn speeds_have_suitable_units() {
        let text = [0.0, 2.5e7, 12.34e9, 1.5e12, 2e15].map(flops_per_s);
        assert_eq!(text, ["0.0 MFLOP/s", "25.0 MFLOP/s", "12.3 GFLOP/s", "1.5 TFLOP/s", "2.0 PFLOP/s"]);
    }

    #[test]
    fn neighbours_become_ranges() {
        assert_eq!(in_ranges(&[1, 2, 3, 7, 9, 10]), "1-3, 7, 9-10");
        assert_eq!(in_ranges(&[5]), "5");
    }

    #[test]
    fn dates_match_the_calendar() {
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
