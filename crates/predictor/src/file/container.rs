//! The container of a model file: a first line, a JSON header, named tensors, a checksum over both.
//!
//! ```text
//! muxflow-model 1 crc32=1a2b3c4d header=1234\n
//! { … "tensors": [ {"name": "layer0.weights", "type": "f32", "shape": [13, 64]}, … ] }
//! the tensors' numbers, little-endian, in the order of the header
//! ```

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::error::PredictorError;

/// The version that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;
const MAGIC: &str = "muxflow-model";
/// No tensor of a model is larger.
const MAX_NUMBERS: usize = 1 << 28;

/// Numbers with a shape.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub(super) shape: Vec<usize>,
    pub(super) numbers: Numbers,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Numbers {
    fn len(&self) -> usize {
        match self {
            Numbers::F32(v) => v.len(),
            Numbers::F64(v) => v.len(),
        }
    }
}

/// A header and its tensors.
#[derive(Debug, Clone, Default)]
pub(super) struct Container {
    pub(super) header: Map<String, Value>,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

pub(super) fn refuse(problem: impl Into<String>) -> PredictorError {
    PredictorError::ModelFile { problem: problem.into() }
}

/// CRC-32 as in zlib, bit by bit: files are small and read once.
pub fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|index| {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let mut value = index as u32;
        for _ in 0..8 {
            value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
        }
        value
    });
    !bytes
        .iter()
        .fold(!0, |crc, byte| table[((crc ^ u32::from(*byte)) & 255) as usize] ^ (crc >> 8))
}

impl Container {
    pub(super) fn put_f64(&mut self, name: &str, shape: &[usize], values: Vec<f64>) {
        let tensor = Tensor { shape: shape.to_vec(), numbers: Numbers::F64(values) };
        self.tensors.insert(name.to_owned(), tensor);
    }

    pub(super) fn put_f32(&mut self, name: &str, shape: &[usize], values: Vec<f32>) {
        let tensor = Tensor { shape: shape.to_vec(), numbers: Numbers::F32(values) };
        self.tensors.insert(name.to_owned(), tensor);
    }

    fn tensor(&self, name: &str, shape: &[Option<usize>]) -> Result<&Tensor, PredictorError> {
        let tensor =
            self.tensors.get(name).ok_or_else(|| refuse(format!("tensor `{name}` is missing")))?;
        let fits = tensor.shape.len() == shape.len()
            && tensor.shape.iter().zip(shape).all(|(have, want)| want.is_none_or(|w| w == *have));
        if !fits {
            let want: Vec<String> =
                shape.iter().map(|w| w.map_or("any".to_owned(), |w| w.to_string())).collect();
            return Err(refuse(format!(
                "tensor `{name}` has shape {:?}, but this model needs [{}]",
                tensor.shape,
                want.join(", ")
            )));
        }
        Ok(tensor)
    }

    /// A tensor of doubles of this shape; `None` in the shape is free.
    pub(super) fn f64(
        &self,
        name: &str,
        shape: &[Option<usize>],
    ) -> Result<&[f64], PredictorError> {
        match &self.tensor(name, shape)?.numbers {
            Numbers::F64(values) if values.iter().all(|v| !v.is_nan()) => Ok(values),
            _ => Err(refuse(format!("tensor `{name}` is not made of doubles that are numbers"))),
        }
    }

    /// A tensor of floats of this shape.
    pub(super) fn f32(
        &self,
        name: &str,
        shape: &[Option<usize>],
    ) -> Result<&[f32], PredictorError> {
        match &self.tensor(name, shape)?.numbers {
            Numbers::F32(values) if values.iter().all(|v| v.is_finite()) => Ok(values),
            _ => Err(refuse(format!("tensor `{name}` is not made of finite floats"))),
        }
    }

    /// A text of the header.
    pub(super) fn text(&self, key: &str) -> Result<&str, PredictorError> {
        let value = self.header.get(key).and_then(Value::as_str);
        value.ok_or_else(|| refuse(format!("the header has no text `{key}`")))
    }

