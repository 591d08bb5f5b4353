//! PTX text into statements: no meaning yet.

use super::ins::Variable;

/// A statement inside a kernel.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Statement {
    Label(String),
    /// `.reg .f32 %f<5>` and single registers.
    Register {
        ty: String,
        name: String,
        count: Option<usize>,
    },
    /// `.shared` or `.local` array.
    Array {
        space: String,
        align: usize,
        bytes: usize,
        name: String,
        external: bool,
    },
    Instruction {
        guard: Option<(String, bool)>,
        op: String,
        operands: Vec<String>,
    },
    /// `{` or `}`: registers may be named again inside.
    Open,
    Close,
}

/// A kernel as written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub name: String,
    /// Alignment, bytes, name.
    pub params: Vec<(usize, usize, String)>,
    pub max_threads: u32,
    pub body: Result<Vec<Statement>, String>,
}

/// A whole text.
#[derive(Debug, Default)]
pub(crate) struct Text {
    pub entries: Vec<Entry>,
    pub variables: Vec<Variable>,
    /// Shared arrays outside kernels: align, bytes, name, external.
    pub shared: Vec<(usize, usize, String, bool)>,
    pub target: u32,
}

fn strip_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        let tail = &rest[at..];
        if tail.starts_with("//") {
            rest = tail.find('\n').map_or("", |end| &tail[end..]);
        } else if tail.starts_with("/*") {
            out.push(' ');
            rest = tail.find("*/").map_or("", |end| &tail[end + 2..]);
        } else {
            out.push('/');
            rest = &tail[1..];
        }
    }
    out.push_str(rest);
    out
}

/// Reads the module level.
pub(crate) fn parse(source: &str) -> Result<Text, String> {
    let clean = strip_comments(source);
    let mut text = Text::default();
    if !clean.contains(".version") {
        return Err("not PTX: there is no .version".to_owned());
    }
    if let Some(at) = clean.find("sm_") {
        let digits: String = clean[at + 3..].chars().take_while(char::is_ascii_digit).collect();
        text.target = digits.parse().unwrap_or(0);
    }
    let mut rest = clean.as_str();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Ok(text);
        }
        if ["version", "target", "address_size", "file"]
            .iter()
            .any(|d| rest[1..].starts_with(d) && rest.starts_with('.'))
        {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
            continue;
        }
        // A declaration ends at `;`, a kernel or function at its closing brace.
        let stop = rest.find([';', '{']).ok_or("the text ends inside a declaration")?;
        let head = &rest[..stop];
        let words: Vec<&str> = head.split_whitespace().collect();
        if words.contains(&".entry") || words.contains(&".func") {
            if rest.as_bytes()[stop] == b';' {
                rest = &rest[stop + 1..];
                continue;
            }
            let end = matching_brace(rest, stop)?;
            if words.contains(&".entry") {
                text.entries.push(entry(head, &rest[stop + 1..end]));
            }
            rest = &rest[end + 1..];
        } else if words.iter().any(|w| w.starts_with(".section")) {
            rest = &rest[matching_brace(rest, stop)? + 1..];
        } else {
            // Initialisers hold braces.
            let end = rest.find(';').ok_or("a variable without end")?;
            variable(&rest[..end], &mut text)?;
            rest = &rest[end + 1..];
        }
    }
}

fn matching_brace(text: &str, open: usize) -> Result<usize, String> {
    let mut depth = 0;
    for (i, byte) in text.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Ok(i);
                }
            }
            _ => {}
        }
    }
    Err("a brace is not closed".to_owned())
}

fn type_bytes(name: &str) -> Option<usize> {
    super::ins::Ty::from_name(name.trim_start_matches('.')).map(super::ins::Ty::bytes)
}

