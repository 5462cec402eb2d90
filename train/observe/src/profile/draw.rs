//! Draws a profile as SVG: stacked areas over the time of a step.

use std::cmp::Reverse;
use std::fmt::Write as _;

use super::{Holder, Profile, Sample};

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 290.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 40.0;

const AREAS: usize = 13;

const OWNERS: [(&str, &str); 4] = [
    ("weights", "#4477aa"),
    ("optimizer state", "#66ccee"),
    ("gradients", "#aa3377"),
    ("gathered weights", "#228833"),
];

const MODULES: [&str; 8] =
    ["#ccbb44", "#ee7733", "#cc3311", "#ee99aa", "#997700", "#ddaa33", "#bb5566", "#eecc66"];

const OTHERS: &str = "#999999";

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", super::mib(bytes))
}

struct Area {
    name: String,
    colour: &'static str,
    holders: Vec<usize>,
}

impl Area {
    fn bytes(&self, sample: &Sample) -> u64 {
        self.holders.iter().filter_map(|holder| sample.bytes.get(*holder)).sum()
    }
}

impl Profile {
    /// Returns the drawing, which is readable on light and dark backgrounds.
    pub fn svg(&self) -> String {
        let areas = self.areas();
        let most = self.peak.held.total().max(1) as f64 * 1.05;
        let x_of = |after: f64| LEFT + (after / self.seconds).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT);
        let y_of = |bytes: f64| HEIGHT - BOTTOM - bytes / most * (HEIGHT - TOP - BOTTOM);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#808080\" role=\"img\">\n\
             <title>Memory of rank {} in step {}</title>\n<desc>{}</desc>\n\
             <text x=\"{LEFT}\" y=\"18\" font-size=\"14\">Memory of rank {} in step {}</text>\n",
            self.rank,
            self.step,
            escaped(&self.to_string()),
            self.rank,
            self.step
        );
        self.draw_bands(&mut svg, x_of);
        let mut ground = vec![0.0; self.samples.len()];
        for area in &areas {
            let tops: Vec<f64> = self
                .samples
                .iter()
                .zip(&ground)
                .map(|(sample, below)| below + area.bytes(sample) as f64)
                .collect();
            let mut path = String::new();
            for (index, (sample, top)) in self.samples.iter().zip(&tops).enumerate() {
                // Memory is held until it is freed, so the outline has steps instead of slopes.
                let (x, y) = (x_of(sample.after), y_of(*top));
                let _ = match index {
                    0 => write!(path, "M{x:.1} {y:.1}"),
                    _ => write!(path, "H{x:.1}V{y:.1}"),
                };
            }
            for (index, sample) in self.samples.iter().enumerate().rev() {
                let y = y_of(ground[index]);
                let _ = match index + 1 == self.samples.len() {
                    true => write!(path, "V{y:.1}"),
                    false => write!(path, "V{y:.1}H{:.1}", x_of(sample.after)),
                };
            }
            let first = y_of(ground.first().copied().unwrap_or(0.0));
            let most = self.samples.iter().map(|sample| area.bytes(sample)).max().unwrap_or(0);
            let _ = writeln!(
                svg,
                "<path d=\"{path}V{first:.1}Z\" fill=\"{}\" fill-opacity=\"0.9\">\
                 <title>{}: at most {}</title></path>",
                area.colour,
                escaped(&area.name),
                mib(most)
            );
            ground = tops;
        }
        draw_axes(&mut svg, most, self.seconds, y_of);
        self.draw_peak(&mut svg, x_of(self.peak.held.after), y_of(self.peak.held.total() as f64));
        self.draw_legend(&mut svg, &areas);
        svg.push_str("</svg>\n");
        svg
    }

    fn areas(&self) -> Vec<Area> {
        let most = |holder: usize| {
            let held = self.samples.iter().chain([&self.peak.held]);
            held.filter_map(|sample| sample.bytes.get(holder)).max().copied().unwrap_or(0)
        };
        let mut areas: Vec<Area> = OWNERS
            .iter()
            .map(|(owner, colour)| Area {
                name: (*owner).to_owned(),
                colour,
                holders: self.places(|holder| holder.owner == *owner),
            })
            .collect();
        let is_owner = |name: &str| OWNERS.iter().any(|(owner, _)| *owner == name);
        let mut modules = self.places(|holder| !is_owner(&holder.owner));
        modules.sort_by_key(|holder| Reverse(most(*holder)));
        let named = modules.len().min(AREAS - 1 - OWNERS.len());
        let rest = modules.split_off(named);
        modules.sort_by_cached_key(|holder| in_order(self.holders[*holder].module.as_deref()));
        for (index, holder) in modules.into_iter().enumerate() {
            let of = &self.holders[holder];
            let place = of.module.as_deref().unwrap_or("outside modules");
            areas.push(Area {
                name: format!("{}: {place}", of.owner),
                colour: MODULES[index % MODULES.len()],
                holders: vec![holder],
            });
        }
        let name = format!("activations: {} more", rest.len());
        areas.push(Area { name, colour: OTHERS, holders: rest });
        areas.retain(|area| area.holders.iter().any(|holder| most(*holder) > 0));
        areas
    }

    fn places(&self, is: impl Fn(&Holder) -> bool) -> Vec<usize> {
        (0..self.holders.len()).filter(|at| is(&self.holders[*at])).collect()
    }

    fn draw_bands(&self, svg: &mut String, x_of: impl Fn(f64) -> f64) {
        for (index, band) in self.bands.iter().enumerate() {
            let (start, end) = (x_of(band.start), x_of(band.end));
            let opacity = if index % 2 == 0 { 0.12 } else { 0.04 };
            let (name, height) = (escaped(&band.activity), HEIGHT - BOTTOM - 28.0);
            let width = (end - start).max(0.0);
            let _ = writeln!(
                svg,
                "<rect x=\"{start:.1}\" y=\"28\" width=\"{width:.1}\" height=\"{height}\" fill=\"#808080\" \
                 fill-opacity=\"{opacity}\"><title>{name}</title></rect>"
            );
            if width > 7.0 * band.activity.len() as f64 {
                let _ = writeln!(
                    svg,
                    "<text x=\"{:.1}\" y=\"43\" text-anchor=\"middle\">{name}</text>",
                    (start + end) / 2.0
                );
            }
        }
    }

    fn draw_peak(&self, svg: &mut String, x: f64, y: f64) {
        let label = format!("peak {}", mib(self.peak.held.total()));
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {y:.1}V{:.1}\" stroke=\"#808080\" stroke-dasharray=\"3 3\"/>\n\
             <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#808080\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"bold\">{label}</text>",
            HEIGHT - BOTTOM,
            x.clamp(LEFT + 50.0, WIDTH - RIGHT - 50.0),
            (y - 8.0).max(TOP)
        );
    }

    fn draw_legend(&self, svg: &mut String, areas: &[Area]) {
        let left = WIDTH - RIGHT + 20.0;
        let _ = writeln!(svg, "<text x=\"{left}\" y=\"43\">at the peak</text>");
        for (index, area) in areas.iter().rev().enumerate() {
            let y = TOP + 10.0 + 22.0 * index as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{:.0}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n\
                 <text x=\"{:.0}\" y=\"{y:.0}\">{} {}</text>",
                y - 10.0,
                area.colour,
                left + 18.0,
                escaped(&area.name),
                mib(area.bytes(&self.peak.held))
            );
        }
    }
}

