//! Model cards and tables in Markdown that also read well in a terminal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use muxflow_predictor::Dataset;
use muxflow_predictor::select::{Candidate, Selection, Verdict};
use muxflow_predictor::validate::Familiarity;

/// A Markdown table with padded columns; all but the first are numbers, set to the right.
pub(crate) fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([heads[column].chars().count(), 3]).max().unwrap_or(3)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let mut out = String::from("|");
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let cell = if column == 0 {
                format!(" {cell:<width$} |")
            } else {
                format!(" {cell:>width$} |")
            };
            out.push_str(&cell);
        }
        out.push('\n');
        out
    };
    let mut out = line(heads.to_vec());
    let rule: Vec<String> =
        widths
            .iter()
            .enumerate()
            .map(|(column, width)| {
                if column == 0 { "-".repeat(*width) } else { format!("{}:", "-".repeat(width - 1)) }
            })
            .collect();
    out.push_str(&line(rule.iter().map(String::as_str).collect()));
    for row in rows {
        out.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    out
}

/// Four digits, or a dash for what was not measured.
pub(crate) fn error_text(error: f64) -> String {
    if error.is_finite() { format!("{error:.4}") } else { "-".to_owned() }
}

/// Errors of all kinds.
pub(crate) fn candidates_table(candidates: &[Candidate], winner: &str) -> String {
    let rows: Vec<Vec<String>> = candidates
        .iter()
        .map(|candidate| {
            let name = candidate.kind.name();
            let mark = if name == winner { " (chosen)" } else { "" };
            vec![
                format!("{name}{mark}"),
                error_text(candidate.pairs.mean_absolute_error()),
                error_text(candidate.unseen.mean_absolute_error()),
            ]
        })
        .collect();
    table(&["model", "random pairs", "workloads left out"], &rows)
}

/// The card of a chosen model.
pub(crate) fn card(selection: &Selection, data: &Dataset, verdict: Option<&Verdict>) -> String {
    let trained = &selection.model;
    let card = &trained.card;
    let kind = trained.model.kind();
    let best = selection.candidates.iter().find(|candidate| candidate.kind == kind);
    let mut out = format!("# Speed model for {}\n\n", trained.gpu_type);
    let mut add = |text: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        out.write_fmt(text).unwrap_or_default();
    };
    add(format_args!("- Kind: {kind}\n- Data: {}\n- Samples: {}\n", card.origin, card.samples));
    add(format_args!(
        "- Workloads: {} online, {} offline\n- Seed: {}\n",
        trained.online_seen.len(),
        trained.offline_seen.len(),
        card.seed
    ));
    add(format_args!(
        "- Split: random pairs, both directions and all shares of a pair together; and workloads left out on both sides, in groups of families (names up to the last `/`)\n"
    ));
    match (&card.parent, verdict) {
        (Some(parent), Some(v)) => add(format_args!(
            "- Replaces: model {parent} (on {} samples held out, newest included: {:.4} before, {:.4} now)\n",
            v.held_out, v.old_error, v.new_error
        )),
        (Some(parent), None) => add(format_args!("- Replaces: model {parent}\n")),
        (None, _) => {}
    }
    add(format_args!("\n## Mean absolute error of the normalised speed\n\n"));
    add(format_args!("{}", candidates_table(&selection.candidates, kind.name())));
    add(format_args!(
        "\nThe mean predictor says the same speed for every pair; a model that does not beat it on workloads left out has learned nothing that holds for new ones.\n"
    ));
    if let Some(best) = best {
        add(format_args!("\n## Uncertainty\n\n"));
        let rows = [Familiarity::Both, Familiarity::One, Familiarity::Neither]
            .iter()
            .zip(["both workloads seen", "one seen", "neither seen"])
            .map(|(f, name)| {
                vec![name.to_owned(), format!("{:.3}", trained.deviation[*f as usize])]
            })
            .collect::<Vec<_>>();
        add(format_args!("{}", table(&["pair", "standard deviation"], &rows)));
        add(format_args!(
            "\nCoverage in cross-validation, deviation taken from the other folds: {:.0} % within one, {:.0} % within two.\n",
            100.0 * best.unseen.coverage(1.0),
            100.0 * best.unseen.coverage(2.0)
        ));
        add(format_args!("\n## Error by workload, when workloads were left out\n\n"));
        let rows: Vec<Vec<String>> = by_workload(best, data)
            .into_iter()
            .map(|(name, count, error)| vec![name, count.to_string(), error_text(error)])
            .collect();
        add(format_args!("{}", table(&["workload", "answers", "error"], &rows)));
    }
    out
}

/// Mean absolute error, when workloads were left out, of all answers that name a workload.
fn by_workload(best: &Candidate, data: &Dataset) -> Vec<(String, usize, f64)> {
    let mut sums: BTreeMap<&str, (u32, f64)> = BTreeMap::new();
    for residual in &best.unseen.residuals {
        let sample = &data.samples[residual.sample];
        let names = BTreeSet::from([&sample.online.workload, &sample.offline.workload]);
        for name in names {
            let sum = sums.entry(name.as_str()).or_default();
            sum.0 += 1;
            sum.1 += residual.error.abs();
        }
    }
    let row = |(name, (count, sum)): (&str, (u32, f64))| {
        (name.to_owned(), count as usize, sum / f64::from(count.max(1)))
    };
    sums.into_iter().map(row).collect()
}