/// `.align 4 .b8 name[64]` → (align, bytes, name, no size given).
fn declarator(words: &[&str]) -> Result<(usize, usize, String, bool), String> {
    let mut align = 0;
    let mut element = 0;
    let mut vector = 1;
    let mut i = 0;
    while i < words.len() {
        let word = words[i];
        if word == ".align" {
            align = words.get(i + 1).and_then(|w| w.parse().ok()).ok_or("bad .align")?;
            i += 2;
            continue;
        }
        if let Some(bytes) = type_bytes(word) {
            element = bytes;
        } else if word == ".v2" || word == ".v4" {
            vector = if word == ".v2" { 2 } else { 4 };
        } else if !word.starts_with('.') {
            let rest = words[i..].concat();
            let (name, dims) = rest
                .split_once('[')
                .map_or((rest.as_str(), None), |(n, d)| (n, Some(d.to_owned())));
            let mut count = 1;
            let mut external = false;
            if let Some(dims) = dims {
                for dim in dims.split('[') {
                    let digits = dim.trim_end_matches(']');
                    external |= digits.is_empty();
                    count *= digits.parse().unwrap_or(0);
                }
            }
            if element == 0 {
                return Err(format!("`{name}` has no type"));
            }
            let bytes = element * vector * count;
            return Ok((align.max(element), bytes, name.to_owned(), external));
        }
        i += 1;
    }
    Err(format!("cannot read the declaration `{}`", words.join(" ")))
}

fn variable(text: &str, module: &mut Text) -> Result<(), String> {
    let (head, init) = text.split_once('=').map_or((text, None), |(h, i)| (h, Some(i)));
    let words: Vec<&str> = head.split_whitespace().collect();
    if !words.iter().any(|w| matches!(*w, ".global" | ".const" | ".shared")) {
        // Directives that mean nothing here, such as .alias or .pragma.
        return Ok(());
    }
    let (align, bytes, name, external) = declarator(&words)?;
    if words.contains(&".shared") {
        module.shared.push((align, bytes, name, external));
        return Ok(());
    }
    let element = words.iter().find_map(|w| type_bytes(w)).unwrap_or(1);
    let float = words.iter().any(|w| *w == ".f32" || *w == ".f64");
    let mut data = Vec::new();
    for item in init.unwrap_or("").split(['{', '}', ',']).map(str::trim).filter(|i| !i.is_empty()) {
        let bits = immediate(item).ok_or_else(|| format!("`{name}`: cannot read `{item}`"))?;
        let bits = if float && element == 4 && !item.starts_with("0f") {
            u64::from((f64::from_bits(bits) as f32).to_bits())
        } else {
            bits
        };
        data.extend_from_slice(&bits.to_le_bytes()[..element]);
    }
    module.variables.push(Variable { name, bytes: bytes.max(data.len()), init: data, address: 0 });
    Ok(())
}

/// A number as bits: integers, `0f3F800000`, `0d...`, decimals as f64 bits.
pub(crate) fn immediate(text: &str) -> Option<u64> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |d| (true, d));
    if let Some(hex) = digits.strip_prefix("0f").or_else(|| digits.strip_prefix("0F")) {
        let bits = u32::from_str_radix(hex, 16).ok()?;
        return Some(u64::from(if negative { bits ^ 1 << 31 } else { bits }));
    }
    if let Some(hex) = digits.strip_prefix("0d").or_else(|| digits.strip_prefix("0D")) {
        let bits = u64::from_str_radix(hex, 16).ok()?;
        return Some(if negative { bits ^ 1 << 63 } else { bits });
    }
    let digits = digits.trim_end_matches(['U', 'u']);
    let value = if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        u64::from_str_radix(hex, 16).ok()?
    } else if digits.contains('.') || digits.contains('e') {
        let value: f64 = digits.parse().ok()?;
        return Some((if negative { -value } else { value }).to_bits());
    } else {
        digits.parse().ok()?
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

fn entry(head: &str, body: &str) -> Entry {
    let after = head.split_once(".entry").map_or("", |(_, a)| a);
    let (name, rest) = after.split_once('(').unwrap_or((after, ""));
    // Without parameters a directive may follow the name.
    let name = name.split_whitespace().next().unwrap_or("").to_owned();
    let (list, directives) = rest.rsplit_once(')').unwrap_or(("", rest));
    let mut params = Vec::new();
    let mut failed = None;
    for param in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        // `.param .u64 .ptr .align 8 name`: the pointer's own alignment is not the parameter's.
        let words: Vec<&str> = param.split_whitespace().collect();
        let words: Vec<&str> = match words.iter().position(|w| *w == ".ptr") {
            Some(at) => [&words[..at], &words[words.len() - 1..]].concat(),
            None => words,
        };
        match declarator(&words) {
            Ok((align, bytes, name, _)) => params.push((align, bytes, name)),
            Err(error) => failed = Some(error),
        }
    }
    let mut max_threads = 0;
    let words: Vec<&str> =
        directives.split([' ', '\n', '\t', '\r', ',']).filter(|w| !w.is_empty()).collect();
    if let Some(at) = words.iter().position(|w| *w == ".maxntid" || *w == ".reqntid") {
        let sizes = words[at + 1..].iter().map_while(|w| w.parse::<u32>().ok());
        max_threads = sizes.product();
    }
    let body = match failed {
        Some(error) => Err(error),
        None => statements(body),
    };
    Entry { name, params, max_threads, body }
}

