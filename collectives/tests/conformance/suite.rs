// The checks that every backend passes, for `include!` in the test binary of a backend.

mod accounting;
mod failures;
mod groups;
mod lifetime;
mod results;
mod support;
