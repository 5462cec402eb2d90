//! Shortens text of any length to one line of a log.

use unicode_width::UnicodeWidthChar;

use super::printable;

/// Returns `text` on one line of at most `columns` columns, [`printable`]: runs of white space become a
/// space, and an ellipsis replaces the omitted part.
pub fn one_line(text: &str, columns: usize) -> String {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&printable(word));
    }
    let width = |c: char| c.width().unwrap_or(0);
    if line.chars().map(width).sum::<usize>() <= columns {
        return line;
    }
    let mut left = columns.saturating_sub(1);
    let fits = |c: &char| {
        let fits = width(*c) <= left;
        left = left.saturating_sub(width(*c));
        fits
    };
    let mut cut: String = line.chars().take_while(fits).collect();
    cut.truncate(cut.trim_end().len());
    cut.push('…');
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_becomes_a_line_that_fits() {
        assert_eq!(one_line(" a\n\tb  c ", 80), "a b c");
        assert_eq!(one_line("\u{1b}[2J", 80), r"\u001b[2J");
        assert_eq!(one_line("abcdef", 6), "abcdef");
        assert_eq!(one_line("abcdefg", 6), "abcde…");
        assert_eq!(one_line("abcd efg", 6), "abcd…");
        // Two columns each.
        assert_eq!(one_line("漢字漢字", 8), "漢字漢字");
        assert_eq!(one_line("漢字漢字", 7), "漢字漢…");
        assert_eq!(one_line(&"x ".repeat(10_000), 5), "x x…");
        assert_eq!((one_line("", 5), one_line("ab", 0)), (String::new(), "…".to_owned()));
    }
}
