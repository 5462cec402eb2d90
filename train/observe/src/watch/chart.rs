//! Lines over steps, with axes.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::widgets::Widget;
use ratatui::widgets::canvas::{self, Canvas, Points};

use super::text::{number, width};
use super::theme::Theme;

/// Values beyond are drawn as this one, so that differences of values are finite.
const LARGEST: f64 = f64::MAX / 4.0;

/// Smallest size of the part with lines.
const LEAST: (u16, u16) = (8, 2);

/// The range of values of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    /// Whether equal lengths are equal ratios. Only positive values have a place then.
    is_log: bool,
}

impl Axis {
    /// An axis for the values from `from` to `to`, with some room if they are equal.
    pub(super) fn around(from: f64, to: f64, is_log: bool) -> Axis {
        let least = if is_log { f64::MIN_POSITIVE } else { -LARGEST };
        let (from, to) = (from.clamp(least, LARGEST), to.clamp(least, LARGEST));
        if from < to && (to - from).is_normal() {
            return Axis { from, to, is_log };
        }
        let room = if from == 0.0 { 1.0 } else { (from.abs() * 0.1).max(f64::MIN_POSITIVE) };
        let (from, to) = if is_log { (from / 1.1, from * 1.1) } else { (from - room, from + room) };
        Axis { from, to, is_log }
    }

    /// The place of `value`: 0 at the start of the axis and 1 at its end. `None` if it has no place.
    fn place(&self, value: f64) -> Option<f64> {
        let value = value.clamp(-LARGEST, LARGEST);
        let place = match self.is_log {
            true if value <= 0.0 => return None,
            true => (value.ln() - self.from.ln()) / (self.to.ln() - self.from.ln()),
            false => (value - self.from) / (self.to - self.from),
        };
        place.is_finite().then_some(place)
    }

    /// About `most` round values of the axis with their labels, ascending; at least two if there are any.
    fn ticks(&self, most: usize) -> Vec<(f64, String)> {
        let mut values = Vec::new();
        for most in most.max(2)..most.max(2) + 8 {
            values = self.round_values(most);
            if values.len() > 1 {
                break;
            }
        }
        let labels = self.labels(&values);
        values.into_iter().zip(labels).collect()
    }

    fn round_values(&self, most: usize) -> Vec<f64> {
        let (low, high) = (self.from.log10(), self.to.log10());
        if self.is_log && high - low >= 1.0 {
            let (first, last) = (low.ceil() as i32, high.floor() as i32);
            let every = (last - first) / most as i32 + 1;
            // Those of the power below the first may be in range as well.
            let powers: Vec<i32> = (first - 1..=last).filter(|power| power.rem_euclid(every) == 0).collect();
            let count = powers.iter().filter(|power| **power >= first).count();
            let factors: &[f64] = if count * 3 <= most { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let ticks =
                powers.iter().flat_map(|power| factors.iter().map(|factor| factor * 10f64.powi(*power)));
            return ticks.filter(|tick| (self.from..=self.to).contains(tick)).collect();
        }
        let step = round_step((self.to - self.from) / most as f64);
        let first = (self.from / step).ceil();
        let count = ((self.to / step + 1e-9).floor() - first + 1.0).clamp(0.0, most as f64 + 1.0) as usize;
        (0..count).map(|index| (first + index as f64) * step).collect()
    }

    /// Labels with enough digits to tell the ticks apart.
    fn labels(&self, ticks: &[f64]) -> Vec<String> {
        let largest = ticks.iter().fold(0.0f64, |most, tick| most.max(tick.abs()));
        let step = ticks.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
        // The decimal place of a value; 0 for units. A tolerance, as differences are not exact.
        let place = |value: f64| (value.log10() + 1e-6).floor();
        let is_plain = !self.is_log && largest < 1e4 && (0.99e-4..f64::INFINITY).contains(&step);
        let digits = if is_plain { (-place(step)).max(0.0) as usize } else { 0 };
        let label = |tick: &f64| if is_plain { format!("{tick:.digits$}") } else { short(*tick) };
        let labels: Vec<String> = ticks.iter().map(label).collect();
        if labels.windows(2).all(|pair| pair[0] != pair[1]) {
            return labels;
        }
        let digits = (place(largest) - place(step)).clamp(0.0, 15.0) as usize;
        ticks.iter().map(|tick| format!("{tick:.digits$e}")).collect()
    }
}

/// A number without zeros at its end.
fn short(value: f64) -> String {
    let text = number(value);
    match text.contains('.') && text.ends_with(|c: char| c.is_ascii_digit()) && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// The next 1, 2 or 5 times a power of ten, from `least` up.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor()).max(f64::MIN_POSITIVE);
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// A chart of lines.
pub(super) struct Chart<'a> {
    pub lines: Vec<Line<'a>>,
    pub x: Axis,
    pub y: Axis,
    /// Whether there are Braille characters.
    pub has_unicode: bool,
    /// Steps of events, with a character for the axis.
    pub marks: Vec<(f64, &'static str, Style)>,
}

/// A line, or its points alone.
pub(super) struct Line<'a> {
    /// By step, ascending.
    pub points: &'a [(f64, f64)],
    pub color: Color,
    pub is_joined: bool,
    /// The character of its points, if Braille or colours cannot tell lines apart.
    pub character: Option<char>,
    /// The character at its end.
    pub label: Option<char>,
}

impl Widget for Chart<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let ticks = self.y.ticks(usize::from(area.height * 2 / 5));
        let gutter = ticks.iter().map(|(_, label)| width(label)).max().unwrap_or(0);
        let plot = Rect {
            x: area.x + gutter as u16 + 1,
            y: area.y,
            width: area.width.saturating_sub(gutter as u16 + 2),
            height: area.height.saturating_sub(if area.height >= 7 { 2 } else { 1 }),
        };
        if plot.width < LEAST.0 || plot.height < LEAST.1 {
            return;
        }
        let row_of = |value: f64| {
            let place = self.y.place(value)?.clamp(0.0, 1.0);
            Some(plot.y + ((1.0 - place) * f64::from(plot.height - 1)).round() as u16)
        };
        for row in plot.rows() {
            buffer.set_string(plot.x - 1, row.y, "│", Theme::quiet());
        }
        for (tick, label) in &ticks {
            let Some(row) = row_of(*tick) else { continue };
            buffer.set_string(area.x, row, format!("{label:>gutter$}┤"), Theme::quiet());
        }
        self.x_axis(plot, area, buffer);
        self.draw_lines(plot, buffer);
        // Labels are on top of all lines.
        for line in &self.lines {
            let (Some(label), Some((x, y))) = (line.label, line.points.last()) else { continue };
            let (Some(x), Some(row)) = (self.x.place(*x), row_of(*y)) else { continue };
            let column = plot.x + (x.clamp(0.0, 1.0) * f64::from(plot.width)).round() as u16;
            buffer.set_string(column.min(area.right() - 1), row, label.to_string(), line.color);
        }
    }
}

