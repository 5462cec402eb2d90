//! The launcher's messages on stderr.

use kiln_sys::output::complain;

/// Prints a message on stderr.
pub(super) fn say(text: &str) {
    complain(&format!("kiln launch: {text}"));
}

/// Returns the usual name of a signal.
pub(super) fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{name} ({signal})"),
        None => format!("signal {signal}"),
    }
}
