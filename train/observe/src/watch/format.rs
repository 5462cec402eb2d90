//! Formats titles, paragraphs and numbers for the screen.

use std::path::Path;
use std::time::Duration;

use kiln_sys::output::printable;
use kiln_sys::words;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Widget};

use super::theme::Theme;

/// Escapes control characters, and replaces tabs with spaces.
pub(super) fn clean(text: &str) -> String {
    printable(text).replace('\t', " ")
}

pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

pub(super) fn fit(text: &str, most: usize) -> String {
    if width(text) <= most {
        return text.to_owned();
    }
    let end = text.char_indices().map(|(at, _)| at).take_while(|at| width(&text[..*at]) < most).last();
    let ellipsis = if most > 0 { "…" } else { "" };
    format!("{}{ellipsis}", &text[..end.unwrap_or(0)])
}

/// Wraps `text` to at most `most` columns, between words if possible.
pub(super) fn wrap(text: &str, most: usize) -> Vec<String> {
    let most = most.max(1);
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        for word in paragraph.split_inclusive(' ') {
            if !line.is_empty() && width(&line) + width(word.trim_end()) > most {
                lines.push(std::mem::take(&mut line).trim_end().to_owned());
            }
            if width(word.trim_end()) <= most {
                line.push_str(word);
                continue;
            }
            for c in word.chars() {
                if width(&line) + width(c.encode_utf8(&mut [0; 4])) > most {
                    lines.push(std::mem::take(&mut line));
                }
                line.push(c);
            }
        }
        lines.push(line.trim_end().to_owned());
    }
    lines
}

/// Draws a rule with a title across the top of `area`, and returns the rest.
pub(super) fn titled<'a>(title: impl Into<Line<'a>>, area: Rect, screen: &mut Buffer) -> Rect {
    let mut line = Line::from(Span::styled("─ ", Theme::QUIET));
    line.spans.extend(title.into().spans);
    line.push_span(" ");
    let block = Block::new().borders(Borders::TOP).border_style(Theme::QUIET).title(line);
    (&block).render(area, screen);
    block.inner(area)
}

pub(super) fn plain_title(text: impl Into<String>) -> Span<'static> {
    Span::styled(text.into(), Theme::TITLE)
}

pub(super) fn nothing(why: &str, area: Rect, screen: &mut Buffer) {
    paragraph(why, area.width).style(Theme::QUIET).render(area, screen);
}

pub(super) fn paragraph(text: &str, columns: u16) -> Paragraph<'static> {
    let lines = wrap(text, usize::from(columns).saturating_sub(2)).into_iter();
    Paragraph::new(lines.map(|line| Line::raw(format!(" {line}"))).collect::<Vec<_>>())
}

pub(super) fn name_of(folder: &Path) -> String {
    clean(&folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy())
}

pub(super) fn value(key: &str, value: f64) -> String {
    match key {
        _ if !value.is_finite() => value.to_string(),
        "mfu" => format!("{:.1} %", 100.0 * value),
        "tokens_per_s" => format!("{} tok/s", short(value)),
        _ if key.ends_with("_bytes") => bytes(value as u64),
        _ if key.ends_with("_s") => format!("{} s", number(value)),
        _ => number(value),
    }
}

pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".to_owned(),
        _ if !size.is_finite() => value.to_string(),
        _ if !(0.01..1e15).contains(&size) => format!("{value:.2e}"),
        _ if size >= 1e4 => short(value),
        _ if size >= 1000.0 => format!("{value:.0}"),
        _ if size >= 100.0 => format!("{value:.1}"),
        _ if size >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// Formats a large number with a suffix, such as `45.7k`.
pub(super) fn short(value: f64) -> String {
    let scaled = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];
    let (unit, letter) = scaled.into_iter().find(|(unit, _)| value.abs() >= *unit).unwrap_or((1.0, ""));
    let value = value / unit;
    let text = if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{}{letter}", text.strip_suffix(".0").unwrap_or(&text))
}

/// Formats bytes in five columns, such as `8.3M` for 8.3 MiB.
pub(super) fn bytes(bytes: u64) -> String {
    let units = [(1u64 << 50, "P"), (1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    let Some((unit, letter)) = units.into_iter().find(|(unit, _)| bytes >= *unit) else {
        return format!("{bytes}B");
    };
    let value = bytes as f64 / unit as f64;
    if value >= 99.95 { format!("{value:.0}{letter}") } else { format!("{value:.1}{letter}") }
}

/// Formats seconds, as in `2 h 05 min`. Negative numbers and NaN are 0.
pub(super) fn duration(seconds: f64) -> String {
    words::duration(Duration::from_secs(seconds.round() as u64)).replace(".00 s", " s").replace(".0 s", " s")
}

/// Formats seconds since 1970 as time of day (UTC), such as `07:16:32`.
pub(super) fn time_of_day(seconds: f64) -> String {
    let whole = seconds as u64 % 86_400;
    format!("{:02}:{:02}:{:02}", whole / 3600, whole % 3600 / 60, whole % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_fits_its_columns() {
        assert_eq!(fit("four", 4), "four");
        assert_eq!(
            (fit("fiver", 4), fit("中文字", 4), fit("x", 0)),
            ("fiv…".into(), "中…".into(), String::new())
        );
        assert_eq!(wrap("one two  three", 8), ["one two", "three"]);
        assert_eq!(wrap("abcdefgh\n\ni", 3), ["abc", "def", "gh", "", "i"]);
        assert_eq!(wrap("  indented", 20), ["  indented"]);
        assert_eq!(wrap("a 中文字", 4), ["a", "中文", "字"]);
        assert_eq!(clean("a\tb\u{1b}[2J"), r"a b\u001b[2J");
    }

    #[test]
    fn numbers_are_short_with_units() {
        let numbers = [0.0, 3.2101, 0.5, 0.0003, 12.345, 123.45, 1234.5, 45_683.0, -2.5e9, f64::NAN];
        let texts = numbers.map(number);
        assert_eq!(
            texts,
            ["0", "3.2101", "0.5000", "3.00e-4", "12.35", "123.5", "1234", "45.7k", "-2.5G", "NaN"]
        );
        assert_eq!([999.0, 1000.0, 100_000.0, 0.25].map(short), ["999", "1k", "100k", "0.2"]);
        assert_eq!([7, 1536, 8_682_600, 107_374_182_400].map(bytes), ["7B", "1.5K", "8.3M", "100G"]);
        assert_eq!(
            [0.4, 24.3, 59.6, 3599.0, 7500.0, -1.0, f64::NAN].map(duration),
            ["0 s", "24 s", "1 min 00 s", "59 min 59 s", "2 h 05 min", "0 s", "0 s"]
        );
        assert_eq!(value("mfu", 0.0281), "2.8 %");
        assert_eq!(value("wait_s", 0.25), "0.2500 s");
        assert_eq!(
            (value("peak_bytes", 8_682_600.0), value("loss", f64::NAN)),
            ("8.3M".into(), "NaN".into())
        );
        assert_eq!(time_of_day(1_795_591_592.6), "07:26:32");
    }
}
