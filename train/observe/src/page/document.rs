//! The page: one HTML document with all that it needs.

use hyper::body::Bytes;

const FRAME: &str = include_str!("assets/index.html");

const STYLES: [&str; 3] = [
    include_str!("assets/uplot/uPlot.min.css"),
    include_str!("assets/style.css"),
    include_str!("assets/views.css"),
];

/// In the order in which they build on each other.
const SCRIPTS: [&str; 14] = [
    include_str!("assets/js/dom.js"),
    include_str!("assets/js/format.js"),
    include_str!("assets/js/data.js"),
    include_str!("assets/js/chart.js"),
    include_str!("assets/js/table.js"),
    include_str!("assets/js/control.js"),
    include_str!("assets/js/overview.js"),
    include_str!("assets/js/curves.js"),
    include_str!("assets/js/ranks.js"),
    include_str!("assets/js/timeline.js"),
    include_str!("assets/js/memory.js"),
    include_str!("assets/js/config.js"),
    include_str!("assets/js/texts.js"),
    include_str!("assets/js/main.js"),
];

const UPLOT: &str = include_str!("assets/uplot/uPlot.iife.min.js");
const UPLOT_LICENSE: &str = include_str!("assets/uplot/LICENSE");

/// The page, whose one script and one style sheet carry `nonce`: the browser runs no others.
pub(super) fn document(nonce: &str) -> Bytes {
    let style = STYLES.join("\n");
    let script = format!("{UPLOT}\n(() => {{\n\"use strict\";\n{}\n}})();", SCRIPTS.join("\n"));
    let parts = [("@STYLE@", style.as_str()), ("@SCRIPT@", &script), ("@LICENSE@", UPLOT_LICENSE)];
    let mut text = String::with_capacity(FRAME.len() + style.len() + script.len() + 4096);
    let mut rest = FRAME;
    // One pass: what is put in is not looked at again.
    while let Some(start) = rest.find('@') {
        text.push_str(&rest[..start]);
        rest = &rest[start..];
        let part =
            parts.iter().copied().chain([("@NONCE@", nonce), ("@VERSION@", env!("CARGO_PKG_VERSION"))]);
        match part.into_iter().find(|(mark, _)| rest.starts_with(mark)) {
            Some((mark, part)) => {
                text.push_str(part);
                rest = &rest[mark.len()..];
            }
            None => {
                text.push('@');
                rest = &rest[1..];
            }
        }
    }
    text.push_str(rest);
    Bytes::from(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_else() {
        let page = String::from_utf8(document("0123").to_vec()).unwrap();
        assert!(!page.contains("@NONCE@") && !page.contains("@SCRIPT@") && !page.contains("@STYLE@"));
        assert_eq!(page.matches("nonce=\"0123\"").count(), 2);
        assert!(page.contains("uPlot=function") && page.contains("The MIT License"));
        for outside in ["src=\"http", "href=\"http", "@import", "url(http", "//cdn", "</script>\n(()"] {
            assert!(!page.contains(outside), "{outside}");
        }
        // A script that has its own end in it would stop there.
        assert_eq!(page.matches("</script>").count(), 1);
        for part in SCRIPTS.iter().chain(&STYLES[1..]) {
            assert!(part.lines().count() < 450);
        }
    }
}
