//! NumPy's `.npy`: versions 1 to 3, C and Fortran order, both byte orders, f32 and f64.

use std::io::Read;

use anyhow::{Context as _, bail, ensure};

use super::{Loaded, Matrix, Number, Reading};

/// What the header says.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    /// Bytes of a number.
    width: usize,
    big_endian: bool,
    fortran: bool,
    rows: usize,
    cols: usize,
}

/// Reads a file of `file_bytes` bytes.
pub(super) fn read(
    file: &mut impl Read,
    file_bytes: u64,
    reading: Reading,
) -> anyhow::Result<Loaded> {
    let (header, header_bytes) = read_header(file)?;
    let count = header.rows.checked_mul(header.cols).and_then(|n| n.checked_mul(header.width));
    let needed = count.and_then(|n| (n as u64).checked_add(header_bytes));
    let needed = needed.with_context(|| {
        format!("shape ({}, {}) is beyond any memory", header.rows, header.cols)
    })?;
    ensure!(
        file_bytes >= needed,
        "the header promises {} × {} numbers of {} bytes, but the file ends {} bytes early; \
         write it again",
        header.rows,
        header.cols,
        header.width,
        needed - file_bytes
    );
    ensure!(
        file_bytes == needed,
        "{} bytes follow the matrix; only a file with one array can be read",
        file_bytes - needed
    );
    Ok(match header.width {
        4 => Loaded::F32(read_numbers(file, &header, reading)?),
        _ => Loaded::F64(read_numbers(file, &header, reading)?),
    })
}

fn read_numbers<S: Number>(
    file: &mut impl Read,
    header: &Header,
    reading: Reading,
) -> anyhow::Result<Matrix<S>> {
    let (lines, width) =
        if header.fortran { (header.cols, header.rows) } else { (header.rows, header.cols) };
    let mut bytes = vec![0u8; width.min(1 << 16) * S::BYTES];
    let forbid = reading.forbid.map(S::from_f64);
    let losing = S::from_f64(reading.losing());
    Matrix::arrange(lines, width, !header.fortran, |_, out| {
        for part in out.chunks_mut(1 << 16) {
            let bytes = &mut bytes[..part.len() * S::BYTES];
            file.read_exact(bytes).context("cannot read the numbers")?;
            for (x, raw) in part.iter_mut().zip(bytes.chunks_exact_mut(S::BYTES)) {
                if header.big_endian {
                    raw.reverse();
                }
                *x = S::from_bytes(raw);
                if forbid.is_some_and(|f| same(f, *x)) {
                    *x = losing;
                }
            }
        }
        Ok(())
    })
}

/// Equality for which NaN is NaN.
fn same<S: Number>(a: S, b: S) -> bool {
    a == b || (a.to_f64().is_nan() && b.to_f64().is_nan())
}

fn read_header(file: &mut impl Read) -> anyhow::Result<(Header, u64)> {
    let mut start = [0u8; 8];
    file.read_exact(&mut start).context("too short for a .npy file")?;
    ensure!(
        &start[..6] == b"\x93NUMPY",
        "this is not a .npy file (it does not begin with \\x93NUMPY); numpy.save writes one"
    );
    let major = start[6];
    ensure!((1..=3).contains(&major), "version {major} of the format is not known; save as 1.0");
    let mut size = [0u8; 4];
    let used = if major == 1 { 2 } else { 4 };
    file.read_exact(&mut size[..used]).context("the file ends in its header")?;
    let size = u32::from_le_bytes(size);
    ensure!(size <= 1 << 20, "the header claims {size} bytes; the file is damaged");
    let mut text = vec![0u8; size as usize];
    file.read_exact(&mut text).context("the file ends in its header")?;
    let text = String::from_utf8(text).context("the header is not text")?;
    let header = parse(&text).with_context(|| format!("header `{}`", text.trim()))?;
    Ok((header, 8 + used as u64 + u64::from(size)))
}

