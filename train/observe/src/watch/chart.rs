//! Lines over steps, drawn with the dots of Braille characters, or with characters of ASCII.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::widgets::Widget;

use super::text::width;
use super::theme::Theme;
use super::ticks::Axis;

/// A chart of lines.
pub(super) struct Chart<'a> {
    pub lines: Vec<Line<'a>>,
    pub x: Axis,
    pub y: Axis,
    /// Whether there are Braille characters.
    pub has_unicode: bool,
    /// Steps at which something happened, with a character for the axis.
    pub marks: Vec<(f64, &'static str, Style)>,
}

/// A line, or dots alone.
pub(super) struct Line<'a> {
    /// By step, ascending.
    pub points: &'a [(f64, f64)],
    pub style: Style,
    pub is_joined: bool,
    /// The character of its points where there is no Braille or no colour to tell lines apart.
    pub character: Option<char>,
    /// Stands at the end of the line.
    pub label: Option<char>,
}

/// Dots of a cell with Braille: 2 columns of 4.
const DOTS: [[u8; 4]; 2] = [[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]];

/// Least size of the part with lines.
const LEAST: (u16, u16) = (8, 2);

impl Chart<'_> {
    /// The part of `area` that has the lines, with room for the labels of the y axis.
    fn plot_area(&self, area: Rect, labels: &[String]) -> Rect {
        let gutter = labels.iter().map(|label| width(label)).max().unwrap_or(0) as u16 + 1;
        let below = if area.height >= 7 { 2 } else { 1 };
        Rect {
            x: area.x + gutter,
            y: area.y,
            width: area.width.saturating_sub(gutter + 1),
            height: area.height.saturating_sub(below),
        }
    }
}

/// Columns of dots in a chart of `columns` columns, at most.
pub(super) fn dots(columns: u16) -> usize {
    usize::from(columns) * 2
}

impl Widget for Chart<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let ticks = self.y.ticks(usize::from(area.height * 2 / 5));
        let labels = self.y.labels(&ticks);
        let plot = self.plot_area(area, &labels);
        if plot.width < LEAST.0 || plot.height < LEAST.1 {
            return;
        }
        let quiet = Theme::quiet();
        for row in plot.top()..plot.bottom() {
            buffer.set_string(plot.x - 1, row, "│", quiet);
        }
        for (tick, label) in ticks.iter().zip(&labels) {
            let Some(place) = self.y.place(*tick) else { continue };
            let row = plot.y + ((1.0 - place) * f64::from(plot.height - 1)).round() as u16;
            buffer.set_string(plot.x - 1 - width(label) as u16, row, label, quiet);
            buffer.set_string(plot.x - 1, row, "┤", quiet);
        }
        self.x_axis(plot, area, buffer);
        for line in &self.lines {
            Raster::new(plot, self.has_unicode, line).draw(line, &self.x, &self.y, buffer);
        }
        // Not covered by other lines.
        for line in &self.lines {
            let (Some(label), Some((x, y))) = (line.label, line.points.last()) else { continue };
            let (Some(x), Some(y)) = (self.x.place(*x), self.y.place(*y)) else { continue };
            let column = plot.x + (x.clamp(0.0, 1.0) * f64::from(plot.width)).round() as u16;
            let row = plot.y + ((1.0 - y.clamp(0.0, 1.0)) * f64::from(plot.height - 1)).round() as u16;
            buffer.set_string(column.min(area.right() - 1), row, label.to_string(), line.style);
        }
    }
}

impl Chart<'_> {
    fn x_axis(&self, plot: Rect, area: Rect, buffer: &mut Buffer) {
        let quiet = Theme::quiet();
        let has_line = area.bottom() >= plot.bottom() + 2;
        if has_line {
            let line = "─".repeat(usize::from(plot.width));
            buffer.set_string(plot.x - 1, plot.bottom(), format!("└{line}"), quiet);
        }
        let column = |value: f64| {
            let place = self.x.place(value).filter(|place| (0.0..=1.0).contains(place))?;
            Some(plot.x + (place * f64::from(plot.width - 1)).round() as u16)
        };
        let ticks = self.x.ticks(usize::from(plot.width / 12));
        let mut free = plot.x.saturating_sub(1);
        for (tick, label) in ticks.iter().zip(self.x.labels(&ticks)) {
            let Some(column) = column(*tick) else { continue };
            let columns = width(&label) as u16;
            let start =
                column.saturating_sub(columns / 2).max(free).min(area.right().saturating_sub(columns));
            if start < free {
                continue;
            }
            if has_line {
                buffer.set_string(column, plot.bottom(), "┬", quiet);
            }
            buffer.set_string(start, area.bottom() - 1, label, quiet);
            free = start + columns + 1;
        }
        for (step, mark, style) in self.marks.iter().filter(|_| has_line) {
            if let Some(column) = column(*step) {
                buffer.set_string(column, plot.bottom(), mark, *style);
            }
        }
    }
}

