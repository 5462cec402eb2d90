//! `kiln explain`: the catalogue of errors. The program contains `docs/errors.md`, which has the pages.

mod page;

use clap::Args;

use crate::error::CommandError;
use page::{Page, page_of};

/// The catalogue. The file is a link to `docs/errors.md`, so that the packaged crate includes it.
const DOCUMENT: &str = include_str!("errors.md");

const PARTS: [&str; 3] = ["Cause", "Check", "Fix"];

const WIDTH: usize = 80;

/// Arguments of `kiln explain`.
#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// Name of the error, as printed below its message [default: list all names].
    #[arg(hide_possible_values = true)]
    name: Option<Page>,
}

impl ExplainArgs {
    pub(crate) fn run(self) -> String {
        let Some(page) = self.name else { return list() };
        let name = page.name();
        sections().find(|section| section.name == name).map_or_else(String::new, |section| section.show())
    }
}

/// Returns the line to print below the message of `error`, if there is a page about it.
pub(crate) fn more(error: &CommandError) -> Option<String> {
    page_of(error).map(|page| format!("more: kiln explain {}", page.name()))
}

struct Section {
    name: &'static str,
    summary: &'static str,
    /// Cause, check and fix.
    body: &'static str,
}

fn sections() -> impl Iterator<Item = Section> {
    DOCUMENT.split("\n## ").skip(1).map(|section| {
        let (name, rest) = section.split_once("\n\n").unwrap_or((section, ""));
        let (summary, body) = rest.split_once("\n\n").unwrap_or((rest, ""));
        Section { name, summary, body }
    })
}

fn list() -> String {
    let width = sections().map(|section| section.name.len()).max().unwrap_or_default();
    let rows: Vec<_> =
        sections().map(|Section { name, summary, .. }| format!("{name:width$}  {summary}")).collect();
    rows.join("\n")
}

impl Section {
    fn show(&self) -> String {
        let mut paragraphs = vec![wrapped(&format!("{}: {}", self.name, self.summary))];
        paragraphs.extend(self.body.trim_end().split("\n\n").map(|paragraph| {
            // Commands are shown unchanged.
            if paragraph.starts_with("    ") { paragraph.to_owned() } else { wrapped(&plain(paragraph)) }
        }));
        paragraphs.join("\n\n")
    }
}

/// Returns a paragraph without Markdown markup. A link becomes its label.
fn plain(paragraph: &str) -> String {
    let mut text = paragraph.replace('\n', " ");
    for part in PARTS {
        text = text.replace(&format!("**{part}.**"), &format!("{part}:"));
    }
    while let Some((start, (label, (_, end)))) = text
        .split_once('[')
        .and_then(|(start, rest)| Some((start, rest.split_once("](")?)))
        .and_then(|(start, (label, rest))| Some((start, (label, rest.split_once(')')?))))
    {
        text = format!("{start}{label}{end}");
    }
    text
}

fn wrapped(paragraph: &str) -> String {
    let mut lines = vec![String::new()];
    for word in paragraph.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::ValueEnum as _;

    use super::*;

    /// Returns the `kiln` commands in the document: whether the command has a line of its own, and its words.
    pub(crate) fn commands() -> Vec<(bool, Vec<&'static str>)> {
        let of_kiln = |is_line| {
            move |text: &'static str| {
                let words: Vec<_> = text.split_whitespace().collect();
                let at = words.iter().position(|word| !word.contains('='))?;
                (words[at] == "kiln").then(|| (is_line, words[at..].to_vec()))
            }
        };
        let lines = DOCUMENT.lines().filter_map(|line| line.strip_prefix("    ")).filter_map(of_kiln(true));
        let prose = DOCUMENT.split("\n\n").filter(|paragraph| !paragraph.starts_with("    "));
        let quoted = prose.flat_map(|paragraph| paragraph.split('`').skip(1).step_by(2));
        lines.chain(quoted.filter_map(of_kiln(false))).collect()
    }

    #[test]
    fn every_page_belongs_to_an_error() {
        let classes: Vec<_> = Page::value_variants().iter().map(|page| page.name()).collect();
        let pages: Vec<_> = sections().map(|section| section.name).collect();
        assert_eq!(classes, pages);
        let source = include_str!("page.rs");
        let is_used = |page: &&Page| {
            let name = format!("Page::{page:?}");
            source
                .match_indices(&name)
                .any(|(at, _)| !source[at + name.len()..].starts_with(char::is_alphabetic))
        };
        let unused: Vec<_> = Page::value_variants().iter().filter(|page| !is_used(page)).collect();
        assert!(unused.is_empty(), "{unused:?}");
    }

    #[test]
    fn pages_have_a_summary_and_three_parts() {
        for Section { name, summary, body } in sections() {
            assert!(summary.ends_with('.') && !summary.contains('\n'), "{name}: {summary}");
            assert!(name.len() + summary.len() < 110, "{name}: {summary}");
            let parts: Vec<_> = body.split("**").skip(1).step_by(2).collect();
            assert_eq!(parts, PARTS.map(|part| format!("{part}.")), "{name}");
            assert!(body.starts_with("**Cause.** "), "{name}");
        }
    }

    #[test]
    fn pages_fit_a_terminal_and_have_no_marks() {
        for section in sections() {
            let page = section.show();
            for line in page.lines().filter(|line| !line.starts_with("    ")) {
                assert!(line.len() <= WIDTH || !line.contains(' '), "{line}");
                assert!(!line.contains("**") && !line.contains("]("), "{line}");
            }
        }
        assert_eq!(plain("**Fix.** See [docs/a.md](a.md) or [b](c)\nnow."), "Fix: See docs/a.md or b now.");
    }

    #[test]
    fn an_error_leads_to_its_page() {
        use kiln_shard::ShardError;
        use kiln_train::error::TrainError;
        use kiln_train::logged::MetricError;
        use kiln_train::run::FolderError;
        use std::io::{Error, ErrorKind};
        use std::path::Path;

        let page = |error: TrainError| more(&error.into());
        let io = |kind: ErrorKind| TrainError::io("write", Path::new("a"))(Error::from(kind));
        assert_eq!(page(io(ErrorKind::StorageFull)).as_deref(), Some("more: kiln explain disk-full"));
        assert_eq!(page(io(ErrorKind::NotFound)).as_deref(), Some("more: kiln explain file-access"));
        let files = Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        let open = TrainError::from(FolderError::io("open", Path::new("a"))(files));
        assert_eq!(page(open).as_deref(), Some("more: kiln explain system-limit"));
        assert_eq!(page(TrainError::Stopped), None);
        let inner = ShardError::PlanMismatch { ranks: vec![1] };
        let mine = MetricError { name: "mine".to_owned(), source: Box::new(inner) };
        let own = TrainError::Loop(Box::new(mine));
        assert_eq!(page(own).as_deref(), Some("more: kiln explain ranks-differ"));
        assert_eq!(page(TrainError::Loop("mine".into())), None);
    }
}
