//! Plain tables for terminals: columns as wide as their widest cell, numbers to the right.

use std::fmt::Write as _;

/// A table that is filled row by row and rendered once.
#[derive(Debug)]
pub(crate) struct Table {
    head: Vec<&'static str>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Column heads; a head that begins with `>` makes a column of numbers, set to the right.
    pub(crate) fn new(heads: &[&'static str]) -> Self {
        Table {
            head: heads.iter().map(|h| h.trim_start_matches('>')).collect(),
            right: heads.iter().map(|h| h.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; missing cells stay empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The whole table, each line ended.
    pub(crate) fn render(&self) -> String {
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count());
            cells.chain([self.head[c].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut out = String::new();
        let heads = self.head.iter().map(|h| (*h).to_owned()).collect::<Vec<_>>();
        for row in std::iter::once(&heads).chain(&self.rows) {
            let mut line = String::new();
            for (c, w) in widths.iter().enumerate() {
                let cell = row.get(c).map_or("", String::as_str);
                // Writing to a string cannot fail.
                let done = if self.right[c] {
                    write!(line, "{cell:>w$}  ")
                } else {
                    write!(line, "{cell:<w$}  ")
                };
                debug_assert!(done.is_ok());
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["JOB", ">SPEED"]);
        t.row(["a".to_owned(), "0.5".to_owned()]);
        t.row(["longer".to_owned(), "10.25".to_owned()]);
        assert_eq!(t.render(), "JOB     SPEED\na         0.5\nlonger  10.25\n");
    }
}
