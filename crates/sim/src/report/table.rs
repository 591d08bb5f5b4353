//! Tables for a terminal, and the same as Markdown.

use crate::metrics::{RunResult, Summary};

/// One column of a comparison: its heading and how it is read from a summary.
pub struct Column {
    /// The heading.
    pub heading: &'static str,
    /// The cell.
    pub cell: fn(&Summary) -> String,
}

impl std::fmt::Debug for Column {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Column({})", self.heading)
    }
}

fn jct(s: f64) -> String {
    if s <= 0.0 { "-".to_owned() } else { format!("{:.2} h", s / 3600.0) }
}

fn share(x: f64) -> String {
    format!("{:.1} %", x * 100.0)
}

const COLUMNS: &[Column] = &[
    Column { heading: "latency", cell: |s| format!("{:.1} ms", s.latency_ms) },
    Column { heading: "p99", cell: |s| format!("{:.1} ms", s.p99_ms) },
    Column { heading: "slowdown", cell: |s| format!("{:+.1} %", (s.slowdown - 1.0) * 100.0) },
    Column {
        heading: "p99 slowdown",
        cell: |s| format!("{:+.1} %", (s.p99_slowdown - 1.0) * 100.0),
    },
    Column { heading: "JCT mean", cell: |s| jct(s.jct_mean_s) },
    Column { heading: "median", cell: |s| jct(s.jct_median_s) },
    Column { heading: "p99 JCT", cell: |s| jct(s.jct_p99_s) },
    Column { heading: "makespan", cell: |s| jct(s.makespan_s) },
    Column { heading: "oversold", cell: |s| share(s.oversold) },
    Column { heading: "GPU util", cell: |s| share(s.gpu_util) },
    Column { heading: "SM act", cell: |s| share(s.sm_activity) },
    Column { heading: "memory", cell: |s| share(s.memory) },
    Column { heading: "evicted", cell: |s| format!("{:.2} %", s.eviction_pct) },
    Column { heading: "unfinished", cell: |s| s.unfinished.to_string() },
];

/// All runs side by side; as Markdown when `markdown` is set.
pub fn comparison(results: &[RunResult], markdown: bool) -> String {
    let mut rows: Vec<Vec<String>> = vec![
        std::iter::once("policy".to_owned())
            .chain(COLUMNS.iter().map(|c| c.heading.to_owned()))
            .collect(),
    ];
    for r in results {
        let s = r.summary();
        rows.push(
            std::iter::once(r.policy.clone()).chain(COLUMNS.iter().map(|c| (c.cell)(&s))).collect(),
        );
    }
    render(&rows, markdown)
}

/// Rows as a table with aligned columns; the first row is the heading.
pub fn render(rows: &[Vec<String>], markdown: bool) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter().map(|r| r.get(c).map_or(0, |cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (i, row) in rows.iter().enumerate() {
        let cells: Vec<String> = widths
            .iter()
            .enumerate()
            .map(|(c, w)| {
                let cell = row.get(c).map_or("", String::as_str);
                let pad = " ".repeat(w - cell.chars().count());
                if c == 0 { format!("{cell}{pad}") } else { format!("{pad}{cell}") }
            })
            .collect();
        if markdown {
            out.push_str(&format!("| {} |\n", cells.join(" | ")));
        } else {
            out.push_str(&format!("{}\n", cells.join("  ").trim_end()));
        }
        if i == 0 {
            let rule: Vec<String> = widths.iter().map(|w| "-".repeat((*w).max(3))).collect();
            if markdown {
                out.push_str(&format!("| {} |\n", rule.join(" | ")));
            } else {
                out.push_str(&format!(
                    "{}\n",
                    widths.iter().map(|w| "─".repeat(*w)).collect::<Vec<_>>().join("  ")
                ));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let rows = vec![
            vec!["a".to_owned(), "long heading".to_owned()],
            vec!["µ-row".to_owned(), "1".to_owned()],
        ];
        let text = render(&rows, false);
        let lengths: Vec<usize> = text.lines().map(|l| l.chars().count()).collect();
        assert_eq!(lengths, [19, 19, 19], "{text}");
        assert!(render(&rows, true).starts_with("| a     | long heading |\n| ----- |"));
    }
}
