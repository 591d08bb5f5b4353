//! Weights as text: one line for each row, numbers between commas.

use std::io::BufRead;

use anyhow::{Context as _, bail, ensure};

use super::{Matrix, Reading};

/// Reads all lines; blank ones count only for their numbers.
pub(super) fn read(file: impl BufRead, reading: Reading) -> anyhow::Result<Matrix<f64>> {
    let mut numbers: Vec<f64> = Vec::new();
    let (mut rows, mut cols, mut first_line) = (0, 0, 0);
    for (at, text) in file.lines().enumerate() {
        let line = at + 1;
        let text = text.with_context(|| format!("line {line}: cannot be read as text"))?;
        if text.trim().is_empty() {
            continue;
        }
        let before = numbers.len();
        for (col, field) in text.split(',').enumerate() {
            let place = || format!("line {line}, column {}", col + 1);
            numbers.push(number(field.trim(), rows == 0, reading).with_context(place)?);
        }
        let width = numbers.len() - before;
        if rows == 0 {
            (cols, first_line) = (width, line);
        }
        ensure!(
            width == cols,
            "line {line} has {width} columns, but line {first_line} has {cols}; \
             every line needs as many"
        );
        rows += 1;
    }
    Matrix::arrange(rows, cols, true, |row, out| {
        out.copy_from_slice(&numbers[row * cols..(row + 1) * cols]);
        Ok(())
    })
}

fn number(field: &str, first_row: bool, reading: Reading) -> anyhow::Result<f64> {
    ensure!(
        !field.is_empty(),
        "there is no number; write one, or mark forbidden edges by a number and name it with --forbid"
    );
    let Ok(x) = field.parse::<f64>() else {
        let header = if first_row { "; if this is a line of headings, remove it" } else { "" };
        bail!("`{field}` is not a number{header}");
    };
    if reading.forbid.is_some_and(|f| f == x || (f.is_nan() && x.is_nan())) {
        return Ok(reading.losing());
    }
    ensure!(!x.is_nan(), "NaN is no weight; --forbid nan takes it as a forbidden edge");
    ensure!(
        x.is_finite() || x == reading.losing(),
        "an infinite weight cannot be added up; --forbid {x} takes it as a forbidden edge"
    );
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Reading = Reading { forbid: None, minimize: false };

    #[test]
    fn lines_become_rows() {
        let m = read("1, 2.5\r\n\n-3,4e-2\n5,6\n".as_bytes(), PLAIN).unwrap();
        assert_eq!(m.shape(), (3, 2));
        assert_eq!((m.at(0, 1), m.at(1, 0), m.at(1, 1), m.at(2, 1)), (2.5, -3.0, 0.04, 6.0));
        assert_eq!(read("".as_bytes(), PLAIN).unwrap().shape(), (0, 0));
        let forbid = Reading { forbid: Some(-1.0), minimize: true };
        assert_eq!(read("1,-1".as_bytes(), forbid).unwrap().at(0, 1), f64::INFINITY);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let fails = |text: &str| format!("{:#}", read(text.as_bytes(), PLAIN).unwrap_err());
        assert_eq!(fails("1,2\n3,x"), "line 2, column 2: `x` is not a number");
        assert!(fails("a,b\n1,2").contains("line of headings"));
        assert!(fails("1,2\n\n3").contains("line 3 has 1 columns, but line 1 has 2"));
        assert!(fails("1,,3").starts_with("line 1, column 2: there is no number"));
        assert!(fails("1,nan").contains("--forbid nan"));
        assert!(fails("inf").contains("--forbid inf"));
        assert!(read("-inf,1".as_bytes(), PLAIN).is_ok());
    }
}