    /// A list of texts of the header.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<String>, PredictorError> {
        let list = self.header.get(key).and_then(Value::as_array).and_then(|list| {
            list.iter().map(|v| v.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        list.ok_or_else(|| refuse(format!("the header has no list of texts `{key}`")))
    }

    /// A count of the header.
    pub(super) fn count(&self, key: &str) -> Result<u64, PredictorError> {
        let value = self.header.get(key).and_then(Value::as_u64);
        value.ok_or_else(|| refuse(format!("the header has no count `{key}`")))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut header = self.header.clone();
        let list: Vec<Value> = self
            .tensors
            .iter()
            .map(|(name, tensor)| {
                let kind = match tensor.numbers {
                    Numbers::F32(_) => "f32",
                    Numbers::F64(_) => "f64",
                };
                json!({ "name": name, "type": kind, "shape": tensor.shape })
            })
            .collect();
        header.insert("tensors".to_owned(), Value::Array(list));
        let header = Value::Object(header).to_string();
        let mut body = header.clone().into_bytes();
        for tensor in self.tensors.values() {
            match &tensor.numbers {
                Numbers::F32(v) => body.extend(v.iter().flat_map(|x| x.to_le_bytes())),
                Numbers::F64(v) => body.extend(v.iter().flat_map(|x| x.to_le_bytes())),
            }
        }
        let crc = crc32(&body);
        let mut bytes =
            format!("{MAGIC} {VERSION} crc32={crc:08x} header={}\n", header.len()).into_bytes();
        bytes.extend(body);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, PredictorError> {
        let (header_length, body) = first_line(bytes)?;
        let (header, mut rest) = body
            .split_at_checked(header_length)
            .ok_or_else(|| refuse("the file ends inside the header; it is cut short"))?;
        let header: Value = serde_json::from_slice(header)
            .map_err(|error| refuse(format!("the header is not JSON: {error}")))?;
        let Value::Object(header) = header else { return Err(refuse("the header is no object")) };
        let list = header.get("tensors").and_then(Value::as_array).cloned().unwrap_or_default();
        let mut tensors = BTreeMap::new();
        for entry in &list {
            let (name, tensor, left) = read_tensor(entry, rest)?;
            rest = left;
            tensors.insert(name, tensor);
        }
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes follow the last tensor", rest.len())));
        }
        Ok(Container { header, tensors })
    }
}

/// Checks the first line and the checksum; the length of the header, and all that follows.
fn first_line(bytes: &[u8]) -> Result<(usize, &[u8]), PredictorError> {
    let not_ours = || refuse(format!("it does not start with `{MAGIC}`; is it a model file?"));
    let end = bytes.iter().take(100).position(|&b| b == b'\n').ok_or_else(not_ours)?;
    let line = std::str::from_utf8(&bytes[..end]).map_err(|_| not_ours())?;
    let words: Vec<&str> = line.split(' ').collect();
    if words.first() != Some(&MAGIC) {
        return Err(not_ours());
    }
    let version: u32 = words.get(1).and_then(|w| w.parse().ok()).ok_or_else(not_ours)?;
    if version != VERSION {
        return Err(refuse(format!(
            "it has format version {version}, this program reads version {VERSION}; train it again or use the program that wrote it"
        )));
    }
    let broken = || refuse("its first line is damaged; restore the file or train it again");
    let [_, _, crc, length] = words.as_slice() else { return Err(broken()) };
    let crc = crc.strip_prefix("crc32=").filter(|hex| hex.len() == 8);
    let crc = crc.and_then(|hex| u32::from_str_radix(hex, 16).ok()).ok_or_else(broken)?;
    let length = length.strip_prefix("header=").and_then(|n| n.parse().ok()).ok_or_else(broken)?;
    let body = &bytes[end + 1..];
    if crc32(body) != crc {
        return Err(refuse(
            "its checksum is wrong: the file is damaged or cut short; restore it or train it again",
        ));
    }
    Ok((length, body))
}

fn read_tensor<'a>(
    entry: &Value,
    bytes: &'a [u8],
) -> Result<(String, Tensor, &'a [u8]), PredictorError> {
    let bad = || refuse(format!("the header's tensor {entry} is not understood"));
    let name = entry.get("name").and_then(Value::as_str).ok_or_else(bad)?.to_owned();
    let shape: Vec<usize> = entry
        .get("shape")
        .and_then(Value::as_array)
        .and_then(|list| {
            list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
        })
        .ok_or_else(bad)?;
    let count = shape
        .iter()
        .try_fold(1usize, |product, size| product.checked_mul(*size))
        .filter(|count| *count <= MAX_NUMBERS)
        .ok_or_else(bad)?;
    let size = match entry.get("type").and_then(Value::as_str) {
        Some("f32") => 4,
        Some("f64") => 8,
        _ => return Err(bad()),
    };
    let (own, rest) = bytes
        .split_at_checked(count * size)
        .ok_or_else(|| refuse(format!("the file ends inside tensor `{name}`; it is cut short")))?;
    let numbers = if size == 4 {
        Numbers::F32(own.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    } else {
        Numbers::F64(own.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect())
    };
    debug_assert_eq!(numbers.len(), count);
    Ok((name, Tensor { shape, numbers }, rest))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
    }
}