/// Reads the dictionary `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
fn parse(text: &str) -> anyhow::Result<Header> {
    let field = |name: &str| -> anyhow::Result<&str> {
        let key = [format!("'{name}'"), format!("\"{name}\"")];
        let at = key.iter().find_map(|k| text.find(k.as_str()).map(|at| at + k.len()));
        let rest = at.and_then(|at| text[at..].trim_start().strip_prefix(':'));
        Ok(rest.with_context(|| format!("there is no `{name}`"))?.trim_start())
    };
    let descr = field("descr")?;
    let kind = descr
        .strip_prefix(['\'', '"'])
        .and_then(|d| d.split(['\'', '"']).next())
        .context("`descr` is not a plain kind of number; save an array of float32 or float64")?;
    let (big_endian, width) = match kind {
        "<f4" | "=f4" => (false, 4),
        "<f8" | "=f8" => (false, 8),
        ">f4" => (true, 4),
        ">f8" => (true, 8),
        other => bail!(
            "numbers of kind {other} cannot be weights; convert with .astype(numpy.float32) \
             or .astype(numpy.float64)"
        ),
    };
    let order = field("fortran_order")?;
    let fortran = if order.starts_with("True") {
        true
    } else if order.starts_with("False") {
        false
    } else {
        bail!("`fortran_order` is neither True nor False");
    };
    let shape = field("shape")?;
    let shape = shape
        .strip_prefix('(')
        .and_then(|s| s.split_once(')'))
        .map(|(inside, _)| inside)
        .context("`shape` is not a tuple")?;
    let sizes: Result<Vec<usize>, _> =
        shape.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::parse).collect();
    let sizes = sizes.with_context(|| format!("`shape` ({shape}) holds what is not a size"))?;
    let [rows, cols] = sizes[..] else {
        bail!("shape ({shape}) has {} dimensions; a matrix has 2, use .reshape", sizes.len());
    };
    Ok(Header { width, big_endian, fortran, rows, cols })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(version: u8, header: &str, body: &[u8]) -> Vec<u8> {
        let mut out = b"\x93NUMPY".to_vec();
        out.extend([version, 0]);
        let len = u32::try_from(header.len()).unwrap();
        let size = len.to_le_bytes();
        out.extend(if version == 1 { &size[..2] } else { &size[..] });
        out.extend(header.as_bytes());
        out.extend(body);
        out
    }

    fn numbers(bytes: &[u8], reading: Reading) -> anyhow::Result<Vec<Vec<f64>>> {
        let loaded = read(&mut &bytes[..], bytes.len() as u64, reading)?;
        fn table<S: Number>(m: &Matrix<S>) -> Vec<Vec<f64>> {
            let (rows, cols) = m.shape();
            (0..rows).map(|r| (0..cols).map(|c| m.at(r, c)).collect()).collect()
        }
        Ok(match &loaded {
            Loaded::F32(m) => table(m),
            Loaded::F64(m) => table(m),
        })
    }

    const PLAIN: Reading = Reading { forbid: None, minimize: false };

    #[test]
    fn every_version_order_and_byte_order_gives_the_same_matrix() {
        let wanted = vec![vec![1.0, 2.0, 3.0], vec![4.0, 5.0, 6.0]];
        for version in 1..=3 {
            for (fortran, order) in [("False", [1, 2, 3, 4, 5, 6]), ("True", [1, 4, 2, 5, 3, 6])] {
                for kind in ["<f4", ">f4", "<f8", ">f8"] {
                    let body: Vec<u8> = order
                        .iter()
                        .flat_map(|&x| match kind {
                            "<f4" => (x as f32).to_le_bytes().to_vec(),
                            ">f4" => (x as f32).to_be_bytes().to_vec(),
                            "<f8" => f64::from(x).to_le_bytes().to_vec(),
                            _ => f64::from(x).to_be_bytes().to_vec(),
                        })
                        .collect();
                    let header = format!(
                        "{{'descr': '{kind}', 'fortran_order': {fortran}, 'shape': (2, 3), }}\n"
                    );
                    let bytes = file(version, &header, &body);
                    assert_eq!(numbers(&bytes, PLAIN).unwrap(), wanted, "{version} {header}");
                    let header = header.replace("(2, 3)", "(3, 2)");
                    let turned = numbers(&file(version, &header, &body), PLAIN).unwrap();
                    assert_eq!((turned.len(), turned[0].len()), (3, 2));
                    let second = if fortran == "True" { 5.0 } else { 2.0 };
                    assert_eq!(turned[0], [1.0, second], "{version} {header}");
                }
            }
        }
    }

    #[test]
    fn a_forbidden_number_becomes_the_losing_infinity() {
        let body: Vec<u8> =
            [1.5f32, -1.0, f32::NAN, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let bytes = file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }", &body);
        let read =
            |forbid, minimize| numbers(&bytes, Reading { forbid: Some(forbid), minimize }).unwrap();
        assert_eq!(read(-1.0, false)[0], [1.5, f64::NEG_INFINITY]);
        assert_eq!(read(-1.0, true)[0], [1.5, f64::INFINITY]);
        assert_eq!(read(f64::NAN, true)[1], [f64::INFINITY, 2.0]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }";
        let body = [0u8; 16];
        let fails = |bytes: &[u8]| format!("{:#}", numbers(bytes, PLAIN).unwrap_err());
        assert!(fails(b"PK\x03\x04 a zip archive").contains("not a .npy file"));
        assert!(fails(b"\x93NU").contains("too short"));
        assert!(fails(&file(9, good, &body)).contains("version 9"));
        assert!(fails(&file(1, good, &body[..9])).contains("7 bytes early"));
        assert!(fails(&file(1, good, &[0; 20])).contains("4 bytes follow"));
        let of = |from: &str, to: &str| fails(&file(1, &good.replace(from, to), &body));
        assert!(of("<f4", "<i8").contains("astype"));
        assert!(of("(2, 2)", "(4,)").contains("1 dimensions"));
        assert!(of("(2, 2)", "(2, x)").contains("not a size"));
        assert!(of("'shape'", "'form'").contains("no `shape`"));
        assert!(of("False", "Maybe").contains("neither True nor False"));
        assert!(of("'<f4'", "[('a', '<f4')]").contains("plain kind"));
        assert!(of("(2, 2)", "(99999999999, 99999999999)").contains("beyond any memory"));
    }
}
