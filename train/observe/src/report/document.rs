//! What a report says, before it is HTML or Markdown.

use crate::plot::{Bars, Curves, Drawing, Ink};

/// A report. All texts are plain: whatever they hold is shown, and nothing in them is obeyed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// Its title.
    pub title: String,
    /// What follows the title.
    pub blocks: Vec<Block>,
}

/// A part of a report.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// The title of a section.
    Section(String),
    /// A paragraph.
    Text(String),
    /// Sentences, each for itself.
    List(Vec<String>),
    /// Lines as they are, such as commands and samples.
    Lines(String),
    /// A table.
    Table(Table),
    /// A plot.
    Figure(Figure),
    /// What is of use to few readers: shown when asked for.
    Folded(String, Vec<Block>),
}

/// A table with a title and a row of names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// What it shows.
    pub caption: String,
    /// Names of the columns.
    pub head: Vec<String>,
    /// The rows; the first cell of each names it.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Words.
    Text(String),
    /// What a program reads, such as a key of a configuration.
    Code(String),
    /// A number with its unit.
    Number(String),
}

impl Cell {
    /// The number, or a dash where there is none.
    pub fn number(text: Option<String>) -> Self {
        Cell::Number(text.unwrap_or_else(|| "–".to_owned()))
    }

    /// The words, or a dash where there are none.
    pub fn text(text: Option<String>) -> Self {
        Cell::Text(text.unwrap_or_else(|| "–".to_owned()))
    }
}

/// A plot with a caption.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The name of its file without the ending: lower-case letters, digits and dashes.
    pub id: &'static str,
    /// What it shows, and how its values were found.
    pub caption: String,
    /// What is drawn.
    pub plot: Plot,
}

/// What can be drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum Plot {
    /// Curves.
    Curves(Curves),
    /// Bars.
    Bars(Bars),
}

/// Widths that fit the page of a paper or a screen, and a phone.
const WIDE: f64 = 720.0;
const NARROW: f64 = 340.0;

impl Plot {
    /// As it stands on a page and in print.
    pub(super) fn wide(&self, ink: Ink) -> Drawing {
        self.drawn(WIDE, 340.0, ink)
    }

    /// As it stands on a narrow screen.
    pub(super) fn narrow(&self, ink: Ink) -> Drawing {
        self.drawn(NARROW, 280.0, ink)
    }

    fn drawn(&self, width: f64, height: f64, ink: Ink) -> Drawing {
        match self {
            Plot::Curves(curves) => curves.draw(width, height, ink),
            Plot::Bars(bars) => bars.draw(width, ink),
        }
    }

    /// What it shows, in a sentence or two.
    pub(super) fn description(&self) -> &str {
        match self {
            Plot::Curves(curves) => &curves.description,
            Plot::Bars(bars) => &bars.description,
        }
    }
}

impl Document {
    /// Its figures, in order.
    pub(super) fn figures(&self) -> Vec<&Figure> {
        fn collect<'a>(blocks: &'a [Block], into: &mut Vec<&'a Figure>) {
            for block in blocks {
                match block {
                    Block::Figure(figure) => into.push(figure),
                    Block::Folded(_, blocks) => collect(blocks, into),
                    _ => {}
                }
            }
        }
        let mut figures = Vec::new();
        collect(&self.blocks, &mut figures);
        figures
    }
}
