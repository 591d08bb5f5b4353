//! Where in the text a field stands, so that an error can name its line.

use toml::de::{DeTable, DeValue};

/// The line of the field at `path`, or of the nearest table around it; 1 when nothing is there.
pub(super) fn line_of(text: &str, path: &[&str]) -> usize {
    let Ok(root) = DeTable::parse(text) else { return 1 };
    let mut table = root.get_ref();
    let mut offset = 0;
    for name in path {
        let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == name) else { break };
        offset = key.span().start;
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    line_at(text, offset)
}

/// The line that holds this byte, counted from 1.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|&&byte| byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_path() {
        let text = "[a]\nx = 1\n\n[a.b]\n# note\ny = 2\n\n[c]\nz.w = 3\n";
        assert_eq!(line_of(text, &["a", "x"]), 2);
        assert_eq!(line_of(text, &["a", "b", "y"]), 6);
        assert_eq!(line_of(text, &["c", "z", "w"]), 9);
        assert_eq!(line_of(text, &["a", "b", "missing"]), 4, "the table around it");
        assert_eq!(line_of(text, &["missing"]), 1);
        assert_eq!(line_of("not toml [", &["a"]), 1);
    }
}
