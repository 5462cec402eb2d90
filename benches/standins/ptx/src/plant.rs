//! Bugs that tests plant into kernels: edits of a module's text before it is parsed.

/// An edit of a line. Runs of spaces and tabs are treated alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plant {
    kernel: String,
    which: Which,
    find: String,
    put: String,
}

/// Selects among the lines of each kernel that contain the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    All,
    Last,
    /// Counted from 1.
    Number(usize),
}

/// A line that was edited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planted {
    pub kernel: String,
    pub line: usize,
    pub before: String,
    pub after: String,
}

impl Plant {
    /// Parses four lines: a part of the kernel's name; `all`, `last`, or a number from 1; a part of a line,
    /// in which one `*` may match any text; and its replacement, which may be missing, and which may use the
    /// matched text by another `*`.
    ///
    /// # Errors
    ///
    /// Names the invalid line.
    pub fn parse(text: &str) -> Result<Plant, String> {
        let mut lines = text.lines().map(spaced);
        let mut next = |what: &str| lines.next().filter(|line| !line.is_empty()).ok_or(format!("no {what}"));
        let (kernel, which, find) = (next("kernel")?, next("number")?, next("text to find")?);
        let which = match &which[..] {
            "all" => Which::All,
            "last" => Which::Last,
            number => Which::Number(number.parse().map_err(|_| format!("{number}: all, last or a number"))?),
        };
        Ok(Plant { kernel, which, find, put: lines.next().unwrap_or_default() })
    }

    /// Returns the text of a module with the bug applied, with the same number of lines, and the places of the bug.
    pub fn apply(&self, text: &str) -> (String, Vec<Planted>) {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let mut planted = Vec::new();
        for (kernel, places) in self.places(text) {
            let chosen = match self.which {
                Which::All => places,
                Which::Last => places.last().copied().into_iter().collect(),
                Which::Number(number) => places.get(number.wrapping_sub(1)).copied().into_iter().collect(),
            };
            for at in chosen {
                let before = spaced(&lines[at]);
                let after = self.edited(&before).unwrap_or_default();
                lines[at].clone_from(&after);
                planted.push(Planted { kernel: kernel.clone(), line: at + 1, before, after });
            }
        }
        (lines.join("\n") + "\n", planted)
    }

    /// Returns `line` with the edit if it contains the text.
    fn edited(&self, line: &str) -> Option<String> {
        let (first, last) = self.find.split_once('*').unwrap_or((&self.find, ""));
        let (before, rest) = line.split_once(first)?;
        let (any, after) = if last.is_empty() { ("", rest) } else { rest.split_once(last)? };
        Some(format!("{before}{}{after}", self.put.replacen('*', any, 1)))
    }

    /// Returns the lines that contain the text, in each matching kernel.
    fn places(&self, text: &str) -> Vec<(String, Vec<usize>)> {
        let mut kernels: Vec<(String, Vec<usize>)> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if let Some((_, rest)) = line.split_once(".entry ") {
                let name = rest.split('(').next().unwrap_or_default().trim();
                kernels.push((name.to_owned(), Vec::new()));
            } else if let Some((_, places)) = kernels.last_mut()
                && self.edited(&spaced(line)).is_some()
            {
                places.push(at);
            }
        }
        kernels.retain(|(name, _)| name.contains(&self.kernel));
        kernels
    }
}

/// Replaces each run of spaces and tabs in a line by one space.
fn spaced(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = ".visible .entry one(\n\t.param .u64 p\n)\n{\n\tbar.sync \t0;\n\tbar.sync \t0;\n}\n.visible .entry two()\n{\n\tbar.sync \t0;\n}\n";

    fn lines(plant: &str) -> Vec<(usize, String)> {
        let (text, planted) = Plant::parse(plant).expect("a plant").apply(TEXT);
        let text: Vec<&str> = text.lines().collect();
        assert_eq!(text.len(), TEXT.lines().count());
        planted.iter().for_each(|planted| assert_eq!(text[planted.line - 1], planted.after));
        planted.into_iter().map(|planted| (planted.line, planted.after)).collect()
    }

    #[test]
    fn an_edit_is_of_the_lines_that_it_names() {
        assert_eq!(lines("one\n2\nbar.sync 0;"), [(6, String::new())]);
        assert_eq!(lines("one\nlast\nsync 0\nsync 1"), [(6, "bar.sync 1;".to_owned())]);
        assert_eq!(lines("one\n1\nbar*0;\n@%p0 bar*1;"), [(5, "@%p0 bar.sync 1;".to_owned())]);
        assert_eq!(lines("one\nall\nbar.sync 0;").len(), 2);
        assert_eq!(lines("o\n1\nbar.sync 0;").len(), 2);
        assert!(lines("one\n3\nbar.sync 0;").is_empty() && lines("three\n1\nbar").is_empty());
    }

    #[test]
    fn an_edit_that_cannot_be_read_says_why() {
        assert_eq!(Plant::parse("one\nsecond\nbar"), Err("second: all, last or a number".to_owned()));
        assert_eq!(Plant::parse("one\n1\n"), Err("no text to find".to_owned()));
    }
}
