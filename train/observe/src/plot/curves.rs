//! Curves over a common axis.

use std::sync::Arc;

use kuva::plot::LegendPosition;
use kuva::plot::line::{LinePlot, LineStyle};
use kuva::plot::scatter::ScatterPlot;
use kuva::render::layout::{Layout, TickFormat};
use kuva::render::plots::Plot;

use super::drawing::{Drawing, label};
use super::ink::{Ink, dash};

/// Values as far from zero as this, which no axis has marks for, leave a gap as well.
const FARTHEST: f64 = 1e30;

/// The spacing of an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances are equal differences.
    #[default]
    Linear,
    /// Equal distances are equal ratios; marks at 1, 2 and 5 times powers of ten. Values of zero or less have no
    /// place.
    Log,
    /// The same, with marks at powers of two.
    PowersOfTwo,
}

/// An axis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Axis {
    /// What it shows, with its unit.
    pub label: String,
    /// How it is spaced.
    pub scale: Scale,
    /// Whether a linear axis begins at zero, so that lengths can be compared.
    pub has_zero: bool,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: &str) -> Self {
        Axis { label: label.to_owned(), ..Axis::default() }
    }

    /// A logarithmic axis.
    pub fn log(label: &str) -> Self {
        Axis { label: label.to_owned(), scale: Scale::Log, has_zero: false }
    }

    /// A linear axis that begins at zero.
    pub fn from_zero(label: &str) -> Self {
        Axis { has_zero: true, ..Axis::linear(label) }
    }
}

/// A curve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Its name, for the legend.
    pub name: String,
    /// The number that its colour and its dashes come from: the same in all plots of a run.
    pub series: usize,
    /// Its points, from left to right. Those that are not finite leave a gap.
    pub points: Vec<(f64, f64)>,
    /// Whether it is thin and pale, solid and without an entry in the legend, such as what another curve is the
    /// average of.
    pub is_faint: bool,
    /// Whether every point has a mark.
    pub has_marks: bool,
}

/// Curves over a common axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// What is shown.
    pub title: String,
    /// The same for those who do not see it, in a sentence or two.
    pub description: String,
    /// The axis from left to right.
    pub x: Axis,
    /// The axis from bottom to top.
    pub y: Axis,
    /// The curves. Later ones lie on top.
    pub curves: Vec<Curve>,
}

impl Curves {
    /// Whether there is no point to draw.
    pub fn is_empty(&self) -> bool {
        self.curves.iter().all(|curve| self.stretches(curve).is_empty())
    }

    /// Draws them, `width` wide and `height` high; the legend may add to the height.
    pub fn draw(&self, width: f64, height: f64, ink: Ink) -> Drawing {
        let mut plots: Vec<Plot> = Vec::new();
        let has_legend = self.curves.iter().filter(|curve| !curve.is_faint).count() > 1;
        for curve in &self.curves {
            self.add(curve, has_legend, ink, &mut plots);
        }
        // An empty field needs something as well.
        if plots.is_empty() {
            plots.push(LinePlot::new().with_data([(0.0, 0.0), (1.0, 1.0)]).with_color("none").into());
        }
        let mut layout = Layout::auto_from_plots(&plots)
            .with_width(width)
            .with_height(height)
            .with_title(label(&self.title, 80))
            .with_title_size(15)
            .with_x_label(label(&self.x.label, 60))
            .with_y_label(label(&self.y.label, 60))
            .with_ticks(if width < 500.0 { 5 } else { 8 })
            .with_legend_position(LegendPosition::OutsideBottomColumns);
        layout = match self.x.scale {
            Scale::Linear => layout,
            Scale::Log => layout.with_log_x().with_x_tick_format(TickFormat::Custom(Arc::new(power_of_ten))),
            Scale::PowersOfTwo => {
                layout.with_x_tick_step(1.0).with_x_tick_format(TickFormat::Custom(Arc::new(|power| {
                    format!("{}", power.exp2().round())
                })))
            }
        };
        if self.y.has_zero && self.y.scale == Scale::Linear {
            let values = self.curves.iter().flat_map(|curve| &curve.points).map(|(_, y)| *y);
            let most = values.filter(|y| *y < FARTHEST).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
            layout = layout.with_y_axis_min(0.0).with_y_axis_max(1.1 * most);
        }
        if self.y.scale != Scale::Linear {
            layout = layout.with_log_y().with_y_tick_format(TickFormat::Custom(Arc::new(power_of_ten)));
        }
        Drawing::new(&self.title, &self.description, plots, layout, ink)
    }

