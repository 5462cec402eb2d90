//! Draws curves as SVG files with the crate `kuva`, and escapes all text, which may come from untrusted files.

use std::fmt::Write as _;
use std::sync::Arc;

use kuva::backend::svg::SvgBackend;
use kuva::plot::LegendPosition;
use kuva::plot::line::{LinePlot, LineStyle};
use kuva::plot::scatter::ScatterPlot;
use kuva::render::layout::{Layout, TickFormat};
use kuva::render::plots::Plot;
use kuva::render::render::render_multiple;
use kuva::render::theme::Theme;

/// Colours by Okabe and Ito (<https://jfly.uni-koeln.de/color/>), which colour-blind readers can distinguish.
/// Their yellow is omitted because it is too light for lines.
const COLOURS: [u32; 7] = [0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x555555];
const GROUND: u32 = 0xffffff;
const TEXT: &str = "#24292f";
const GRID: &str = "#dfe3e8";

const FAINT: f64 = 0.32;

const DASHES: [Option<&str>; 4] = [None, Some("7 3"), Some("2 3"), Some("8 3 2 3")];

/// `kuva` draws no axis marks for values beyond this limit, so such values leave a gap.
const FARTHEST: f64 = 1e30;

const NAME: usize = 40;

const BELOW_TEXT: f64 = 10.0;

/// The spacing of an axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances are equal differences.
    #[default]
    Linear,
    /// Equal distances are equal ratios, with marks at powers of ten. Values of zero or less are not drawn.
    Log,
    /// Like [`Scale::Log`], with marks at powers of two.
    PowersOfTwo,
}

/// An axis.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Axis {
    /// Name of the quantity, with its unit.
    pub label: String,
    /// Spacing of the axis.
    pub scale: Scale,
    /// True if a linear axis starts at zero.
    pub has_zero: bool,
}

impl Axis {
    /// Creates a linear axis.
    pub fn linear(label: &str) -> Self {
        Axis { label: label.to_owned(), ..Axis::default() }
    }

    /// Creates a logarithmic axis.
    pub fn log(label: &str) -> Self {
        Axis { label: label.to_owned(), scale: Scale::Log, has_zero: false }
    }

    /// Creates a linear axis that begins at zero.
    pub fn from_zero(label: &str) -> Self {
        Axis { has_zero: true, ..Axis::linear(label) }
    }
}

/// A curve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// Number that determines the colour and the dashes.
    pub series: usize,
    /// Points from left to right. Points that are not finite leave a gap.
    pub points: Vec<(f64, f64)>,
    /// True if the curve is drawn thin, pale and solid, without a legend entry.
    pub is_faint: bool,
    /// True if every point has a mark.
    pub has_marks: bool,
}

/// Several curves with common axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// Title of the plot.
    pub title: String,
    /// Description for people who cannot see the plot.
    pub description: String,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Curves, in the order in which they are drawn.
    pub curves: Vec<Curve>,
}

impl Curves {
    /// Returns true if there is no point to draw.
    pub fn is_empty(&self) -> bool {
        self.curves.iter().all(|curve| self.stretches(curve).is_empty())
    }

    /// Draws the curves, `width` wide and `height` high; the legend may add to the height.
    pub fn draw(&self, width: f64, height: f64) -> Drawing {
        let mut plots: Vec<Plot> = Vec::new();
        let has_legend = self.curves.iter().filter(|curve| !curve.is_faint).count() > 1;
        for curve in &self.curves {
            self.add(curve, has_legend, &mut plots);
        }
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
        Drawing::new(&self.title, &self.description, plots, layout)
    }

    fn add(&self, curve: &Curve, has_legend: bool, plots: &mut Vec<Plot>) {
        let (colour, width) = match curve.is_faint {
            true => (hex(mixed(colour(curve.series), GROUND)), 1.0),
            false => (hex(colour(curve.series)), 2.0),
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
            plots.push(if is_named { line.with_legend(label(&curve.name, NAME)) } else { line }.into());
        }
    }

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

fn power_of_ten(value: f64) -> String {
    let rounded: f64 = format!("{value:.1e}").parse().unwrap_or(value);
    if (1e-4..1e6).contains(&rounded) { format!("{rounded}") } else { format!("{rounded:e}") }
}

/// A finished plot and its size.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawing {
    title: String,
    description: String,
    width: f64,
    height: f64,
    inner: String,
}

impl Drawing {
    fn new(title: &str, description: &str, plots: Vec<Plot>, layout: Layout) -> Self {
        let theme = Theme {
            background: hex(GROUND),
            axis_color: TEXT.to_owned(),
            tick_color: TEXT.to_owned(),
            text_color: TEXT.to_owned(),
            grid_color: GRID.to_owned(),
            legend_bg: "none".to_owned(),
            legend_border: "none".to_owned(),
            ..Theme::light()
        };
        let mut scene = render_multiple(plots, layout.with_theme(theme));
        let mut inner = SvgBackend::new().render_scene(&scene);
        // `kuva` cuts off legends with many rows, so the drawing is made taller.
        let height = lowest_text(&inner) + BELOW_TEXT;
        if height > scene.height {
            scene.height = height;
            inner = SvgBackend::new().render_scene(&scene);
        }
        Drawing {
            title: title.to_owned(),
            description: description.to_owned(),
            width: scene.width,
            height: scene.height,
            inner,
        }
    }

    /// Returns the SVG file. Its ids start with `id`, because `kuva` numbers clips across the whole process.
    pub fn file(&self, id: &str) -> String {
        let Drawing { title, description, width, height, inner } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
             aria-labelledby=\"{id}-title {id}-desc\">\n<title id=\"{id}-title\">{}</title>\n\
             <desc id=\"{id}-desc\">{}</desc>\n{}\n</svg>\n",
            escaped(title),
            escaped(description),
            renamed(inner, id)
        )
    }
}

