//! One HTML page with the table and interactive charts: no network, no other file.

use super::json;
use crate::metrics::RunResult;

/// The page of a comparison.
pub fn page(title: &str, note: &str, results: &[RunResult], seed: u64) -> String {
    // `</` inside a script would end it.
    let data = json::json(results, seed).to_string().replace("</", "<\\/");
    include_str!("page.html")
        .replace("{{TITLE}}", &escape(title))
        .replace("{{NOTE}}", &escape(note))
        .replace("{{DATA}}", &data)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole_and_closed() {
        let page = page("a <b> & c", "note", &[], 1);
        assert!(page.contains("a &lt;b&gt; &amp; c"));
        assert!(!page.contains("{{"), "a placeholder is left");
        for outside in ["http://", "https://", "src=", "@import"] {
            assert!(!page.contains(outside), "the page must not load anything: {outside}");
        }
    }
}
