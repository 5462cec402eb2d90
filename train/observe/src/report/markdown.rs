//! A report as Markdown (CommonMark with the tables of GitHub), with its plots as files beside it.

use std::fmt::Write as _;

use super::document::{Block, Cell, Document, Figure, Table};
use super::text::visible;

/// The page. Figures are the files that [`file_of`] names.
pub(super) fn page(document: &Document) -> String {
    let mut text = format!("# {}\n\n", inline(&document.title));
    add(&document.blocks, &mut text, &mut Count::default());
    let end = text.trim_end().len();
    text.truncate(end);
    text.push('\n');
    text
}

/// The file of a figure.
pub(super) fn file_of(figure: &Figure) -> String {
    format!("{}.svg", figure.id)
}

#[derive(Default)]
struct Count {
    sections: usize,
    figures: usize,
    tables: usize,
}

/// Adds blocks to `text`. Writing into a String cannot fail.
fn add(blocks: &[Block], text: &mut String, count: &mut Count) {
    for block in blocks {
        match block {
            Block::Section(title) => {
                count.sections += 1;
                let _ = writeln!(text, "## {}. {}\n", count.sections, inline(title));
            }
            Block::Text(paragraph) => {
                let _ = writeln!(text, "{}\n", inline(paragraph));
            }
            Block::List(items) => {
                items.iter().for_each(|item| _ = writeln!(text, "- {}", inline(item)));
                text.push('\n');
            }
            Block::Lines(lines) => {
                let fence = "`".repeat(longest_run(lines).max(2) + 1);
                let _ = writeln!(text, "{fence}text\n{}\n{fence}\n", visible(lines).trim_end_matches('\n'));
            }
            Block::Table(one) => {
                count.tables += 1;
                table(one, count.tables, text);
            }
            Block::Figure(figure) => {
                count.figures += 1;
                let _ = writeln!(
                    text,
                    "![{}]({})\n\n**Figure {}.** {}\n",
                    inline(figure.plot.description()),
                    file_of(figure),
                    count.figures,
                    inline(&figure.caption)
                );
            }
            Block::Folded(summary, inner) => {
                let _ = writeln!(text, "<details><summary>{}</summary>\n", inline(summary));
                add(inner, text, count);
                text.push_str("</details>\n\n");
            }
        }
    }
}

