//! The page: one self-contained HTML document.

use hyper::body::Bytes;
use serde::Serialize;
use sha2::{Digest, Sha256};

const FRAME: &str = include_str!("assets/index.html");

const STYLES: [&str; 3] = [
    include_str!("assets/uplot/uPlot.min.css"),
    include_str!("assets/style.css"),
    include_str!("assets/views.css"),
];

/// Scripts in the order of their dependencies.
const SCRIPTS: [&str; 15] = [
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
    include_str!("assets/js/results.js"),
    include_str!("assets/js/memory.js"),
    include_str!("assets/js/config.js"),
    include_str!("assets/js/texts.js"),
    include_str!("assets/js/main.js"),
];

const UPLOT: &str = include_str!("assets/uplot/uPlot.iife.min.js");
const UPLOT_LICENSE: &str = include_str!("assets/uplot/LICENSE");

/// Returns the page of a server. Its one script and one style sheet carry `nonce`: the browser runs no
/// others.
pub(super) fn served(nonce: &str) -> Bytes {
    Bytes::from(document(nonce, "", ""))
}

/// Returns the page as a file that contains all its data, and is allowed to load nothing.
///
/// The nonce is a hash of the answers: no text among them can contain it.
///
/// # Errors
///
/// If the answers cannot be written as JSON.
pub(super) fn inlined(answers: &impl Serialize) -> serde_json::Result<String> {
    // Nothing in a JSON string can then end the element or begin a comment.
    let json = serde_json::to_string(answers)?.replace('<', "\\u003c");
    let nonce: String = Sha256::digest(&json)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let rule = format!("{}; img-src data:; base-uri 'none'; form-action 'none'", rule(&nonce));
    let head = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{rule}\">\n");
    Ok(document(&nonce, &head, &format!("<script type=\"application/json\" id=\"report\">{json}</script>\n")))
}

/// Returns the content security policy that lets a page run the script and use the style sheet with `nonce`,
/// and nothing else.
pub(super) fn rule(nonce: &str) -> String {
    format!("default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'")
}

fn document(nonce: &str, head: &str, data: &str) -> String {
    let style = STYLES.join("\n");
    let script = format!("{UPLOT}\n(() => {{\n\"use strict\";\n{}\n}})();", SCRIPTS.join("\n"));
    let parts = [
        ("@STYLE@", style.as_str()),
        ("@SCRIPT@", &script),
        ("@LICENSE@", UPLOT_LICENSE),
        ("@NONCE@", nonce),
        ("@VERSION@", env!("CARGO_PKG_VERSION")),
        ("@HEAD@\n", head),
        ("@DATA@\n", data),
    ];
    let mut text = String::with_capacity(FRAME.len() + style.len() + script.len() + data.len() + 4096);
    let mut rest = FRAME;
    // A single pass: inserted parts are not searched.
    while let Some(start) = rest.find('@') {
        text.push_str(&rest[..start]);
        rest = &rest[start..];
        match parts.iter().find(|(mark, _)| rest.starts_with(mark)) {
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
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a page is complete and loads nothing.
    fn check(page: &str, nonce: &str) {
        for mark in ["@NONCE@", "@SCRIPT@", "@STYLE@", "@HEAD@", "@DATA@"] {
            assert!(!page.contains(mark), "{mark}");
        }
        assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
        assert!(page.contains("uPlot=function") && page.contains("The MIT License"));
        for outside in ["src=\"http", "href=\"http", "@import", "url(http", "//cdn", "</script>\n(()"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn pages_load_nothing() {
        let page = String::from_utf8(served("0123").to_vec()).unwrap();
        check(&page, "0123");
        // A script that contained its own end tag would stop there.
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(!page.contains("id=\"report\""));
    }

    #[test]
    fn inlined_answers_stay_data() {
        let hostile = "</script><script>alert(1)</script><!-- <script> \u{2028} & \" ' @SCRIPT@";
        let page = inlined(&serde_json::json!({ "text": hostile })).unwrap();
        let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").unwrap();
        let (json, _) = rest.split_once("</script>").unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap()["text"], hostile);
        assert!(!json.contains('<'));
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        let (_, rest) = page.split_once("script-src 'nonce-").unwrap();
        check(&page.replace("@SCRIPT@", ""), rest.split('\'').next().unwrap());
        assert!(page.contains("content=\"default-src 'none'; script-src 'nonce-"));
        assert_eq!(page, inlined(&serde_json::json!({ "text": hostile })).unwrap());
    }
}
