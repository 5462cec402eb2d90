//! Bars with their values, or made of parts.

use kuva::plot::LegendPosition;
use kuva::plot::bar::BarPlot;
use kuva::plot::legend::{LegendEntry, LegendShape};
use kuva::render::annotations::TextAnnotation;
use kuva::render::layout::Layout;
use kuva::render::plots::Plot;

use super::drawing::{Drawing, label};
use super::ink::Ink;

/// About as wide as a character of a label is.
const CHARACTER: f64 = 7.3;
/// As high as the field of a bar is, and what is above and below all of them.
const ROW: f64 = 30.0;
const ABOVE: f64 = 38.0;
const BELOW: f64 = 48.0;
const LEGEND: f64 = 22.0;

/// A bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// Its parts, or its one value, in the order of [`Bars::parts`].
    pub values: Vec<f64>,
    /// What stands at its end.
    pub text: String,
}

/// Horizontal bars, one under the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// What is shown.
    pub title: String,
    /// The same for those who do not see it, in a sentence or two.
    pub description: String,
    /// What is measured, with its unit.
    pub label: String,
    /// The names of the parts of a bar; none if bars have one value.
    pub parts: Vec<String>,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
}

impl Bars {
    /// Whether no bar has a length.
    pub fn is_empty(&self) -> bool {
        self.longest() <= 0.0
    }

    fn longest(&self) -> f64 {
        self.bars.iter().map(|bar| bar.values.iter().map(|value| length(*value)).sum()).fold(0.0, f64::max)
    }

    /// Draws them, `width` wide and as high as their number needs.
    pub fn draw(&self, width: f64, ink: Ink) -> Drawing {
        let most = if width < 500.0 { 16 } else { 32 };
        let names: Vec<_> = self.bars.iter().map(|bar| label(&bar.name, most)).collect();
        let widest =
            |texts: &mut dyn Iterator<Item = &String>| texts.map(|text| room(text)).fold(0.0, f64::max);
        let left = 18.0 + widest(&mut names.iter());
        let right = 16.0;
        let field = (width - left - right).max(80.0);
        // The longest bar ends where its text has room within the field: kuva cuts off what is outside.
        let text = 12.0 + widest(&mut self.bars.iter().map(|bar| &bar.text));
        let columns = if width < 500.0 { 2 } else { 6 };
        let legend = LEGEND * self.parts.len().div_ceil(columns) as f64;
        let below = BELOW + if self.parts.is_empty() { 0.0 } else { legend };
        let axis = self.longest().max(f64::MIN_POSITIVE) * field / (field - text).max(field / 4.0);
        let mut plot = BarPlot::new().with_horizontal(true).with_width(0.66);
        // The first bar of kuva is the lowest.
        for (bar, name) in self.bars.iter().zip(&names).rev() {
            let parts = bar.values.iter().enumerate();
            plot = plot.with_group(name, parts.map(|(part, value)| (length(*value), ink.colour(part))));
        }
        let plots: Vec<Plot> = vec![if self.parts.is_empty() { plot } else { plot.with_stacked() }.into()];
        let count = self.bars.len();
        // A legend stands where the name of the axis would.
        let (title, under) = match self.parts.is_empty() {
            true => (self.title.clone(), self.label.as_str()),
            false => (format!("{} ({})", self.title, self.label), ""),
        };
        let mut layout = Layout::auto_from_plots(&plots)
            .with_width(width)
            .with_height(ABOVE + ROW * count as f64 + below)
            .with_force_margins(left, right)
            .with_force_margins_y(ABOVE, below)
            .with_title(label(&title, 80))
            .with_title_size(15)
            .with_x_label(label(under, 60))
            .with_x_axis_min(0.0)
            .with_x_axis_max(axis)
            .with_ticks(if width < 500.0 { 2 } else { 6 });
        for (index, bar) in self.bars.iter().enumerate() {
            let end: f64 = bar.values.iter().map(|value| length(*value)).sum();
            // kuva centres a text, and sets it 6 above its place.
            let half = room(&bar.text) / 2.0 + 5.0;
            let (x, y) = (end + half / field * axis, (count - index) as f64 - 10.0 / ROW);
            layout = layout.with_annotation(TextAnnotation::new(label(&bar.text, 40), x, y));
        }
        if !self.parts.is_empty() {
            let entry = |(index, part): (usize, &String)| LegendEntry {
                label: label(part, 24),
                color: ink.colour(index),
                shape: LegendShape::Rect,
                dasharray: None,
            };
            layout = layout
                .with_legend_entries(self.parts.iter().enumerate().map(entry).collect())
                .with_legend_position(LegendPosition::OutsideBottomColumns);
        }
        Drawing::new(&self.title, &self.description, plots, layout, ink)
    }
}

/// How wide about a text is.
fn room(text: &str) -> f64 {
    text.chars().map(|c| if c.is_uppercase() || c == '×' { 1.2 * CHARACTER } else { CHARACTER }).sum()
}

/// What can be drawn of a value.
fn length(value: f64) -> f64 {
    if value.is_finite() { value.max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(values: &[&[f64]], parts: usize) -> Bars {
        let bar = |(index, values): (usize, &&[f64])| Bar {
            name: format!("<bar {index}>"),
            values: values.to_vec(),
            text: "1 & 2".to_owned(),
        };
        Bars {
            title: "t".to_owned(),
            description: "d".to_owned(),
            label: "ms".to_owned(),
            parts: (0..parts).map(|part| format!("part {part}")).collect(),
            bars: values.iter().enumerate().map(bar).collect(),
        }
    }

    #[test]
    fn any_values_can_be_drawn() {
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300, 5.0] {
            for width in [340.0, 720.0] {
                bars(&[&[value], &[1.0]], 0).draw(width, Ink::Page);
                bars(&[&[value, 1.0, value]], 3).draw(width, Ink::File);
            }
        }
        assert!(bars(&[], 0).is_empty() && bars(&[&[f64::NAN]], 0).is_empty());
        bars(&[], 0).draw(340.0, Ink::Page);
    }

    #[test]
    fn names_and_values_stand_at_the_bars() {
        let drawn = bars(&[&[1.0, 2.0], &[3.0, 4.0]], 2).draw(720.0, Ink::File).file("time");
        for text in ["&lt;bar 0&gt;", "&lt;bar 1&gt;", "1 &amp; 2", "part 0", "part 1", ">t (ms)<"] {
            assert!(drawn.contains(text), "{text}: {drawn}");
        }
    }
}
