//! Plots as SVG: curves of several runs, bars with their values, stacked bars.
//!
//! - `curves`, `bars`: what is plotted, and how it is drawn with the crate `kuva`, which no other module uses;
//! - `ink`: colours that people tell apart whatever they see of them, with a dash pattern for each;
//! - `drawing`: an SVG with a title and a description for those who do not see it;
//! - `smooth`: the average that is drawn over a noisy curve.
//!
//! Text of a plot may come from files of others: it is escaped where it is drawn.

mod bars;
mod curves;
mod drawing;
mod ink;
mod smooth;

pub use bars::{Bar, Bars};
pub use curves::{Axis, Curve, Curves, Scale};
pub use drawing::{Drawing, under_each_other};
pub use ink::{Ink, page_colours};
pub use smooth::smoothed;