fn statements(body: &str) -> Result<Vec<Statement>, String> {
    let mut out = Vec::new();
    let mut rest = body.trim_start();
    while !rest.is_empty() {
        if let Some(tail) = rest.strip_prefix('{') {
            out.push(Statement::Open);
            rest = tail.trim_start();
            continue;
        }
        if let Some(tail) = rest.strip_prefix('}') {
            out.push(Statement::Close);
            rest = tail.trim_start();
            continue;
        }
        if rest.starts_with(".loc") || rest.starts_with(".file") {
            rest = rest.find('\n').map_or("", |end| rest[end..].trim_start());
            continue;
        }
        if rest.starts_with(".pragma") {
            rest = rest.find(';').map_or("", |end| rest[end + 1..].trim_start());
            continue;
        }
        let label_end = rest.find(|c: char| !(c.is_alphanumeric() || "_$%".contains(c)));
        if let Some(end) = label_end
            && rest[end..].starts_with(':')
            && !rest[end..].starts_with("::")
        {
            out.push(Statement::Label(rest[..end].to_owned()));
            rest = rest[end + 1..].trim_start();
            continue;
        }
        let end = rest.find(';').ok_or("an instruction without end")?;
        statement(rest[..end].trim(), &mut out)?;
        rest = rest[end + 1..].trim_start();
    }
    Ok(out)
}

fn statement(text: &str, out: &mut Vec<Statement>) -> Result<(), String> {
    if let Some(list) = text.strip_prefix(".reg") {
        let (ty, names) = list.trim().split_once(char::is_whitespace).ok_or("bad .reg")?;
        for name in names.split(',').map(str::trim) {
            let (name, count) = match name.split_once('<') {
                Some((n, c)) => (n, Some(c.trim_end_matches('>').parse().map_err(|_| "bad .reg")?)),
                None => (name, None),
            };
            let ty = ty.trim_start_matches('.').to_owned();
            out.push(Statement::Register { ty, name: name.to_owned(), count });
        }
        return Ok(());
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let space = words.iter().find(|w| matches!(**w, ".shared" | ".local" | ".param"));
    if let Some(space) = space.filter(|_| text.starts_with('.')) {
        let (align, bytes, name, external) = declarator(&words)?;
        let space = space.trim_start_matches('.').to_owned();
        out.push(Statement::Array { space, align, bytes, name, external });
        return Ok(());
    }
    let (guard, rest) = match text.strip_prefix('@') {
        Some(guarded) => {
            let (name, rest) = guarded.split_once(char::is_whitespace).ok_or("bad guard")?;
            let (sense, name) = name.strip_prefix('!').map_or((true, name), |n| (false, n));
            (Some((name.to_owned(), sense)), rest.trim_start())
        }
        None => (None, text),
    };
    let (op, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    out.push(Statement::Instruction {
        guard,
        op: op.to_owned(),
        operands: split_operands(operands),
    });
    Ok(())
}

/// Splits at commas outside braces, brackets and parentheses.
fn split_operands(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut depth = 0;
    let mut current = String::new();
    for c in text.chars() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                out.push(current.trim().to_owned());
                current.clear();
                continue;
            }
            _ => {}
        }
        current.push(c);
    }
    if !current.trim().is_empty() {
        out.push(current.trim().to_owned());
    }
    out
}