fn table(table: &Table, number: usize, text: &mut String) {
    let _ = writeln!(text, "**Table {number}.** {}\n", inline(&table.caption));
    let is_number =
        |column: usize| table.rows.iter().any(|row| matches!(row.get(column), Some(Cell::Number(_))));
    let head: Vec<_> = table.head.iter().map(|name| inline(name)).collect();
    let rule: Vec<_> = (0..head.len()).map(|column| if is_number(column) { "--:" } else { ":--" }).collect();
    let _ = writeln!(text, "| {} |\n| {} |", head.join(" | "), rule.join(" | "));
    for row in &table.rows {
        let row: Vec<_> = row.iter().map(cell).collect();
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text.push('\n');
}

fn cell(cell: &Cell) -> String {
    match cell {
        Cell::Text(text) | Cell::Number(text) => inline(text),
        Cell::Code(text) => code(text),
    }
}

/// Text that Markdown shows as it is, on one line.
fn inline(text: &str) -> String {
    let mut safe = String::with_capacity(text.len() + 8);
    let line = visible(text).replace(['\n', '\t'], " ");
    let line = line.trim();
    for (index, c) in line.char_indices() {
        match c {
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '&' => safe.push_str("&amp;"),
            '\\' | '`' | '*' | '[' | ']' | '|' | '~' | '$' => safe.extend(['\\', c]),
            // Within a word it is no mark.
            '_' if !is_within_word(line, index) => safe.push_str("\\_"),
            // What readers make links of.
            ':' if line[index..].starts_with("://") => safe.push_str("&#58;"),
            '@' => safe.push_str("&#64;"),
            '.' if line[..index].to_ascii_lowercase().ends_with("www") => safe.push_str("&#46;"),
            '!' if line[index..].starts_with("![") => safe.push_str("\\!"),
            c => safe.push(c),
        }
    }
    // What makes a heading, a list, a rule or a quote at the start of a line.
    let digits = safe.bytes().take_while(u8::is_ascii_digit).count();
    let is_followed = safe[digits..].chars().nth(1).is_none_or(|next| " #+-=".contains(next));
    match safe.as_bytes().get(digits) {
        Some(b'.' | b')') if digits > 0 && is_followed => safe.insert(digits, '\\'),
        Some(b'#' | b'+' | b'-' | b'=') if digits == 0 && is_followed => safe.insert(0, '\\'),
        _ => {}
    }
    safe
}

fn is_within_word(line: &str, index: usize) -> bool {
    let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    is_word(line[..index].chars().next_back()) && is_word(line[index + 1..].chars().next())
}

/// Text as code, in a cell of a table.
fn code(text: &str) -> String {
    let line = visible(text).replace(['\n', '\t'], " ");
    if line.trim().is_empty() {
        return String::new();
    }
    // A backslash before a bar is the bar's in a table, so those that are there already cannot be shown in code.
    if line.contains("\\|") || line.ends_with('\\') {
        return inline(&line);
    }
    let fence = "`".repeat(longest_run(&line) + 1);
    let space = if line.starts_with('`') || line.ends_with('`') { " " } else { "" };
    format!("{fence}{space}{}{space}{fence}", line.replace('|', "\\|"))
}

/// The most backticks that follow each other.
fn longest_run(text: &str) -> usize {
    text.split(|c| c != '`').map(str::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use pulldown_cmark::{Event, Options, Parser, Tag};

    use super::*;

    const HOSTILE: [&str; 14] = [
        "a_b *c* _d_ **e** `f` ~g~ ~~h~~",
        "<script>alert(1)</script> &lt; &amp;",
        "[x](http://evil.example/) ![y](z) <http://evil.example>",
        "http://evil.example/ www.evil.example me@evil.example",
        "a | b \\| c \\",
        "# heading",
        "1. one",
        "- item",
        "+ item",
        "=====",
        "> quote",
        "$x$ a$b",
        "```",
        "C:\\temp\\_x_",
    ];

    fn events(text: &str) -> Vec<Event<'_>> {
        Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH).collect()
    }

    fn text_of(events: &[Event<'_>]) -> String {
        let text = events.iter().filter_map(|event| match event {
            Event::Text(text) | Event::Code(text) => Some(text.as_ref()),
            _ => None,
        });
        text.collect()
    }

    fn is_obeyed(event: &Event<'_>) -> bool {
        match event {
            Event::Start(tag) => !matches!(
                tag,
                Tag::Paragraph | Tag::Table(_) | Tag::TableHead | Tag::TableRow | Tag::TableCell
            ),
            Event::Html(_) | Event::InlineHtml(_) | Event::Rule => true,
            _ => false,
        }
    }

    #[test]
    fn nothing_in_a_text_is_obeyed() {
        for text in HOSTILE {
            let written = inline(text);
            let read = events(&written);
            assert!(!read.iter().any(is_obeyed), "{text:?} {written:?} {read:?}");
            assert_eq!(text_of(&read), text, "{written:?}");
        }
        assert_eq!(inline("optim.lr and d_model"), "optim.lr and d_model");
        assert_eq!(inline("\u{1b}[31m\u{202e}"), "\\\\u001b\\[31m\\\\u202e");
    }

    #[test]
    fn a_cell_shows_its_text() {
        for text in HOSTILE {
            for cell in [Cell::Text(text.to_owned()), Cell::Code(text.to_owned())] {
                let mut written = String::new();
                let head = vec!["a".to_owned(), "b".to_owned()];
                let rows = vec![vec![cell, Cell::Number("1".to_owned())]];
                table(&Table { caption: "c".to_owned(), head, rows }, 1, &mut written);
                let read = events(&written);
                let at = read.iter().position(|event| matches!(event, Event::Start(Tag::TableRow))).unwrap();
                assert_eq!(text_of(&read[at..]), format!("{text}1"), "{written}");
            }
        }
    }

    #[test]
    fn lines_end_where_they_end() {
        let lines = "a\n```\n<b>\n````\n";
        let document = Document { title: "t".to_owned(), blocks: vec![Block::Lines(lines.to_owned())] };
        let written = page(&document);
        assert!(written.contains("`````text\na\n```\n<b>\n````\n`````\n"), "{written}");
    }
}