    fn add(&self, curve: &Curve, has_legend: bool, ink: Ink, plots: &mut Vec<Plot>) {
        let (colour, width) = match curve.is_faint {
            true => (ink.faint(curve.series), 1.0),
            false => (ink.colour(curve.series), 2.0),
        };
        let style = match dash(curve.series) {
            Some(dash) if !curve.is_faint => LineStyle::Custom(dash.to_owned()),
            _ => LineStyle::Solid,
        };
        for (index, stretch) in self.stretches(curve).into_iter().enumerate() {
            if curve.has_marks || stretch.len() == 1 {
                let marks =
                    ScatterPlot::new().with_data(stretch.clone()).with_color(colour.clone()).with_size(3.0);
                plots.push(marks.into());
            }
            let line = LinePlot::new()
                .with_data(stretch)
                .with_color(colour.clone())
                .with_stroke_width(width)
                .with_line_style(style.clone());
            let is_named = has_legend && index == 0 && !curve.is_faint;
            plots.push(if is_named { line.with_legend(label(&curve.name, 40)) } else { line }.into());
        }
    }

    /// The points of a curve that have a place on the axes, up to each gap.
    fn stretches(&self, curve: &Curve) -> Vec<Vec<(f64, f64)>> {
        let place = |scale: Scale, value: f64| match scale {
            Scale::Linear => Some(value).filter(|value| value.abs() < FARTHEST),
            Scale::Log => Some(value).filter(|value| (1.0 / FARTHEST..FARTHEST).contains(value)),
            Scale::PowersOfTwo => Some(value.log2()).filter(|value| value.is_finite()),
        };
        let mut stretches = vec![Vec::new()];
        for (x, y) in &curve.points {
            match (place(self.x.scale, *x), place(self.y.scale, *y), stretches.last_mut()) {
                (Some(x), Some(y), Some(last)) => last.push((x, y)),
                _ => stretches.push(Vec::new()),
            }
        }
        stretches.retain(|stretch| !stretch.is_empty());
        stretches
    }
}

/// A mark of a logarithmic axis, which has one digit that counts.
fn power_of_ten(value: f64) -> String {
    let rounded: f64 = format!("{value:.1e}").parse().unwrap_or(value);
    if (1e-4..1e6).contains(&rounded) { format!("{rounded}") } else { format!("{rounded:e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curves(points: Vec<(f64, f64)>, scale: Scale) -> Curves {
        let axis = Axis { label: "a <b>".to_owned(), scale, has_zero: true };
        let curve = |series| Curve {
            name: format!("run \"{series}\" & $x$"),
            series,
            points: points.clone(),
            ..Curve::default()
        };
        Curves {
            title: "t".to_owned(),
            description: "d".to_owned(),
            x: axis.clone(),
            y: axis,
            curves: vec![curve(0), curve(1)],
        }
    }

    #[test]
    fn any_values_can_be_drawn() {
        let extremes =
            [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 1e-300, -1e300, f64::MAX];
        for scale in [Scale::Linear, Scale::Log, Scale::PowersOfTwo] {
            for ink in [Ink::Page, Ink::File] {
                for first in extremes {
                    for second in extremes {
                        let points = vec![(first, second), (second, first)];
                        let drawn = curves(points, scale).draw(340.0, 200.0, ink).file("x");
                        assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
                    }
                }
                assert!(curves(Vec::new(), scale).is_empty());
                curves(vec![(1.0, 1.0)], scale).draw(340.0, 200.0, ink);
            }
        }
    }

    #[test]
    fn a_plot_says_what_it_shows_and_obeys_nothing() {
        let one = curves(vec![(1.0, 1.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, 3.0)], Scale::Linear);
        let drawn = one.draw(720.0, 340.0, Ink::File).inline("loss", "wide");
        assert!(
            drawn.contains("<title id=\"loss-title\">t</title>\n<desc id=\"loss-desc\">d</desc>"),
            "{drawn}"
        );
        assert!(drawn.contains("aria-labelledby=\"loss-title loss-desc\"") && drawn.contains("a &lt;b&gt;"));
        assert!(!drawn.contains("kuva-clip") && !drawn.contains("<script"), "{drawn}");
        // The same values make the same file, whatever else this process has drawn.
        assert_eq!(drawn, one.draw(720.0, 340.0, Ink::File).inline("loss", "wide"));
    }

    #[test]
    fn marks_of_logarithmic_axes_are_short() {
        let marks = [0.1, 0.2, 1.0, 50.0, 1e5, 1e6, 1e-5, 2e-9].map(power_of_ten);
        assert_eq!(marks, ["0.1", "0.2", "1", "50", "100000", "1e6", "1e-5", "2e-9"]);
    }
}