impl Chart<'_> {
    fn x_axis(&self, plot: Rect, area: Rect, buffer: &mut Buffer) {
        let has_line = area.bottom() >= plot.bottom() + 2;
        if has_line {
            let line = "─".repeat(usize::from(plot.width));
            buffer.set_string(plot.x - 1, plot.bottom(), format!("└{line}"), Theme::quiet());
        }
        let column = |value: f64| {
            let place = self.x.place(value).filter(|place| (0.0..=1.0).contains(place))?;
            Some(plot.x + (place * f64::from(plot.width - 1)).round() as u16)
        };
        let mut free = plot.x - 1;
        for (tick, label) in self.x.ticks(usize::from(plot.width / 12)) {
            let Some(column) = column(tick) else { continue };
            let columns = width(&label) as u16;
            let most = area.right().saturating_sub(columns);
            let start = column.saturating_sub(columns / 2).max(free).min(most);
            if start < free {
                continue;
            }
            if has_line {
                buffer.set_string(column, plot.bottom(), "┬", Theme::quiet());
            }
            buffer.set_string(start, area.bottom() - 1, label, Theme::quiet());
            free = start + columns + 1;
        }
        for (step, mark, style) in self.marks.iter().filter(|_| has_line) {
            if let Some(column) = column(*step) {
                buffer.set_string(column, plot.bottom(), mark, *style);
            }
        }
    }

    fn draw_lines(&self, plot: Rect, buffer: &mut Buffer) {
        let marker = |line: &Line<'_>| match line.character {
            Some(character) => Marker::Custom(character),
            None if self.has_unicode => Marker::Braille,
            None => Marker::Custom('*'),
        };
        // Points far outside the plot may not overflow when lines are clipped.
        let place = |axis: &Axis, value| axis.place(value).map(|place| place.clamp(-1e6, 1e6));
        let point = |(x, y): &(f64, f64)| place(&self.x, *x).zip(place(&self.y, *y));
        let paint = |context: &mut canvas::Context<'_>| {
            let mut last = None;
            for line in &self.lines {
                // A new marker starts a layer, which would hide the dots of the lines before.
                if last.replace(marker(line)) != Some(marker(line)) {
                    context.marker(marker(line));
                }
                let points: Vec<(f64, f64)> = line.points.iter().filter_map(point).collect();
                context.draw(&Points { coords: &points, color: line.color });
                for pair in points.windows(2).filter(|_| line.is_joined) {
                    context.draw(&canvas::Line::new(pair[0].0, pair[0].1, pair[1].0, pair[1].1, line.color));
                }
            }
        };
        Canvas::default().x_bounds([0.0, 1.0]).y_bounds([0.0, 1.0]).paint(paint).render(plot, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[(f64, f64)], has_unicode: bool, size: (u16, u16)) -> String {
        let line = Line { points, color: Color::Reset, is_joined: true, character: None, label: Some('a') };
        let chart = Chart {
            lines: vec![line],
            x: Axis::around(0.0, 10.0, false),
            y: Axis::around(0.0, 4.0, false),
            has_unicode,
            marks: vec![(5.0, "^", Style::new())],
        };
        let mut buffer = Buffer::empty(Rect::new(0, 0, size.0, size.1));
        chart.render(buffer.area, &mut buffer);
        let rows = buffer.content.chunks(usize::from(size.0));
        let rows = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
        rows.map(|row| row.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn lines_go_from_point_to_point() {
        let points = [(0.0, 4.0), (5.0, 0.0), (10.0, 2.0)];
        insta::assert_snapshot!(drawn(&points, true, (30, 8)));
        insta::assert_snapshot!(drawn(&points, false, (30, 8)));
    }

    #[test]
    fn points_outside_are_clipped() {
        let points = [(-1e300, 1e300), (5.0, -1e300), (1e300, 2.0), (f64::NAN, 1.0)];
        assert!(!drawn(&points, true, (30, 8)).is_empty());
        for size in [(1, 1), (9, 3), (30, 1), (3, 30)] {
            assert_eq!(drawn(&points, true, size).trim(), "", "{size:?}");
        }
    }

    fn labels(from: f64, to: f64, is_log: bool, most: usize) -> Vec<String> {
        Axis::around(from, to, is_log).ticks(most).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_and_told_apart() {
        assert_eq!(labels(3.95, 5.7, false, 4), ["4.0", "4.5", "5.0", "5.5"]);
        assert_eq!(labels(0.0, 200.0, false, 5), ["0", "50", "100", "150", "200"]);
        assert_eq!(labels(0.0, 1_000_000.0, false, 3), ["0", "500k", "1M"]);
        assert_eq!(labels(0.0003, 0.003, false, 3), ["0.001", "0.002", "0.003"]);
        assert_eq!(labels(0.001, 10.0, true, 4), ["0.01", "1"]);
        assert_eq!(labels(1.0, 50.0, true, 8), ["1", "2", "5", "10", "20", "50"]);
        assert_eq!(labels(3.0, 6.0, true, 3), ["3", "4", "5", "6"]);
        assert_eq!(labels(2.0, 2.0, false, 2), ["1.8", "2.0", "2.2"]);
        assert_eq!(labels(0.0, 0.0, false, 2), ["-1", "0", "1"]);
    }

    #[test]
    fn axis_has_two_labels_at_least() {
        // A learning rate, constant or warming up, in a low chart. Fails at 9eb9647: the label of the first was "0".
        assert_eq!(labels(3e-4, 3e-4, false, 2), ["2.80e-4", "3.00e-4", "3.20e-4"]);
        assert_eq!(labels(7.5e-5, 3e-3, false, 2), ["0.001", "0.002", "0.003"]);
        for (from, to, is_log) in
            [(1e-5, 1e-5, false), (1e-5, 1e-5, true), (1e-5, 1e-3, true), (2.4, 2.6, false)]
        {
            let labels = labels(from, to, is_log, 2);
            let is_distinct = labels.windows(2).all(|pair| pair[0] != pair[1]);
            assert!(labels.len() > 1 && is_distinct, "{labels:?}");
        }
        assert_eq!(labels(10_010.0, 10_160.0, false, 3), ["1.005e4", "1.010e4", "1.015e4"]);
    }

    /// Fails at 9eb9647: 2^31 powers of ten are tried.
    #[test]
    fn huge_and_tiny_values_have_few_ticks() {
        let sizes = [f64::MAX, f64::MAX / 1.05, 1e300, 1.0, 1e-300, f64::MIN_POSITIVE, 1e-323, 5e-324];
        for (from, to) in sizes.iter().flat_map(|from| sizes.iter().map(move |to| (*from, *to))) {
            for (from, to, is_log) in
                [(from, to, true), (from, to, false), (-from, to, false), (-from, -to, false)]
            {
                let axis = Axis::around(from, to, is_log);
                let ticks = axis.ticks(4);
                assert!(ticks.len() <= 20, "{axis:?}: {ticks:?}");
                for (tick, label) in ticks {
                    let place = axis.place(tick);
                    assert!(place.is_some_and(|place| (-0.01..1.01).contains(&place)), "{axis:?}: {tick}");
                    assert!(label.len() <= 10, "{axis:?}: {label}");
                }
            }
        }
        let points = [(0.0, 1.0), (10.0, f64::MAX)];
        let line =
            Line { points: &points, color: Color::Reset, is_joined: true, character: None, label: None };
        let (x, y) = (Axis::around(0.0, 10.0, false), Axis::around(f64::MAX, f64::MAX, true));
        let mut buffer = Buffer::empty(Rect::new(0, 0, 40, 10));
        Chart { lines: vec![line], x, y, has_unicode: true, marks: Vec::new() }
            .render(buffer.area, &mut buffer);
    }

    #[test]
    fn values_have_their_place() {
        let linear = Axis::around(10.0, 20.0, false);
        assert_eq!((linear.place(15.0), linear.place(f64::NAN)), (Some(0.5), None));
        let log = Axis::around(1.0, 100.0, true);
        assert_eq!((log.place(10.0), log.place(0.0)), (Some(0.5), None));
    }
}