fn draw_axes(svg: &mut String, most: f64, seconds: f64, y_of: impl Fn(f64) -> f64) {
    let (right, ground) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let step = round_step(most / f64::from(1 << 20) / 4.0) * f64::from(1 << 20);
    let mut bytes = 0.0;
    while bytes <= most {
        let y = y_of(bytes);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#808080\" stroke-opacity=\"0.3\"/>\n\
             <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            mib(bytes as u64)
        );
        bytes += step;
    }
    let milliseconds = seconds * 1e3;
    let step = round_step(milliseconds / 5.0);
    let mut time = 0.0;
    while time <= milliseconds {
        let x = LEFT + time / milliseconds * (right - LEFT);
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{} ms</text>",
            ground + 18.0,
            (time * 1e3).round() / 1e3
        );
        time += step;
    }
}

fn round_step(about: f64) -> f64 {
    let about = about.max(1e-9);
    let power = 10_f64.powf(about.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= about)
        .unwrap_or(10.0 * power)
}

/// Returns a sort key: numbers sort by value, and memory outside of modules comes first.
fn in_order(module: Option<&str>) -> Vec<(Option<u64>, String)> {
    let parts = module.into_iter().flat_map(|module| module.split('.'));
    parts.map(|part| (part.parse().ok(), part.to_owned())).collect()
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
    // XML does not allow control characters.
    text.chars().filter(|c| !c.is_control()).collect()
}