/// The dots of one line.
struct Raster {
    plot: Rect,
    columns: i64,
    rows: i64,
    /// Of each cell, from the upper left one.
    bits: Vec<u8>,
    character: Option<char>,
}

impl Raster {
    fn new(plot: Rect, has_unicode: bool, line: &Line<'_>) -> Self {
        let character = line.character.or((!has_unicode).then_some('*'));
        let (across, down) = if character.is_some() { (1, 1) } else { (2, 4) };
        let bits = vec![0; usize::from(plot.width) * usize::from(plot.height)];
        let (columns, rows) = (i64::from(plot.width) * across, i64::from(plot.height) * down);
        Raster { plot, columns, rows, bits, character }
    }

    fn draw(mut self, line: &Line<'_>, x: &Axis, y: &Axis, buffer: &mut Buffer) {
        let dot = |point: &(f64, f64)| {
            let column = x.place(point.0)? * (self.columns - 1) as f64;
            let row = (1.0 - y.place(point.1)?) * (self.rows - 1) as f64;
            Some((column, row))
        };
        let dots: Vec<_> = line.points.iter().filter_map(dot).collect();
        match line.is_joined && dots.len() > 1 {
            true => dots.windows(2).for_each(|pair| self.join(pair[0], pair[1])),
            false => {
                dots.iter().for_each(|(column, row)| self.set(column.round() as i64, row.round() as i64))
            }
        }
        for (index, bits) in self.bits.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            let across = index as u16 % self.plot.width;
            let cell = &mut buffer[(self.plot.x + across, self.plot.y + index as u16 / self.plot.width)];
            // Dots of other lines stay, in the colour of the last.
            let before = match cell.symbol().chars().next() {
                Some(c @ '\u{2800}'..='\u{28ff}') => (c as u32 - 0x2800) as u8,
                _ => 0,
            };
            let braille = char::from_u32(0x2800 + u32::from(before | bits)).unwrap_or(' ');
            cell.set_char(self.character.unwrap_or(braille)).set_style(line.style);
        }
    }

    /// A line between two points: in each column, from the row before to the row of that column.
    fn join(&mut self, from: (f64, f64), to: (f64, f64)) {
        // Far outside, where differences cannot overflow.
        let whole = |column: f64| column.clamp(-1e9, 1e9).round() as i64;
        let (first, last) = (whole(from.0), whole(to.0));
        let row_at = |column: i64| match last > first {
            true => from.1 + (to.1 - from.1) * (column - first) as f64 / (last - first) as f64,
            false => to.1,
        };
        let mut before = if last > first { None } else { Some(from.1) };
        for column in first.max(0)..=last.min(self.columns - 1) {
            let row = row_at(column);
            let begin = before.unwrap_or_else(|| if column > first { row_at(column - 1) } else { row });
            let whole = |row: f64| row.clamp(-1.0, self.rows as f64).round() as i64;
            let (begin, end) = (whole(begin), whole(row));
            // The row before has its dot in the column before.
            let begin = match begin.cmp(&end) {
                std::cmp::Ordering::Less if last > first => begin + 1,
                std::cmp::Ordering::Greater if last > first => begin - 1,
                _ => begin,
            };
            for row in begin.min(end)..=begin.max(end) {
                self.set(column, row);
            }
            before = Some(row);
        }
    }

    fn set(&mut self, column: i64, row: i64) {
        if !(0..self.columns).contains(&column) || !(0..self.rows).contains(&row) {
            return;
        }
        let (column, row) = (column as usize, row as usize);
        let (cell, bit) = match self.character {
            Some(_) => (row * usize::from(self.plot.width) + column, 1),
            None => (row / 4 * usize::from(self.plot.width) + column / 2, DOTS[column % 2][row % 4]),
        };
        self.bits[cell] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(points: &[(f64, f64)], has_unicode: bool, size: (u16, u16)) -> String {
        let line = Line { points, style: Style::new(), is_joined: true, character: None, label: Some('a') };
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
    fn what_is_outside_or_too_small_is_not_drawn() {
        let points = [(-1e300, 1e300), (5.0, -1e300), (1e300, 2.0), (f64::NAN, 1.0)];
        assert!(!drawn(&points, true, (30, 8)).is_empty());
        for size in [(1, 1), (9, 3), (30, 1), (3, 30)] {
            assert_eq!(drawn(&points, true, size).trim(), "", "{size:?}");
        }
    }
}
