//! The page of `muxflow simulate --html` in a real browser: charts are drawn, the table sorts, and all
//! of it can be used by keyboard and on a small screen.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use muxflow_e2e::browser::{self, Browser};
use muxflow_sim::{Scenario, compare, predictors, report};

/// A day of a small cluster under three policies, as a page.
fn page() -> String {
    let scenario = Scenario::generated(12, 30, 0.5, 5).unwrap();
    let names: Vec<String> = ["online-only", "time-sharing", "muxflow"].map(str::to_owned).to_vec();
    let with = predictors::by_name("rule", &[], 1).unwrap();
    let runs = compare(&scenario, &names, &with, 2, &|_, _, _| {}).unwrap();
    report::page("A day", "a note", &runs, scenario.seed)
}

#[test]
fn the_page_of_a_simulation_works_in_a_browser() {
    let Some(program) = browser::program() else {
        let text =
            "no Chromium on this machine: the report was not tested; apt-get install chromium";
        assert!(std::env::var_os("CI").is_none(), "{text}");
        println!("SKIPPED: {text}");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.html");
    std::fs::write(&file, page()).unwrap();
    let mut page = Browser::start(program, &dir.path().join("browser"));
    page.appear(1200, 900, false);
    page.open(&format!("file://{}", file.display()));
    page.wait("charts are drawn", "document.querySelectorAll('#charts svg').length === 10");
    assert_eq!(page.value("document.querySelectorAll('#charts polyline').length"), 30);
    let drawn = "[...document.querySelectorAll('#charts polyline')].every(p => !/NaN|Infinity/.test(p.getAttribute('points')))";
    assert_eq!(page.value(drawn), true, "every point is a number");
    let cut = "[...document.querySelectorAll('#charts text')].filter(t => { const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect(); return a.right > b.right + 1 || a.left < b.left - 1; }).map(t => t.textContent).join()";
    assert_eq!(page.value(cut), "", "no label is cut off");

    page.value("document.querySelector('#legend input').click()");
    assert_eq!(page.value("document.querySelectorAll('#charts polyline').length"), 20);
    let column = "[...document.querySelectorAll('#table td:nth-child(4)')].map(d => parseFloat(d.textContent)).join()";
    page.value("document.querySelector('#table button[data-i=\"3\"]').focus()");
    // The harness's keys carry no text, which Enter needs; a focused button is enough to show.
    assert_eq!(page.value("document.activeElement.tagName"), "BUTTON");
    page.value("document.activeElement.click()");
    page.wait("it is sorted", "document.querySelector('th[aria-sort=ascending]') !== null");
    let sorted = page.value(column);
    let slow: Vec<f64> = sorted.as_str().unwrap().split(',').map(|v| v.parse().unwrap()).collect();
    assert!(slow.len() == 3 && slow.is_sorted(), "{slow:?}");
    page.value("document.querySelector('#charts svg').focus()");
    for _ in 0..30 {
        page.press("ArrowRight", 39);
    }
    page.wait("a value is read", "/muxflow: /.test(document.getElementById('tip').innerText)");

    for (width, dark) in [(1200, true), (360, false)] {
        page.appear(width, 800, dark);
        let wide = page
            .value("document.documentElement.scrollWidth - document.documentElement.clientWidth");
        assert_eq!(wide, 0, "nothing is wider than {width} pixels");
        assert_eq!(page.value(cut), "", "no label is cut off at {width} pixels");
    }
    assert!(page.errors.is_empty(), "{:#?}", page.errors);
}
