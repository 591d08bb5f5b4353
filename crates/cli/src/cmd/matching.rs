//! `muxflow match`: solves any matrix of weights, and proves that nothing better exists.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_matching::{MatchError, Options, Proof, solve, verify};
use serde_json::json;

use crate::weights::{Loaded, Matrix, Number, Reading, load};

/// Match rows with columns so that the total weight is the best possible, and prove it.
///
/// Every row or column of the smaller side is matched unless forbidden edges prevent it; then as
/// many as possible are.
#[derive(Debug, Args)]
pub(crate) struct MatchArgs {
    /// The weights: .npy (float32 or float64) or .csv.
    weights: PathBuf,
    /// Seek the smallest total instead of the largest.
    #[arg(long)]
    minimize: bool,
    /// Edges with this weight must not be used (a number, `nan`, `inf` or `-inf`).
    #[arg(long, value_name = "VALUE", allow_hyphen_values = true)]
    forbid: Option<f64>,
    /// Leave out edges that would lower the total.
    #[arg(long)]
    optional: bool,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
    /// Threads that read the matrix; the result is the same with any number.
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Runs the command.
pub(crate) fn run(args: &MatchArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let loaded = load(&args.weights, Reading { forbid: args.forbid, minimize: args.minimize })?;
    let read_s = start.elapsed().as_secs_f64();
    match loaded {
        Loaded::F32(matrix) => solve_and_print(args, &matrix, read_s),
        Loaded::F64(matrix) => solve_and_print(args, &matrix, read_s),
    }
}

/// What is printed.
struct Answer {
    /// The column of each row of the file.
    assignment: Vec<Option<usize>>,
    value: f64,
    proof: Proof,
    read_s: f64,
    solve_s: f64,
    verify_s: f64,
}

fn solve_and_print<S: Number>(
    args: &MatchArgs,
    matrix: &Matrix<S>,
    read_s: f64,
) -> anyhow::Result<ExitCode> {
    let file = args.weights.display();
    let weights = matrix.weights()?;
    let options = Options {
        optional: args.optional,
        minimize: args.minimize,
        threads: args.threads,
        warm: None,
    };
    let start = Instant::now();
    let matching = match solve(&weights, options) {
        Ok(matching) => matching,
        Err(error) => return Err(refused(&error, matrix)).context(file.to_string()),
    };
    let solve_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let proof = match verify(&weights, &matching) {
        Ok(proof) => proof,
        Err(error) => bail!(
            "{file}: the certificate does not verify: {error}. This is a fault of the solver; \
             do not use the result, and please report it with the file"
        ),
    };
    let verify_s = start.elapsed().as_secs_f64();
    let mut assignment = vec![None; matrix.shape().0];
    for (row, col) in matching.row_to_col.iter().enumerate() {
        if let Some(col) = col.map(|c| c as usize) {
            let (row, col) = if matrix.turned { (col, row) } else { (row, col) };
            assignment[row] = Some(col);
        }
    }
    let answer = Answer { assignment, value: matching.value, proof, read_s, solve_s, verify_s };
    if args.json { print_json(matrix, &answer) } else { print_text(matrix, &answer) }?;
    Ok(ExitCode::SUCCESS)
}

/// The solver's complaint in the places of the file.
fn refused<S: Number>(error: &MatchError, matrix: &Matrix<S>) -> anyhow::Error {
    let (row, col) = match *error {
        MatchError::NotANumber { row, col } | MatchError::Infinite { row, col } => (row, col),
        ref other => return anyhow::anyhow!("{other}"),
    };
    let (row, col) = if matrix.turned { (col, row) } else { (row, col) };
    let weight = matrix.at(row, col);
    anyhow::anyhow!(
        "row {row}, column {col} (from 0): {weight} is no weight; correct it, or pass \
         --forbid={weight} to take it as a forbidden edge"
    )
}

fn print_text<S: Number>(matrix: &Matrix<S>, answer: &Answer) -> std::io::Result<()> {
    let (rows, cols) = matrix.shape();
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    writeln!(out, "value        {}", answer.value)?;
    writeln!(out, "matched      {} of {rows} rows, {cols} columns", answer.proof.matched)?;
    if answer.proof.exact {
        writeln!(out, "certificate  verified: no matching of these weights is better")?;
    } else {
        writeln!(
            out,
            "certificate  verified: no matching is better by more than {:e} (the weights are \
             finer than the solver's 58 bits)",
            answer.proof.gap
        )?;
    }
    writeln!(
        out,
        "time         read {:.3} s, solve {:.3} s, verify {:.3} s",
        answer.read_s, answer.solve_s, answer.verify_s
    )?;
    writeln!(out, "row column weight")?;
    for (row, col) in answer.assignment.iter().enumerate() {
        match col {
            Some(col) => writeln!(out, "{row} {col} {}", matrix.at(row, *col))?,
            None => writeln!(out, "{row} - -")?,
        }
    }
    out.flush()
}

fn print_json<S: Number>(matrix: &Matrix<S>, answer: &Answer) -> std::io::Result<()> {
    let (rows, cols) = matrix.shape();
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let value = json!({
        "rows": rows,
        "cols": cols,
        "value": answer.value,
        "matched": answer.proof.matched,
        "assignment": answer.assignment,
        "certificate": {
            "verified": true,
            "exact": answer.proof.exact,
            "gap": answer.proof.gap,
        },
        "seconds": {
            "read": answer.read_s,
            "solve": answer.solve_s,
            "verify": answer.verify_s,
        },
    });
    serde_json::to_writer(&mut out, &value)?;
    writeln!(out)?;
    out.flush()
}
