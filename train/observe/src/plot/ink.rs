//! Colours and dash patterns.

use std::fmt::Write as _;

/// Colours on light ground, by Okabe and Ito (<https://jfly.uni-koeln.de/color/>), which people with any kind of
/// colour blindness tell apart; without their yellow, which is too light for lines.
const ON_LIGHT: [u32; 7] = [0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x555555];
/// The same hues, light enough for dark ground.
const ON_DARK: [u32; 7] = [0x4fb0ea, 0xff8a47, 0x35c79b, 0xe79cc4, 0xf2bd3f, 0xa5dcff, 0xc4c4c4];
const LIGHT_GROUND: u32 = 0xffffff;
const DARK_GROUND: u32 = 0x15181c;
/// How much of a colour is left of what is drawn faintly.
const FAINT: f64 = 0.32;
/// Dash patterns, as SVG has them; the first is a solid line.
const DASHES: [Option<&str>; 4] = [None, Some("7 3"), Some("2 3"), Some("8 3 2 3")];

/// Where the colours of a plot come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// From the style of the page that the plot is part of: see [`page_colours`].
    Page,
    /// Colours on white, for a file of its own that is shown or printed anywhere.
    File,
}

impl Ink {
    /// The colour of the series of this number.
    pub(super) fn colour(self, series: usize) -> String {
        let index = series % ON_LIGHT.len();
        match self {
            Ink::Page => format!("var(--series-{index})"),
            Ink::File => hex(ON_LIGHT[index]),
        }
    }

    /// The same, faint.
    pub(super) fn faint(self, series: usize) -> String {
        let index = series % ON_LIGHT.len();
        match self {
            Ink::Page => format!("var(--faint-{index})"),
            Ink::File => hex(mixed(ON_LIGHT[index], LIGHT_GROUND)),
        }
    }

    /// The colour of text and axes.
    pub(super) fn text(self) -> &'static str {
        match self {
            Ink::Page => "currentColor",
            Ink::File => "#24292f",
        }
    }

    /// The colour of lines that guide the eye.
    pub(super) fn grid(self) -> &'static str {
        match self {
            Ink::Page => "var(--grid)",
            Ink::File => "#dfe3e8",
        }
    }

    /// The colour behind it all.
    pub(super) fn ground(self) -> &'static str {
        match self {
            Ink::Page => "none",
            Ink::File => "#ffffff",
        }
    }
}

/// The dash pattern of the series of this number. Those that share a colour differ in their pattern.
pub(super) fn dash(series: usize) -> Option<&'static str> {
    DASHES[(series % ON_LIGHT.len() + series / ON_LIGHT.len()) % DASHES.len()]
}

/// The variables of CSS that plots of a page take their colours from, on light and on dark ground.
pub fn page_colours() -> String {
    let variables = |colours: &[u32], ground: u32| {
        let mut css = String::new();
        for (index, colour) in colours.iter().enumerate() {
            // Writing into a String cannot fail.
            let _ = write!(
                css,
                "--series-{index}:{};--faint-{index}:{};",
                hex(*colour),
                hex(mixed(*colour, ground))
            );
        }
        css
    };
    format!(
        ":root{{{}--ground:{};--text:#24292f;--quiet:#57606a;--grid:#dfe3e8}}\n\
         @media (prefers-color-scheme:dark){{:root{{{}--ground:{};--text:#dde3ea;--quiet:#98a2ad;--grid:#363c44}}}}\n\
         @media print{{:root{{{}--ground:#fff;--text:#000;--quiet:#444;--grid:#dfe3e8}}}}\n",
        variables(&ON_LIGHT, LIGHT_GROUND),
        hex(LIGHT_GROUND),
        variables(&ON_DARK, DARK_GROUND),
        hex(DARK_GROUND),
        variables(&ON_LIGHT, LIGHT_GROUND),
    )
}

fn hex(colour: u32) -> String {
    format!("#{colour:06x}")
}

/// `colour` as it looks on `ground` when little of it is left.
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

    #[test]
    fn no_two_of_many_series_look_the_same() {
        let looks: BTreeSet<_> = (0..28).map(|series| (Ink::File.colour(series), dash(series))).collect();
        assert_eq!(looks.len(), 28);
        let first: BTreeSet<_> = (0..4).map(dash).collect();
        assert_eq!(first.len(), 4);
    }

    #[test]
    fn a_faint_colour_is_between_colour_and_ground() {
        assert_eq!(mixed(0x000000, 0xffffff), 0xadadad);
        assert_eq!(mixed(0xff0000, 0xff0000), 0xff0000);
    }

    #[test]
    fn every_colour_of_a_page_is_defined() {
        let css = page_colours();
        for series in 0..ON_LIGHT.len() {
            for colour in [Ink::Page.colour(series), Ink::Page.faint(series)] {
                let name = colour.trim_start_matches("var(").trim_end_matches(')').to_owned() + ":";
                assert_eq!(css.matches(&name).count(), 3, "{name}");
            }
        }
    }
}
