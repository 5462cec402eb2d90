//! Wording of messages that depends on a number.

use std::fmt::Display;
use std::time::Duration;

use super::clock;

/// Formats a count, as in `1 rank` or `2 ranks`, for nouns whose plural ends in s.
pub fn number_of<N: Display + From<u8> + PartialEq>(count: N, noun: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Formats a number of bytes for people.
pub fn size(bytes: u64) -> String {
    let units = [(1u64 << 50, "PiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None if bytes == 1 => "1 byte".to_owned(),
        None => format!("{bytes} bytes"),
    }
}

/// Formats floating-point operations per second for people, as in `12.3 GFLOP/s`.
pub fn flops_per_s(flops: f64) -> String {
    let units = [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")];
    match units.into_iter().find(|(unit, _)| flops >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", flops / unit),
        None => format!("{:.1} MFLOP/s", flops / 1e6),
    }
}

/// Formats a duration for people, as in `0.25 s`, `12.4 s`, `2 min 05 s` or `3 h 20 min`.
pub fn took(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{:.2} s", time.as_secs_f64()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// Formats the time `seconds` after 1970, in UTC, as in `2026-11-24T18:03:59.000Z`.
pub fn time_at(seconds: u64) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = clock::write_time(&mut text, seconds, 0);
    text
}

/// Formats the current time, in UTC, as in `2026-11-24T18:03:59.042Z`.
pub fn time_now() -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = clock::write_now(&mut text);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let ranks = |count: usize| number_of(count, "rank");
        assert_eq!([ranks(0), ranks(1), ranks(2)], ["0 ranks", "1 rank", "2 ranks"]);
    }

    #[test]
    fn times_have_the_digits_that_matter() {
        let told = [0, 254, 12_440, 125_000, 12_000_000].map(|ms| took(Duration::from_millis(ms)));
        assert_eq!(told, ["0.00 s", "0.25 s", "12.4 s", "2 min 05 s", "3 h 20 min"]);
    }

    #[test]
    fn speeds_have_the_unit_that_suits_them() {
        let told = [0.0, 2.5e7, 12.34e9, 1.5e12, 2e15].map(flops_per_s);
        assert_eq!(told, ["0.0 MFLOP/s", "25.0 MFLOP/s", "12.3 GFLOP/s", "1.5 TFLOP/s", "2.0 PFLOP/s"]);
    }

    #[test]
    fn neighbours_are_told_as_ranges() {
        assert_eq!(in_ranges(&[1, 2, 3, 7, 9, 10]), "1-3, 7, 9-10");
        assert_eq!(in_ranges(&[5]), "5");
    }
}
