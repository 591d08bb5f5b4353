//! Custom resources as YAML: their definitions, from the Rust types that read them, and objects.

use kube::CustomResourceExt as _;

use crate::resource::{Gpu, Model, Profile};

/// One document per resource, with the names of their files.
pub fn definitions() -> [(&'static str, String); 3] {
    [
        ("gpus.yaml", yaml(&Gpu::crd())),
        ("models.yaml", yaml(&Model::crd())),
        ("profiles.yaml", yaml(&Profile::crd())),
    ]
}

fn yaml<T: serde::Serialize>(object: &T) -> String {
    let mut text =
        String::from("# Generated from crates/kubernetes/src/resource.rs; do not edit.\n");
    append(object, &mut text);
    text
}

/// An object as one of several documents.
pub fn document<T: serde::Serialize>(object: &T) -> String {
    let mut text = String::from("---\n");
    append(object, &mut text);
    text
}

fn append<T: serde::Serialize>(object: &T, text: &mut String) {
    let value = serde_json::to_value(object).unwrap_or_default();
    write(&value, 0, text);
}

/// Block style, strings always quoted as JSON: every line means what it says in any reader.
fn write(value: &serde_json::Value, indent: usize, out: &mut String) {
    use serde_json::Value;
    let pad = "  ".repeat(indent);
    match value {
        Value::Object(map) => {
            for (key, inner) in map.iter().filter(|(_, v)| !v.is_null()) {
                out.push_str(&format!("{pad}{key}:"));
                child(inner, indent, out);
            }
        }
        Value::Array(list) => {
            for inner in list {
                let mut text = String::new();
                write(inner, indent + 1, &mut text);
                let text = if is_leaf(inner) { format!("{inner}\n") } else { text };
                out.push_str(&format!("{pad}- {}", text.trim_start()));
            }
        }
        leaf => out.push_str(&format!("{pad}{leaf}\n")),
    }
}

fn child(value: &serde_json::Value, indent: usize, out: &mut String) {
    if is_leaf(value) {
        out.push_str(&format!(" {value}\n"));
    } else {
        out.push('\n');
        write(value, indent + 1, out);
    }
}

/// Written on one line: scalars, and what is empty.
fn is_leaf(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Object(map) => map.is_empty(),
        serde_json::Value::Array(list) => list.is_empty(),
        _ => true,
    }
}
