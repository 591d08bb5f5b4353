//! Line charts as SVG, drawn by hand: a few lines over a common axis, a legend, nothing else.

use std::fmt::Write as _;

/// One line of a chart.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A step of 1, 2 or 5 times a power of ten that cuts `span` into four to ten parts.
fn step(span: f64) -> f64 {
    let power = 10f64.powf(span.log10().floor());
    [0.1, 0.2, 0.5, 1.0, 2.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|step| span / step <= 8.0)
        .unwrap_or(power)
}

/// The picture. The vertical axis starts at 0 and ends a little above the 98th percentile, so that
/// the first epochs do not flatten the rest.
pub(crate) fn line_chart(title: &str, x_label: &str, y_label: &str, lines: &[Line]) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let x_max = all().map(|p| p.0).fold(1.0, f64::max);
    let mut ys: Vec<f64> = all().map(|p| p.1).filter(|y| y.is_finite()).collect();
    ys.sort_unstable_by(f64::total_cmp);
    let y_max = 1.1 * ys.get(ys.len() * 98 / 100).copied().unwrap_or(1.0).max(1e-6);
    let x_of = |x: f64| LEFT + x / x_max * (WIDTH - LEFT - RIGHT);
    let y_of = |y: f64| HEIGHT - BOTTOM - (y / y_max).clamp(0.0, 1.0) * (HEIGHT - TOP - BOTTOM);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n",
        escape(title)
    );
    let mut add = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    let (y_step, x_step) = (step(y_max), step(x_max));
    let mut tick = 0.0;
    while tick <= y_max {
        let y = y_of(tick);
        let right = WIDTH - RIGHT;
        add(format!(
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>"
        ));
        let digits = if y_step < 0.01 { 3 } else { 2 };
        let x = LEFT - 6.0;
        add(format!(
            "<text x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{tick:.digits$}</text>",
            y + 4.0
        ));
        tick += y_step;
    }
    tick = 0.0;
    while tick <= x_max {
        let y = HEIGHT - BOTTOM + 16.0;
        add(format!(
            "<text x=\"{:.1}\" y=\"{y}\" text-anchor=\"middle\">{tick:.0}</text>",
            x_of(tick)
        ));
        tick += x_step.max(1.0);
    }
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    add(format!(
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        HEIGHT - 10.0,
        escape(x_label)
    ));
    add(format!(
        "<text x=\"16\" y=\"{0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0})\">{1}</text>",
        f64::midpoint(TOP, HEIGHT - BOTTOM),
        escape(y_label)
    ));
    for (number, line) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let mut path = String::new();
        for (x, y) in &line.points {
            // Writing to a string cannot fail.
            write!(path, "{:.1},{:.1} ", x_of(*x), y_of(*y)).unwrap_or_default();
        }
        add(format!(
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" points=\"{}\"/>",
            path.trim_end()
        ));
        let mut y = TOP + 8.0;
        for _ in 0..number {
            y += 18.0;
        }
        let x = WIDTH - RIGHT + 12.0;
        add(format!(
            "<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            x + 18.0
        ));
        add(format!("<text x=\"{}\" y=\"{}\">{}</text>", x + 24.0, y + 4.0, escape(&line.name)));
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_every_line_and_escapes_names() {
        let line = |name: &str| Line { name: name.into(), points: vec![(1.0, 0.3), (2.0, 0.1)] };
        let svg = line_chart("t", "x", "y", &[line("a<b"), line("c")]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a&lt;b") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !line_chart("t", "x", "y", &[]).contains("NaN"));
    }

    #[test]
    fn steps_are_round() {
        for (span, want) in [(1.0, 0.2), (0.35, 0.05), (600.0, 100.0), (37.0, 5.0)] {
            assert!((step(span) - want).abs() < 1e-9, "{span}: {}", step(span));
        }
    }
}
