//! Curves as an SVG.

use std::fmt::Write as _;

/// A curve, in a field of its own.
pub(super) struct Line {
    pub(super) title: &'static str,
    /// Places on the common axis, and values.
    pub(super) values: Vec<(f64, f64)>,
}

const WIDTH: f64 = 640.0;
const FIELD: f64 = 190.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 34.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 34.0;

/// One field under the other, over a common axis of powers of two. Readable on light and on dark ground.
pub(super) fn draw(axis: &str, lines: &[Line]) -> String {
    let lines: Vec<_> = lines.iter().filter(|line| !line.values.is_empty()).collect();
    let height = FIELD * lines.len() as f64 + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" fill=\"#808080\">\n"
    );
    let places = || lines.iter().flat_map(|line| line.values.iter().map(|(x, _)| *x));
    let (first, last) = (places().fold(f64::INFINITY, f64::min), places().fold(0.0, f64::max));
    let span = (last / first).log2().max(1e-9);
    let x_of = |x: f64| LEFT + (x / first).log2() / span * (WIDTH - LEFT - RIGHT);
    for (index, line) in lines.iter().enumerate() {
        let top = FIELD * index as f64 + TOP;
        let bottom = FIELD * (index + 1) as f64 - 18.0;
        let most = line.values.iter().map(|(_, y)| *y).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let y_of = |y: f64| bottom - y / most * (bottom - top);
        // Writing into a String cannot fail.
        let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{:.0}\">{}</text>", top - 12.0, line.title);
        for share in [0.0, 0.5, 1.0] {
            let y = y_of(share * most);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#808080\" stroke-opacity=\"0.3\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
                short(share * most)
            );
        }
        let points: Vec<_> =
            line.values.iter().map(|(x, y)| format!("{:.1},{:.1}", x_of(*x), y_of(*y))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#2f81f7\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        for (x, y) in &line.values {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"#2f81f7\"><title>{x}: {}</title></circle>",
                x_of(*x),
                y_of(*y),
                short(*y)
            );
        }
    }
    let bottom = height - 18.0;
    if let Some(line) = lines.first() {
        for (x, _) in &line.values {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{bottom:.0}\" text-anchor=\"middle\">{x}</text>",
                x_of(*x)
            );
        }
    }
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"{:.0}\">{axis}</text>\n</svg>", height - 3.0);
    svg
}

/// A number with about three digits that count.
fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 1.0 => format!("{value:.1}"),
        value => format!("{value:.3}"),
    }
}