fn lowest_text(svg: &str) -> f64 {
    let tags = svg.split("<text").skip(1).filter_map(|text| text.split_once('>'));
    let value = |tag: &str| tag.split(" y=\"").nth(1)?.split('"').next()?.parse().ok();
    tags.filter_map(|(tag, _)| value(tag)).fold(0.0, f64::max)
}

/// Stacks the drawings vertically into one.
pub fn under_each_other(title: &str, description: &str, drawings: &[Drawing]) -> Drawing {
    let (mut inner, mut height) = (String::new(), 0.0);
    for drawing in drawings {
        let _ = writeln!(inner, "<g transform=\"translate(0 {height:.0})\">{}</g>", drawing.inner);
        height += drawing.height;
    }
    let width = drawings.iter().map(|drawing| drawing.width).fold(0.0, f64::max);
    Drawing { title: title.to_owned(), description: description.to_owned(), width, height, inner }
}

/// Renumbers the clips of a drawing from 0, and prefixes them with `id`.
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

/// Escapes text for XML and HTML, and replaces control characters.
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

/// Shortens a name to at most `most` characters, and replaces control characters.
fn label(text: &str, most: usize) -> String {
    let is_whole = text.chars().nth(most).is_none();
    let shown = text.chars().take(if is_whole { most } else { most.saturating_sub(1) });
    // A dollar sign starts a formula in `kuva`.
    let shown = shown.map(|c| match c {
        c if c.is_control() => ' ',
        '$' => '\u{ff04}',
        c => c,
    });
    shown.chain((!is_whole).then_some('…')).collect()
}

fn colour(series: usize) -> u32 {
    COLOURS[series % COLOURS.len()]
}

fn dash(series: usize) -> Option<&'static str> {
    DASHES[(series % COLOURS.len() + series / COLOURS.len()) % DASHES.len()]
}

fn hex(colour: u32) -> String {
    format!("#{colour:06x}")
}

fn mixed(colour: u32, ground: u32) -> u32 {
    let part = |shift: u32| {
        let (colour, ground) = (f64::from(colour >> shift & 0xff), f64::from(ground >> shift & 0xff));
        ((FAINT * colour + (1.0 - FAINT) * ground).round() as u32) << shift
    };
    part(16) | part(8) | part(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    fn extreme_values_are_drawn() {
        let extremes =
            [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, 1e-300, -1e300, f64::MAX];
        for scale in [Scale::Linear, Scale::Log, Scale::PowersOfTwo] {
            for first in extremes {
                for second in extremes {
                    let points = vec![(first, second), (second, first)];
                    let drawn = curves(points, scale).draw(340.0, 200.0).file("x");
                    assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
                }
            }
            assert!(curves(Vec::new(), scale).is_empty());
            curves(vec![(1.0, 1.0)], scale).draw(340.0, 200.0);
        }
    }

    #[test]
    fn text_in_plots_is_escaped() {
        let one = curves(vec![(1.0, 1.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, 3.0)], Scale::Linear);
        let drawn = one.draw(720.0, 340.0).file("loss");
        assert!(
            drawn.contains("<title id=\"loss-title\">t</title>\n<desc id=\"loss-desc\">d</desc>"),
            "{drawn}"
        );
        assert!(drawn.contains("aria-labelledby=\"loss-title loss-desc\"") && drawn.contains("a &lt;b&gt;"));
        assert!(!drawn.contains("kuva-clip") && !drawn.contains("<script"), "{drawn}");
        // The same values give the same file, even if this process has drawn other curves.
        assert_eq!(drawn, one.draw(720.0, 340.0).file("loss"));
    }

    #[test]
    fn legends_name_all_runs() {
        let mut many = curves(vec![(1.0, 2.0), (2.0, 1.0)], Scale::Linear);
        many.curves = (0..20)
            .map(|series| Curve { name: format!("sweep-lr-{series:02}"), series, ..many.curves[0].clone() })
            .collect();
        let drawn = many.draw(720.0, 340.0);
        let svg = drawn.file("loss");
        for series in 0..20 {
            let name = format!(">sweep-lr-{series:02}<");
            let at = svg.find(&name).unwrap_or_else(|| panic!("{name} is missing: {svg}"));
            let element = &svg[svg[..at].rfind("<text").unwrap()..at];
            let y: f64 = element.split(" y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
            assert!(y < drawn.height, "{name} is below the edge: {element}");
            let cut = format!("width=\"720\" height=\"{}\"", drawn.height);
            assert!(drawn.inner.contains(&cut), "the drawing is cut off: {}", &drawn.inner[..200]);
        }
    }

    #[test]
    fn log_marks_are_short() {
        let marks = [0.1, 0.2, 1.0, 50.0, 1e5, 1e6, 1e-5, 2e-9].map(power_of_ten);
        assert_eq!(marks, ["0.1", "0.2", "1", "50", "100000", "1e6", "1e-5", "2e-9"]);
    }

    #[test]
    fn many_series_look_different() {
        let looks: BTreeSet<_> = (0..28).map(|series| (colour(series), dash(series))).collect();
        assert_eq!(looks.len(), 28);
        let first: BTreeSet<_> = (0..4).map(dash).collect();
        assert_eq!(first.len(), 4);
    }

    #[test]
    fn faint_colours_are_mixed_with_ground() {
        assert_eq!(mixed(0x000000, 0xffffff), 0xadadad);
        assert_eq!(mixed(0xff0000, 0xff0000), 0xff0000);
    }
}
