//! The picture of what a run costs against the size of the cluster and against jobs.

use super::Cost;

const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 56.0;
const TOP: f64 = 40.0;
const PLOT_W: f64 = WIDTH - LEFT - 20.0;
const PLOT_H: f64 = HEIGHT - TOP - 50.0;
/// Lines: name and colour, readable on white and on black.
const LINES: [(&str, &str); 2] = [("in all", "#2a7de1"), ("outside planning", "#e07b00")];

type Point = (f64, [f64; 2]);

/// Two panels: against GPUs (7,287 jobs; the largest has its own number of jobs) and against jobs
/// (1,000 GPUs), both axes logarithmic.
pub(super) fn draw(costs: &[Cost]) -> String {
    #[expect(clippy::cast_precision_loss, reason = "counts")]
    let point = |x: usize, c: &Cost| (x as f64, [c.all(), c.rest]);
    let sorted = |mut points: Vec<Point>| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let by_gpus = costs.iter().filter(|c| c.jobs == 7_287 || c.gpus > 4_000);
    let by_jobs = costs.iter().filter(|c| c.gpus == 1_000);
    let panels = [
        (
            "GPUs (7,287 jobs; 20,000 GPUs have 100,000)",
            sorted(by_gpus.map(|c| point(c.gpus, c)).collect()),
        ),
        ("jobs (1,000 GPUs)", sorted(by_jobs.map(|c| point(c.jobs, c)).collect())),
    ];
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n<title>CPU-seconds of a simulated day against GPUs and against jobs</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        2.0 * WIDTH
    );
    for (i, (words, points)) in panels.iter().enumerate() {
        let shift = if i == 0 { 0.0 } else { WIDTH };
        out.push_str(&format!("<g transform=\"translate({shift},0)\">\n"));
        panel(&mut out, words, points);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, words: &str, points: &[Point]) {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return };
    let highest = points.iter().map(|p| p.1[0]).fold(1.0, f64::max);
    let lowest = points.iter().map(|p| p.1[1]).fold(f64::INFINITY, f64::min).max(1e-3);
    let (top, bottom) = (highest.log10().ceil(), lowest.log10().floor().min(0.0));
    let span = (last.0 / first.0).log10().max(1e-9);
    let x = |v: f64| LEFT + (v / first.0).log10() / span * PLOT_W;
    let y = |v: f64| TOP + (top - v.max(1e-3).log10()) / (top - bottom).max(1.0) * PLOT_H;
    let mut decade = bottom;
    while decade <= top {
        let (at, value) = (y(10f64.powf(decade)), 10f64.powf(decade));
        out.push_str(&format!(
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#d8dbe0\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#444\">{value}</text>\n",
            LEFT + PLOT_W,
            LEFT - 6.0,
            at + 4.0
        ));
        decade += 1.0;
    }
    for (v, _) in points {
        out.push_str(&format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444\">{v}</text>\n",
            x(*v),
            TOP + PLOT_H + 18.0
        ));
    }
    out.push_str(&format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#222\">{words}</text>\n<text x=\"8\" y=\"16\" fill=\"#222\">CPU-seconds</text>\n",
        LEFT + PLOT_W / 2.0,
        HEIGHT - 8.0
    ));
    for (i, (name, colour)) in LINES.iter().enumerate() {
        let path: Vec<String> =
            points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1[i]))).collect();
        let legend = if i == 0 { 110.0 } else { 180.0 };
        out.push_str(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/><text x=\"{legend}\" y=\"16\" fill=\"{colour}\">{name}</text>\n",
            path.join(" ")
        ));
        for p in points {
            out.push_str(&format!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{:.2} CPU-s</title></circle>\n",
                x(p.0),
                y(p.1[i]),
                p.1[i]
            ));
        }
    }
}
