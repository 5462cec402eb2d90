//! An SVG that says what it shows.

use std::fmt::Write as _;

use kuva::backend::svg::SvgBackend;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;
use kuva::render::render::render_multiple;
use kuva::render::theme::Theme;

use super::ink::Ink;

/// What is drawn, and its size.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawing {
    pub(super) title: String,
    pub(super) description: String,
    pub(super) width: f64,
    pub(super) height: f64,
    /// Elements without the outer one.
    pub(super) inner: String,
}

impl Drawing {
    /// Draws `plots` in `layout`, with the colours of `ink`.
    pub(super) fn new(title: &str, description: &str, plots: Vec<Plot>, layout: Layout, ink: Ink) -> Self {
        let theme = Theme {
            background: ink.ground().to_owned(),
            axis_color: ink.text().to_owned(),
            tick_color: ink.text().to_owned(),
            text_color: ink.text().to_owned(),
            grid_color: ink.grid().to_owned(),
            legend_bg: "none".to_owned(),
            legend_border: "none".to_owned(),
            ..Theme::light()
        };
        let scene = render_multiple(plots, layout.with_theme(theme));
        Drawing {
            title: title.to_owned(),
            description: description.to_owned(),
            width: scene.width,
            height: scene.height,
            inner: SvgBackend::new().render_scene(&scene),
        }
    }

    /// As part of an HTML page, where `id` is nothing else's.
    pub fn inline(&self, id: &str, class: &str) -> String {
        self.wrapped(id, &format!(" class=\"{class}\""))
    }

    /// As a file.
    pub fn file(&self, id: &str) -> String {
        self.wrapped(id, &format!(" width=\"{:.0}\" height=\"{:.0}\"", self.width, self.height))
    }

    /// The drawing with names of its own: `kuva` numbers the clips of a process.
    fn wrapped(&self, id: &str, attributes: &str) -> String {
        let Drawing { title, description, width, height, inner } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\"{attributes} viewBox=\"0 0 {width:.0} {height:.0}\" \
             role=\"img\" aria-labelledby=\"{id}-title {id}-desc\">\n<title id=\"{id}-title\">{}</title>\n\
             <desc id=\"{id}-desc\">{}</desc>\n{}\n</svg>\n",
            escaped(title),
            escaped(description),
            renamed(inner, id)
        )
    }
}

/// The drawings one under the other, as one.
pub fn under_each_other(title: &str, description: &str, drawings: &[Drawing]) -> Drawing {
    let (mut inner, mut height) = (String::new(), 0.0);
    for drawing in drawings {
        // Writing into a String cannot fail.
        let _ = writeln!(inner, "<g transform=\"translate(0 {height:.0})\">{}</g>", drawing.inner);
        height += drawing.height;
    }
    let width = drawings.iter().map(|drawing| drawing.width).fold(0.0, f64::max);
    Drawing { title: title.to_owned(), description: description.to_owned(), width, height, inner }
}

/// Gives the clips of a drawing numbers from 0, after `id`.
fn renamed(inner: &str, id: &str) -> String {
    const CLIP: &str = "kuva-clip-";
    let mut known: Vec<&str> = Vec::new();
    let mut parts = inner.split(CLIP);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (number, rest) = part.split_at(part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len()));
        let place = known.iter().position(|one| *one == number).unwrap_or_else(|| {
            known.push(number);
            known.len() - 1
        });
        let _ = write!(text, "{id}-clip-{place}{rest}");
    }
    text
}

/// Text as XML and HTML have it, without the control characters that XML cannot have.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

/// A name as it stands in a plot: no control characters, and no more than `most` characters.
pub(super) fn label(text: &str, most: usize) -> String {
    let is_whole = text.chars().nth(most).is_none();
    let shown = text.chars().take(if is_whole { most } else { most.saturating_sub(1) });
    // A dollar begins a formula in kuva.
    let shown = shown.map(|c| match c {
        c if c.is_control() => ' ',
        '$' => '\u{ff04}',
        c => c,
    });
    shown.chain((!is_whole).then_some('…')).collect()
}
